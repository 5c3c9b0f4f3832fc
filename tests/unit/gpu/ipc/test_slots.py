"""Slots of shared device memory: none is written again while somebody reads it, at whatever pace GPUs and ranks work.

Also in calls with members that not every rank writes for. No function makes such calls so far; the channel must not
depend on that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import uvloop
from device_paths_kit import Driver, PathRank, run_ranks

from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.collectives.arguments import call as calls
from asyncdist.collectives.arguments.call import coalesced
from asyncdist.gpu import cuda_events
from asyncdist.gpu.ipc import scratch as ipc_scratch
from asyncdist.gpu.ipc.channel import STREAMS
from asyncdist.gpu.ipc.path import CudaIpcPath
from asyncdist.gpu.ipc.scratch import SMALL_SLOTS
from asyncdist.testing.fake_cuda import FakeRuntime

DEADLINE_S = 60.0
"""Of what takes milliseconds; without progress it would wait forever."""

COUNT = 100


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_scratch, "SMALL_BYTES", 1 << 9)
    monkeypatch.setattr(ipc_scratch, "LARGE_BYTES", 1 << 12)
    monkeypatch.setattr(cuda_events, "POLL_S", math.inf)  # no thread waits: what happens is the test's choice alone


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    yield made
    made.close()


class Gathering:
    """One all_gather for each of `givers`, who gives COUNT elements while the others give none, all in one call."""

    def __init__(self, rank: PathRank, givers: Sequence[int]) -> None:
        self.givers = givers
        self.rows: list[list[Any]] = []
        members = []
        for index, giver in enumerate(givers):
            own = np.full(COUNT if rank.rank == giver else 0, 100 * giver + index, np.float32)
            row = [rank.array(np.zeros(COUNT if other == giver else 0, np.float32)) for other in range(rank.size)]
            members.append(calls.all_gather(row, rank.array(own), rank.rank, rank.size))
            self.rows.append(row)
        self.call = coalesced(members, "", None)

    def check(self) -> None:
        for index, giver in enumerate(self.givers):
            np.testing.assert_array_equal(self.rows[index][giver]._array, np.float32(100 * giver + index))


def big(rank: PathRank) -> Any:
    """An array that takes several chunks."""
    return rank.array(np.ones(5000, np.float32))


def test_a_rank_that_writes_late_is_not_overtaken_by_its_next_operation(runtime: FakeRuntime) -> None:
    """Rank 0 writes nothing until the third member; its next operation must not take the slot that this one needs.

    The other rank's next operation waits for this one's end, so neither would ever end.
    """

    async def main(rank: PathRank) -> None:
        await rank.run(calls.all_reduce(rank.array(np.ones(4, np.float32)), ReduceOp.SUM))
        late, x = Gathering(rank, [1, 1, 0]), big(rank)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(rank.start(late.call), rank.start(calls.all_reduce(x, ReduceOp.SUM)))
        late.check()
        np.testing.assert_array_equal(x._array, 2)

    run_ranks(2, CudaIpcPath, main, runtime)


def test_a_slot_is_not_written_again_before_its_last_content_was_read(runtime: FakeRuntime) -> None:
    """Between the two members that rank 0 gives others write; rank 2 has read nothing when rank 0 comes to the last."""

    async def main(rank: PathRank) -> None:
        await rank.run(calls.all_reduce(rank.array(np.ones(4, np.float32)), ReduceOp.SUM))
        found = Gathering(rank, [0, 1, 1, 3, 0])
        with runtime.use(runtime.new_stream(0)) as _:
            gate = runtime.hold(runtime.current_stream(0)) if rank.rank == 2 else None
            ended = rank.start(found.call)
        if gate is not None:
            for _ in range(100):  # turns in which the others get as far as they can
                await asyncio.sleep(0)
            gate.open()
        async with asyncio.timeout(DEADLINE_S):
            await ended
        found.check()

    run_ranks(4, CudaIpcPath, main, runtime)


def test_what_a_dropped_operation_still_writes_comes_before_what_the_next_does(runtime: FakeRuntime) -> None:
    """Rank 1 has refused it and reads nothing, but at rank 0 it is on a stream already."""

    async def main(rank: PathRank) -> None:
        await rank.run(calls.all_reduce(rank.array(np.ones(4, np.float32)), ReduceOp.SUM))
        dropped, x = rank.array(np.zeros(2000, np.float32)), rank.array(np.full(2000, 1 + rank.rank, np.float32))
        with runtime.use(runtime.new_stream(0)) as _:
            gate = runtime.hold(runtime.current_stream(0))
            if rank.rank == 0:
                rank.start(calls.broadcast(dropped, 0, 0))
                rank.path.drop(0, 1)
            else:
                rank.path.drop(0, rank.skip())
                ended = rank.start(calls.broadcast(x, 0, 1))  # it reads what is there once the gate is open
        if rank.rank == 0:
            ended = rank.start(calls.broadcast(x, 0, 0))
        for turn in range(200):  # in which they get as far as they can
            if turn == 100 * (1 + rank.rank) - 1:
                gate.open()
            await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            await ended
        np.testing.assert_array_equal(x._array, 1)

    run_ranks(2, CudaIpcPath, main, runtime)


@pytest.mark.parametrize("slow_stream", range(STREAMS))
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_rank_is_the_last_to_read_its_own_slot(slow_rank: int, slow_stream: int) -> None:
    """All others are through with an operation; the next one here has another stream, which does not wait."""

    async def main(rank: PathRank, driver: Driver) -> None:
        await rank.run(calls.all_reduce(rank.array(np.ones(4, np.float32)), ReduceOp.SUM))
        if rank.rank == slow_rank:
            driver.keep_slow(rank.path._tags[0].channel._streams[slow_stream])
        works, sums, rows = [], [big(rank) for _ in range(4)], []
        for x in sums:
            rows.append([rank.array(np.zeros(5000, np.float32)) for _ in range(rank.size)])
            works.append(rank.start(calls.all_reduce(x, ReduceOp.SUM)))
            own = rank.array(np.full(5000, 100 + rank.rank, np.float32))
            works.append(rank.start(calls.all_gather(rows[-1], own, rank.rank, rank.size)))
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*works)
        for x, row in zip(sums, rows, strict=True):
            np.testing.assert_array_equal(x._array, rank.size)
            for giver, given in enumerate(row):
                np.testing.assert_array_equal(given._array, 100 + giver)

    run_at_any_pace(2, main)


def test_a_root_is_the_last_to_write_its_own_slot() -> None:
    """Nobody waits for what the root writes, so the others may be through before it has begun to reduce."""
    count = SMALL_SLOTS + STREAMS  # more than there are slots

    async def main(rank: PathRank, driver: Driver) -> None:
        await rank.run(calls.all_reduce(rank.array(np.ones(4, np.float32)), ReduceOp.SUM))
        if rank.rank == 0:
            driver.keep_slow(rank.path._tags[0].channel._streams[1])
        arrays = [rank.array(np.full(COUNT, 1 + number, np.float32)) for number in range(count)]
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(rank.start(calls.reduce(x, 0, ReduceOp.SUM, rank.rank)) for x in arrays))
        for number, x in enumerate(arrays):
            np.testing.assert_array_equal(x._array, (1 + number) * (rank.size if rank.rank == 0 else 1))

    run_at_any_pace(2, main)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_givers(seed: int) -> None:
    """Several such operations under way at once, among ordinary ones, at any pace of the device."""
    size = 2 + seed % 3

    async def main(rank: PathRank, _driver: Driver) -> None:
        generator = np.random.default_rng(seed)
        orders = [[int(one) for one in generator.integers(0, size, generator.integers(1, 9))] for _ in range(6)]
        gatherings = [Gathering(rank, givers) for givers in orders]
        arrays = [big(rank) for _ in orders]
        works = []
        for gathering, x in zip(gatherings, arrays, strict=True):
            works += [rank.start(gathering.call), rank.start(calls.all_reduce(x, ReduceOp.SUM))]
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*works)
        for gathering, x in zip(gatherings, arrays, strict=True):
            gathering.check()
            np.testing.assert_array_equal(x._array, size)

    run_at_any_pace(size, main, seed)


def run_at_any_pace(size: int, main: Callable[[PathRank, Driver], Awaitable[None]], seed: int = 0) -> None:
    """Run `main` on `size` ranks, on a GPU that a Driver runs."""
    runtime = FakeRuntime(mode="manual")
    drivers: list[Driver] = []

    async def driven(rank: PathRank) -> None:
        if not drivers:
            drivers.append(Driver(runtime, seed))
        await main(rank, drivers[0])

    try:
        loop_factory = (asyncio.new_event_loop, uvloop.new_event_loop)[seed % 2]
        run_ranks(size, CudaIpcPath, driven, runtime, loop_factory=loop_factory)
    finally:
        for one in drivers:
            one.stop()
        runtime.close()
