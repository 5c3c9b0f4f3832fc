"""Which thread launches what in NCCL, what an abort waits for, and how temporary memory grows."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import asyncdist as dist
from asyncdist import HashStore, ReduceOp
from asyncdist.errors import DistBackendError, DistError
from asyncdist.gpu.cuda_events import EventSpinner
from asyncdist.gpu.extents import ALIGN_BYTES
from asyncdist.gpu.nccl import channel as nccl_channel
from asyncdist.testing.fake_cuda import FakeCuda, fake_cuda
from asyncdist.transport.spin import Spinner

PATIENCE_S = 60.0


def world() -> dist.ProcessGroup:
    return dist.init_process_group(store=HashStore(), rank=0, world_size=1)


def watched(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[bool]:
    """Whether each call of a method comes from the event loop's thread."""
    seen: list[bool] = []
    original = getattr(owner, name)

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(threading.current_thread() is threading.main_thread())
        return original(self, *arguments, **options)

    monkeypatch.setattr(owner, name, method)
    return seen


async def test_the_first_launch_of_a_communicator_is_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have to connect, and wait for the others, where NCCL was in use before us."""
    with fake_cuda(1, mode="threads") as cuda:
        async with world():
            x = cuda.runtime.array(np.ones(4, np.float32))
            await dist.all_reduce(x)
            launched = watched(monkeypatch, type(cuda.nccl.communicators[0]), "all_reduce")
            await dist.all_reduce(x)
            await dist.all_reduce(x, tag=1)
            await dist.all_reduce(x, tag=1)
    assert launched == [True, False, True]


async def test_kernels_are_compiled_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """PREMUL_SUM's first of each dtype, be it within a list."""
    with fake_cuda(1, mode="threads") as cuda:
        scaled = watched(monkeypatch, type(cuda.runtime), "scale")
        async with world():
            single, double = (cuda.runtime.array(np.ones(4, dtype)) for dtype in (np.float32, np.float64))
            await dist.all_reduce(single)
            for array in (single, single, double, double):
                await dist.all_reduce(array, ReduceOp.PREMUL_SUM(2.0))
            assert single.get()[0] == double.get()[0] == 4
    assert scaled == [False, True, False, True]


async def test_what_nccl_multiplies_itself_needs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda(1, mode="threads", native_premul_sum=True) as cuda:
        async with world():
            x = cuda.runtime.array(np.ones(4, np.float32))
            await dist.all_reduce(x)
            launched = watched(monkeypatch, type(cuda.nccl.communicators[0]), "all_reduce")
            await dist.all_reduce(x, ReduceOp.PREMUL_SUM(2.0))
    assert launched == [True]


async def _abort_while_launching(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, returns: bool) -> list[str]:
    """What happened, in order, when a group was aborted while a thread of ours was in `Nccl.group`."""
    happened: list[str] = []
    inside, leave = threading.Event(), threading.Event()
    reduce, abort = (getattr(type(cuda.nccl.communicators[0]), name) for name in ("all_reduce", "abort"))

    def slow(self: Any, *arguments: Any) -> None:
        inside.set()
        leave.wait(PATIENCE_S)
        reduce(self, *arguments)
        happened.append("launched")

    def aborting(self: Any) -> None:
        happened.append("aborted")
        leave.set()  # that is what an abort is for
        abort(self)

    monkeypatch.setattr(type(cuda.nccl.communicators[0]), "all_reduce", slow)
    monkeypatch.setattr(type(cuda.nccl.communicators[0]), "abort", aborting)
    group = await world()
    work = dist.all_reduce(cuda.runtime.array(np.ones(4, np.float32)), tag=1)
    async with asyncio.timeout(PATIENCE_S):
        while not inside.is_set():  # noqa: ASYNC110 - of what threads do there is no event
            await asyncio.sleep(0.001)
    group.abort("enough")
    if returns:
        leave.set()
    with pytest.raises(DistError):
        await work
    await dist.destroy_process_group()
    return happened


@pytest.mark.parametrize("returns", [True, False])
async def test_an_abort_lets_a_launch_finish_but_not_forever(returns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_channel, "LAUNCH_GRACE_S", PATIENCE_S if returns else 0.01)
    with fake_cuda(1, mode="threads") as cuda:
        async with world():
            await dist.all_reduce(cuda.runtime.array(np.ones(1)))  # so that there is a communicator to be watched
        happened = await _abort_while_launching(cuda, monkeypatch, returns=returns)
    assert sorted(happened[:2]) in (["aborted"], ["aborted", "launched"])
    assert (happened[0] == "launched") is returns


