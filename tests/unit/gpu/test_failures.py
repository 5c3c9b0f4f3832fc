"""What goes wrong with arrays on a GPU: refusals, differences, ranks that die, aborts while copies are under way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_paths_kit import PATIENCE_S, PathRank, everybody, run_ranks, values
from waiting import eventually

from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.collectives.arguments import call as calls
from asyncdist.errors import CollectiveMismatchError, DistBackendError, PeerLostError
from asyncdist.gpu.ipc import scratch as ipc_scratch
from asyncdist.gpu.ipc.channel import AHEAD
from asyncdist.gpu.ipc.path import CudaIpcPath
from asyncdist.gpu.path import DevicePath
from asyncdist.gpu.staged import pipeline as staged_pipeline
from asyncdist.gpu.staged.path import StagedPath
from asyncdist.testing.fake_cuda import FakeRuntime
from asyncdist.testing.fake_queues import FakeEvent

PATHS = (StagedPath, CudaIpcPath)
paths = pytest.mark.parametrize("path", PATHS)
LONG = 5000
"""Elements of a vector of several chunks."""


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_scratch, "SMALL_BYTES", 1 << 11)
    monkeypatch.setattr(ipc_scratch, "LARGE_BYTES", 1 << 12)
    monkeypatch.setattr(staged_pipeline, "SMALL_BUFFER_BYTES", 1 << 10)
    monkeypatch.setattr(staged_pipeline, "BUFFER_BYTES", 1 << 12)


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    made = FakeRuntime(mode="threads")
    yield made
    made.close()


class Meeting:
    """Ranks of one process wait for each other, beside what is tested."""

    def __init__(self, size: int) -> None:
        self._barrier = asyncio.Barrier(size)

    async def wait(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._barrier.wait()


async def failure_of(future: asyncio.Future[None]) -> BaseException:
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait([future])
    error = future.exception()
    assert error is not None
    return error


async def check_sum(rank: PathRank, count: int = 100, tag: int = 0) -> None:
    x = rank.array(values(rank.rank, count))
    await rank.run(calls.all_reduce(x, ReduceOp.SUM), tag)
    np.testing.assert_array_equal(x._array, sum(everybody(rank.size, count)))


def some_call(rank: PathRank, kind: str, count: int) -> Any:
    x = rank.array(values(rank.rank, count))
    if kind == "broadcast":
        return calls.broadcast(x, 0, rank.rank)
    if kind == "gather":
        places = [rank.array(np.zeros(count, np.float32)) for _ in range(rank.size)]
        return calls.gather(x, places if rank.rank == 0 else None, 0, rank.rank, rank.size)
    return calls.all_reduce(x, ReduceOp.SUM)


@paths
@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "gather"])
@pytest.mark.parametrize("count", [10, LONG])
@pytest.mark.parametrize("warm", [False, True])
def test_refused_on_one_rank(runtime: FakeRuntime, path: type[DevicePath], kind: str, count: int, warm: bool) -> None:
    """The others forget it as well, whatever they have done of it, and later operations are right."""
    meetings: list[Meeting] = []

    async def main(rank: PathRank) -> None:
        if not meetings:
            meetings.append(Meeting(rank.size))
        if warm:
            await check_sum(rank)
        for turn in range(6):
            number = rank._numbers.get(0, 0)
            if rank.rank == (turn + 1) % rank.size:
                rank.skip()
            else:
                begun = rank.start(some_call(rank, kind, count))
                if turn % 2:
                    await asyncio.wait([begun], timeout=0.01)
            if turn % 3:
                await meetings[0].wait()
            rank.path.drop(0, number)
            if not turn % 2:
                await check_sum(rank, LONG)
        await check_sum(rank)
        await check_sum(rank, LONG)

    run_ranks(3, path, main, runtime)


@paths
@pytest.mark.parametrize("good", [0, 3])
def test_a_gpu_that_fails_in_the_middle(
    runtime: FakeRuntime, path: type[DevicePath], good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kernel's failure every call of CUDA fails, events' too: the operation does, and nothing else happens."""
    record, caller = FakeEvent.record, runtime.current_stream(0).handle
    left = [10**9]

    def failing(self: FakeEvent, stream: Any) -> None:
        if stream.handle != caller:
            left[0] -= 1
            if left[0] < 0:
                raise DistBackendError("cudaErrorIllegalAddress")
        record(self, stream)

    monkeypatch.setattr(FakeEvent, "record", failing)

    async def main(rank: PathRank) -> None:
        await check_sum(rank, LONG)
        left[0] = good
        error = await failure_of(rank.start(calls.all_reduce(rank.array(values(0, LONG)), ReduceOp.SUM)))
        assert "cudaErrorIllegalAddress" in str(error)
        left[0] = 10**9  # so that what was queued by then can be waited for

    run_ranks(1, path, main, runtime)


