"""Slots of shared device memory, in calls with members that not every rank writes for.

No function makes such calls so far; the channel must not depend on that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import uvloop
from device_paths_kit import Driver, PathRank, run_ranks

from asyncdist.backend.calls import call as calls
from asyncdist.backend.calls.members import coalesced
from asyncdist.backend.device.ipc import scratch as ipc_scratch
from asyncdist.backend.device.ipc.path import CudaIpcPath
from asyncdist.reduce_op import ReduceOp
from asyncdist.testing.fake_cuda import FakeRuntime

DEADLINE_S = 60.0
"""Of what takes milliseconds; without progress it would wait forever."""

COUNT = 100


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_scratch, "SMALL_BYTES", 1 << 9)
    monkeypatch.setattr(ipc_scratch, "LARGE_BYTES", 1 << 12)


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


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_givers(seed: int) -> None:
    """Several such operations under way at once, among ordinary ones, at any pace of the device."""
    size, runtime = 2 + seed % 3, FakeRuntime(mode="manual")

    drivers: list[Driver] = []

    async def main(rank: PathRank) -> None:
        if not drivers:
            drivers.append(Driver(runtime, seed))
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

    try:
        loop_factory = (asyncio.new_event_loop, uvloop.new_event_loop)[seed % 2]
        run_ranks(size, CudaIpcPath, main, runtime, loop_factory=loop_factory)
    finally:
        for one in drivers:
            one.stop()
        runtime.close()