async def test_temporary_memory_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was allocated is less than twice what the largest operation takes."""
    with fake_cuda(1, mode="inline") as cuda:
        allocated: list[int] = []
        allocate = cuda.runtime.allocate

        def counted(nbytes: int, device: int) -> Any:
            allocated.append(nbytes)
            return allocate(nbytes, device)

        monkeypatch.setattr(cuda.runtime, "allocate", counted)
        async with world():
            for mebibytes in range(1, 10):
                x = cuda.runtime.array(np.ones(mebibytes << 18, np.float32))
                y = cuda.runtime.array(np.ones(mebibytes << 18, np.float32))
                await dist.reduce_scatter_tensor(y, x, ReduceOp.PREMUL_SUM(2.0))
    assert allocated == [2 << 20, 4 << 20, 8 << 20, 16 << 20]


async def test_an_abort_that_fails_leaves_no_other_communicator_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several GPUs: what runs on the second must end, and its stream be waited for, before arrays are given up."""
    with fake_cuda(2, mode="threads") as cuda:
        group = await world()
        await dist.all_reduce_multigpu([cuda.runtime.array(np.ones(4, np.float32), device) for device in (0, 1)])
        first, second = cuda.nccl.communicators

        def broken() -> None:
            raise DistBackendError("out of order")

        monkeypatch.setattr(first, "abort", broken)
        group.abort("enough")
        await dist.destroy_process_group()
        assert second.state == "aborted"
        monkeypatch.undo()
        first.abort()


def forget_frames(error: BaseException | None) -> None:
    """Let go of what the functions held that an error came through."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def test_what_a_failed_launch_has_queued_finds_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy waits for the caller's kernels, NCCL refuses what comes after it, and the caller drops the arrays."""
    with fake_cuda(1, mode="threads") as cuda:
        group = await world()
        await dist.all_reduce(cuda.runtime.array(np.ones(1)))

        def refusing(self: Any, *arguments: Any) -> None:
            raise DistBackendError("no")

        monkeypatch.setattr(type(cuda.nccl.communicators[0]), "reduce_scatter", refusing)
        x = cuda.runtime.array(np.ones(4, np.float32))
        gate = cuda.runtime.hold(cuda.runtime.current_stream(0))
        work = dist.reduce_scatter_tensor(cuda.runtime.array(np.ones(4, np.float32)), x, ReduceOp.PREMUL_SUM(2.0))
        async with asyncio.timeout(PATIENCE_S):
            while not work.done():  # noqa: ASYNC110 - others wait for it, too, without keeping its error
                await asyncio.sleep(0.001)
        forget_frames(work.exception())
        alive = weakref.ref(x)
        del work, x
        gc.collect()
        assert alive() is not None
        gate.open()
        await dist.destroy_process_group()
        assert group.closed
        assert not cuda.runtime.failure, cuda.runtime.failure


def test_temporary_memory_of_one_launch_is_apart() -> None:
    """Also where it grows meanwhile; the next launch uses it again."""

    class Channel:
        def __init__(self) -> None:
            self.blocks: list[Any] = []

        def scratch(self, nbytes: int, device: int) -> Any:
            start = 1 << 40 if not self.blocks else self.blocks[-1].pointer + self.blocks[-1].nbytes
            self.blocks.append(SimpleNamespace(pointer=start, nbytes=nbytes))
            return self.blocks[-1]

    channel: Any = Channel()
    scratch = nccl_channel._Scratch(channel, 0)
    first = 0
    for _launch in range(3):
        scratch.used = 0
        parts = sorted((scratch(nbytes), nbytes) for nbytes in (1, 100, 1 << 20, 3 << 20, 7, 5 << 20))
        for (start, nbytes), (following, _) in pairwise(parts):
            assert start + nbytes <= following
        assert all(start % ALIGN_BYTES == 0 for start, _ in parts)
        blocks = len(channel.blocks)
        assert not first or blocks <= first + 1
        first = blocks
    assert sum(block.nbytes for block in channel.blocks) < 2 * channel.blocks[-1].nbytes


async def test_who_awaits_what_is_on_the_gpu_looks_there() -> None:
    """Messages tell of operations on host arrays only; and of the first nobody knows where to look."""
    with fake_cuda(1, mode="threads") as cuda:
        async with world():
            first = dist.all_reduce(cuda.runtime.array(np.ones(4, np.float32)))
            on_host = dist.all_reduce(np.ones(4, np.float32))
            await asyncio.gather(first, on_host)
            later = dist.all_reduce(cuda.runtime.array(np.ones(4, np.float32)))
            await later
            assert first._spinner is None
            assert isinstance(later._spinner, EventSpinner)
            assert isinstance(on_host._spinner, Spinner)


async def test_nobody_looks_where_looking_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_SPIN_US", "0")
    with fake_cuda(1) as cuda:
        async with world():
            await dist.all_reduce(cuda.runtime.array(np.ones(4, np.float32)))
            work = dist.all_reduce(cuda.runtime.array(np.ones(4, np.float32)))
            assert work._spinner is None
            await work


async def test_what_is_over_at_once_is_over_before_the_loop_turns() -> None:
    with fake_cuda(1) as cuda:
        async with world():
            x = cuda.runtime.array(np.ones(4, np.float32))
            await dist.all_reduce(x)
            turns: list[int] = []
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(turns.append, 1)
            work = dist.all_reduce(x)
            spinner = work._spinner
            assert isinstance(spinner, EventSpinner)
            assert spinner.look(work)
            assert work.done()
            assert not turns