@paths
def test_dropped_before_it_is_issued(runtime: FakeRuntime, path: type[DevicePath]) -> None:
    async def main(rank: PathRank) -> None:
        await check_sum(rank)
        rank.path.drop(0, rank._numbers[0])
        rank.path.drop(0, rank._numbers[0])  # heard of twice
        rank.skip()
        await check_sum(rank)

    run_ranks(2, path, main, runtime)


@paths
@pytest.mark.parametrize("count", [10, LONG])
def test_different_operations(runtime: FakeRuntime, path: type[DevicePath], count: int) -> None:
    async def main(rank: PathRank) -> None:
        await check_sum(rank)
        op = (ReduceOp.SUM, ReduceOp.MAX)[rank.rank]
        error = await failure_of(rank.start(calls.all_reduce(rank.array(values(0, count)), op)))
        assert isinstance(error, CollectiveMismatchError)
        assert error.peer == 1 - rank.rank
        await check_sum(rank)  # whether the group goes on is not for the path to say

    run_ranks(2, path, main, runtime)


@paths
@pytest.mark.parametrize("counts", [(LONG, LONG + 1), (100, 0), (0, 100), (100, LONG)])
def test_pieces_of_different_lengths(runtime: FakeRuntime, path: type[DevicePath], counts: tuple[int, int]) -> None:
    """Rank 0 sends another length to rank 1 than that expects."""
    found: list[int] = []

    async def main(rank: PathRank) -> None:
        lengths = [7, 7]
        lengths[1 - rank.rank] = counts[rank.rank]
        into = [rank.array(np.zeros(count, np.float32)) for count in ([7, 9] if rank.rank == 0 else lengths)]
        sent = [rank.array(np.ones(count, np.float32)) for count in (lengths if rank.rank == 0 else [9, 7])]
        future = rank.start(calls.all_to_all(into, sent, rank.rank, 2))
        if rank.rank == 1:
            assert isinstance(await failure_of(future), CollectiveMismatchError)
            found.append(1)
        else:
            await eventually(lambda: found)  # dropped before, it might never be told
            rank.path.drop(0, 0)
        await check_sum(rank)

    run_ranks(2, path, main, runtime)


@paths
@pytest.mark.parametrize("count", [10, LONG])
@pytest.mark.parametrize("warm", [False, True])
def test_a_rank_dies(runtime: FakeRuntime, path: type[DevicePath], count: int, warm: bool) -> None:
    """Nothing waits on the device for a rank that is dead; who is missing can be told."""
    begun: set[int] = set()
    told: set[int] = set()

    async def main(rank: PathRank) -> None:
        if warm:
            await check_sum(rank)
        if rank.rank == 2:
            await eventually(lambda: begun == {0, 1})
            await asyncio.sleep(0.02)
            rank.world.kill(2)
            rank.path.abort(DistBackendError("dead"))
            return
        future = rank.start(calls.all_reduce(rank.array(values(rank.rank, count)), ReduceOp.SUM))
        begun.add(rank.rank)
        await eventually(lambda: 2 in rank.path.waiting_for(0, int(warm)) or future.done())
        error = await failure_of(future)
        assert isinstance(error, PeerLostError)
        assert error.rank == 2
        told.add(rank.rank)
        await eventually(lambda: told == {0, 1})  # who leaves before is missed as well
        rank.path.abort(error)
        await eventually(lambda: all(queue.idle for queue in list(runtime.scheduler.queues)))

    run_ranks(3, path, main, runtime)


@paths
@pytest.mark.parametrize("count", [10, LONG])
def test_abort_while_copies_wait_for_the_caller(runtime: FakeRuntime, path: type[DevicePath], count: int) -> None:
    """Memory that copies use is not freed before they have ended, however late that is."""

    async def main(rank: PathRank) -> None:
        await check_sum(rank, count)
        gate = runtime.hold(runtime.current_stream(0)) if rank.rank == 0 else None
        future = rank.start(calls.all_reduce(rank.array(values(rank.rank, count)), ReduceOp.SUM))
        await asyncio.sleep(0.01)
        rank.around.exchange.abort(DistBackendError("enough"))
        rank.path.abort(DistBackendError("enough"))
        assert not future.done()
        if gate is not None:
            asyncio.get_running_loop().call_later(0.05, gate.open)

    run_ranks(2, path, main, runtime)


def test_kernels_are_compiled_off_the_loop(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each operation and dtype, however many operations of it wait for that; what fails says so."""
    compiled: list[Any] = []
    loop_thread = threading.get_ident()

    def prepare(op: ReduceOp, dtype: Any, sources: int, device: int) -> None:
        assert threading.get_ident() != loop_thread
        compiled.append((op, dtype.name, sources))
        if op is ReduceOp.MAX:
            raise DistBackendError("does not compile")

    monkeypatch.setattr(runtime, "prepare_reduce", prepare)
    monkeypatch.setattr(runtime, "prepare_scale", lambda dtype, device: compiled.append(("scale", dtype.name, 1)))

    async def main(rank: PathRank) -> None:
        ops = [ReduceOp.SUM, ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PREMUL_SUM(2), ReduceOp.PREMUL_SUM(3)]
        works = [rank.start(calls.all_reduce(rank.array(values(rank.rank, 9)), op)) for op in ops]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*works)
        await check_sum(rank)

    run_ranks(2, CudaIpcPath, main, runtime)
    sums, largest = (ReduceOp.SUM, "float32", 2), (ReduceOp.MAX, "float32", 2)
    assert sorted(compiled, key=repr) == sorted([*[sums] * 4, *[largest] * 2, *[("scale", "float32", 1)] * 2], key=repr)


@paths
def test_many_under_way(runtime: FakeRuntime, path: type[DevicePath]) -> None:
    async def main(rank: PathRank) -> None:
        arrays = [rank.array(np.full(16, index + rank.rank, np.int64)) for index in range(300)]
        futures = [rank.start(calls.all_reduce(array, ReduceOp.SUM)) for array in arrays]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*futures)
        for index, array in enumerate(arrays):
            np.testing.assert_array_equal(array._array, np.full(16, 2 * index + 1))

    run_ranks(2, path, main, runtime)


@paths
def test_who_moves_nothing_does_not_run_ahead(runtime: FakeRuntime, path: type[DevicePath]) -> None:
    """Operations without elements end at once; a rank that issues thousands of them drowns nobody in signals."""
    checked: list[int] = []

    async def main(rank: PathRank) -> None:
        await check_sum(rank)
        if rank.rank == 0:
            await eventually(lambda: checked)
        empty = rank.array(np.zeros(0, np.float32))
        futures = [rank.start(calls.all_reduce(empty, ReduceOp.SUM)) for _ in range(1500)]
        if path is CudaIpcPath and rank.rank:
            await asyncio.sleep(0.01)
            assert sum(future.done() for future in futures) <= AHEAD
        checked.append(rank.rank)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*futures)
        await check_sum(rank)

    run_ranks(2, path, main, runtime)


@paths
def test_tags_do_not_wait_for_each_other(runtime: FakeRuntime, path: type[DevicePath]) -> None:
    """Rank 1 issues those of two tags the other way round, more than there are buffers for."""

    async def main(rank: PathRank) -> None:
        futures: list[asyncio.Future[None]] = []
        for tag in (5, 9) if rank.rank else (9, 5):
            sums = [calls.all_reduce(rank.array(values(rank.rank, LONG)), ReduceOp.SUM) for _ in range(20)]
            futures += [rank.start(call, tag) for call in sums]
            await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*futures)

    run_ranks(2, path, main, runtime)


def test_who_writes_waits_for_readers_before_it_leaves(runtime: FakeRuntime) -> None:
    """The root of a broadcast is done, and may close, long before the others begin to read."""
    closed: list[int] = []

    async def main(rank: PathRank) -> None:
        await check_sum(rank)
        x = rank.array(values(rank.rank, 50))
        if rank.rank == 0:
            await rank.run(calls.broadcast(x, 0, 0))
            asyncio.get_running_loop().call_soon(closed.append, 0)
            return
        await eventually(lambda: closed)
        await asyncio.sleep(0.02)
        await rank.run(calls.broadcast(x, 0, 1))
        np.testing.assert_array_equal(x._array, values(0, 50))

    run_ranks(2, CudaIpcPath, main, runtime)


def test_who_is_aborted_keeps_nobody_from_closing(runtime: FakeRuntime) -> None:
    """Rank 1 drops what it has begun without a word, but says that it has closed our memory."""

    async def main(rank: PathRank) -> None:
        await check_sum(rank)
        x = rank.array(values(rank.rank, 50))
        if rank.rank == 0:
            await rank.run(calls.broadcast(x, 0, 0))
            started = rank.loop.time()
            await rank.close()
            assert rank.loop.time() - started < PATIENCE_S / 2
        else:
            await asyncio.sleep(0.02)
            await rank.abort(DistBackendError("enough"))

    run_ranks(2, CudaIpcPath, main, runtime)


def test_dtypes_without_kernels_go_through_the_host(runtime: FakeRuntime) -> None:
    async def main(rank: PathRank) -> None:
        for dtype in (np.float32, ml_dtypes.float8_e4m3fnuz):
            x = rank.array(np.full(5, 2, dtype))
            await rank.run(calls.all_reduce(x, ReduceOp.SUM))
            assert (x._array == 4).all()
            await rank.run(calls.broadcast(x, 1, rank.rank))
        assert rank.path._tags[0].channel._last == 3
        assert set(rank.path._staged._pipelines) == {0}

    run_ranks(2, CudaIpcPath, main, runtime)


@pytest.mark.parametrize("what", ["allocate", "ipc_handle", "ipc_open"])
def test_without_ipc_everything_goes_through_the_host(
    runtime: FakeRuntime, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one rank cannot, none does."""
    real, failures = getattr(runtime, what), []

    def sometimes(*arguments: Any) -> Any:
        if not failures:
            failures.append(arguments)
            raise DistBackendError("not here")
        return real(*arguments)

    monkeypatch.setattr(runtime, what, sometimes)

    async def main(rank: PathRank) -> str:
        await check_sum(rank)
        await check_sum(rank, LONG)
        return str(rank.path.describe())

    assert run_ranks(3, CudaIpcPath, main, runtime) == ["ipc (1 of 1 tags staged)"] * 3
    assert failures
    assert not [block for block in runtime.memory.blocks() if block.nbytes == (8 << 11) + (2 << 12)]


def test_an_abort_while_memory_is_made_leaves_none(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    real, entered, go_on = runtime.allocate, threading.Event(), threading.Event()
    made: list[Any] = []

    def slowly(nbytes: int, device: int) -> Any:
        entered.set()
        go_on.wait(PATIENCE_S)
        made.append(real(nbytes, device))
        return made[-1]

    monkeypatch.setattr(runtime, "allocate", slowly)

    async def main(rank: PathRank) -> None:
        rank.start(calls.all_reduce(rank.array(values(rank.rank, 9)), ReduceOp.SUM))
        await eventually(entered.is_set)
        await rank.abort(DistBackendError("enough"))
        go_on.set()
        await eventually(lambda: made and all(memory._block.freed for memory in made))

    run_ranks(2, CudaIpcPath, main, runtime)


def test_all_memory_is_given_back(runtime: FakeRuntime) -> None:
    async def main(rank: PathRank) -> None:
        for tag in (0, 3):
            await check_sum(rank, LONG, tag)

    before = len(runtime.memory.blocks())
    for path in PATHS:
        run_ranks(2, path, main, runtime)
    arrays = 4 * LONG  # the caller's: a thread that is about to end may still know one

    def left() -> list[Any]:
        return [
            block for block in runtime.memory.blocks()[before:] if block.nbytes >= 1 << 10 and block.nbytes != arrays
        ]

    until_s = time.monotonic() + PATIENCE_S  # what was shared is freed in threads, which nobody waits for
    while left() and time.monotonic() < until_s:
        time.sleep(0.001)
    assert not left()
