"""Several ranks on one GPU, and ranks without NCCL: the paths a group finds by itself, used as its users do."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import GpuRank, equal, failure_of, run_gpu, values_of
from waiting import eventually

import asyncdist as dist
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.cuda import provider
from asyncdist.errors import CollectiveMismatchError, CollectiveTimeoutError, GroupAbortedError, PeerLostError


def on_one(at: GpuRank, values: Any) -> Any:
    """An array on the GPU that all ranks share."""
    return at.cuda.runtime.array(values, 0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_more_ranks_than_gpus_take_ipc(size: int, loop: str) -> None:
    async def main(at: GpuRank) -> str:
        for count in (1, 1000, 300_000):
            parts = [values_of(rank, count, np.float32) for rank in range(size)]
            x = on_one(at, parts[at.rank])
            assert await dist.all_reduce(x) is x
            assert equal(x, sum(parts))
        y = on_one(at, np.zeros((size, 3), np.int64))
        await dist.all_gather_into_tensor(y, on_one(at, np.full(3, at.rank)))
        assert equal(y, np.arange(size)[:, None] * np.ones(3))
        return repr(at.group)

    assert all(text.find(" path ipc") > 0 for text in run_gpu(size, main, devices=1, loop=loop))


@pytest.mark.parametrize(("devices", "path"), [(1, "ipc"), (2, "staged")])
def test_nccl_on_some_ranks_only(devices: int, path: str) -> None:
    """What a rank lacks is no wish: with the default backends all draw the same conclusion."""

    async def main(at: GpuRank) -> None:
        x = at.cuda.runtime.array(np.ones(3, np.float32), at.rank % devices)
        nccl = at.cuda.nccl if at.rank else None
        with provider.override(provider.Provider(at.cuda.runtime, nccl, "not installed")):
            work = dist.all_reduce(x, group=at.group)
        await work
        assert equal(x, [2, 2, 2])
        assert f"path {path}" in repr(at.group)

    run_gpu(2, main, devices=devices)


def test_ranks_on_one_gpu_take_ipc_without_nccl() -> None:
    async def main(at: GpuRank) -> str:
        x = on_one(at, np.ones(3, np.float32))
        await dist.all_reduce(x, group=at.group)
        assert equal(x, [3, 3, 3])
        return repr(at.group)

    assert all(text.find(" path ipc") > 0 for text in run_gpu(3, main, devices=1, nccl=False))


@pytest.mark.parametrize("how", ["no nccl", "backend", "variable"])
def test_paths_through_the_host(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "variable":
        monkeypatch.setenv("ASYNCDIST_CUDA_PATH", "staged")

    async def main(at: GpuRank) -> str:
        x = at.array(np.full((2, 3), at.rank + 1.0))
        await dist.all_reduce(x, group=at.group)
        assert equal(x, np.full((2, 3), 6.0))
        return repr(at.group)

    found = run_gpu(3, main, nccl=how != "no nccl", backend="cpu:aio,cuda:aio" if how == "backend" else None)
    assert all(text.find(" path staged") > 0 for text in found)


@pytest.mark.parametrize("path", ["ipc", "staged"])
def test_what_only_the_host_can(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes and functions of the user's go through the host whatever the path."""
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def main(at: GpuRank) -> None:
        x = on_one(at, np.full(5, at.rank + 1))
        await dist.scan(x)
        assert equal(x, np.full(5, (at.rank + 1) * (at.rank + 2) // 2))
        x = on_one(at, np.full(70_000, at.rank + 1.0))
        await dist.all_reduce(x, HYPOT)
        assert equal(x, np.full(70_000, 3.0))

    def larger(left: Any, right: Any) -> Any:
        return np.maximum(left, right)

    HYPOT = ReduceOp.custom(larger)
    run_gpu(3, main, devices=1)


@pytest.mark.parametrize("variable", ["", "NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"])
@pytest.mark.parametrize("takes", [False, True])
def test_nccl_says_whether_it_takes_ranks_that_share_a_gpu(
    variable: str, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked where one of its own variables may make it; else the ranks are named before anyone is in NCCL."""
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", "nccl")
    if variable:
        monkeypatch.setenv(variable, "1")

    async def main(at: GpuRank) -> BaseException | None:
        x = on_one(at, np.full(5, at.rank + 1))
        try:
            await dist.all_reduce(x)
        except dist.DistError as error:
            return error
        assert equal(x, np.full(5, 3))
        return None

    said: list[BaseException | None] = []

    async def kept(at: GpuRank) -> None:
        said.append(await main(at))

    with contextlib.suppress(dist.DistError):  # a group that failed cannot leave well
        run_gpu(2, kept, devices=1, multi_rank_gpu=takes)
    works = takes and variable != ""
    assert [error is None for error in said] == [works] * 2, said
    if not works:
        assert any(("same GPU" if variable == "" else "Duplicate GPU") in str(error) for error in said), said


class Foreign:
    """An array that is known by `__cuda_array_interface__` only, and by its device."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.device = array.device

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._array.__cuda_array_interface__


@pytest.mark.parametrize("path", ["nccl", "ipc", "staged"])
def test_foreign_arrays(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place; 0-d, without elements, and refused where they are not contiguous."""
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    def make(at: GpuRank, values: Any) -> Any:
        return at.array(values) if path == "nccl" else on_one(at, values)

    async def main(at: GpuRank) -> None:
        x = make(at, np.full((3, 4), at.rank + 1.0))
        await dist.all_reduce(Foreign(x))
        assert equal(x, np.full((3, 4), 3.0))
        scalar = make(at, np.array(at.rank + 2, np.int32))
        await dist.all_reduce(scalar, ReduceOp.PRODUCT)
        assert scalar.shape == ()
        assert equal(scalar, np.array(6, np.int32))
        empty = make(at, np.zeros((0, 7), np.float16))
        await dist.all_reduce(empty)
        await dist.broadcast(empty, 1)
        with pytest.raises(ValueError, match="contiguous"):
            dist.all_reduce(make(at, np.zeros((4, 6)))[:, ::2])
        await asyncio.sleep(0)
        await dist.barrier()

    run_gpu(2, main, devices=2 if path == "nccl" else 1)


@pytest.mark.parametrize("path", ["ipc", "staged"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_numpy_array_on_one_rank_is_a_mismatch(path: str, warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def main(at: GpuRank) -> None:
        if warm:
            await dist.all_reduce(on_one(at, np.ones(3)))
        x = np.ones(300) if at.rank else on_one(at, np.ones(300))
        assert isinstance(await failure_of(dist.all_reduce(x)), CollectiveMismatchError)

    run_gpu(2, main, devices=1)


@pytest.mark.parametrize("path", ["ipc", "staged"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("how", ["late", "killed", "aborted"])
def test_a_rank_that_does_not_come(path: str, warm: bool, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU, whether device memory is shared already or not."""
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)
    issued: list[int] = []

    async def main(at: GpuRank) -> None:
        if warm:
            await dist.all_reduce(on_one(at, np.ones(3)))
        if at.rank == 2:
            await eventually(lambda: len(issued) == 2)
            if how == "killed":
                at.world.kill(2)
            elif how == "aborted":
                at.group.abort("enough")
            await eventually(lambda: "aborted" in repr(at.group) or how != "late")
            return
        timeout = 0.3 if how == "late" else None
        work = dist.all_reduce(on_one(at, np.ones(100_000)), timeout=timeout)
        issued.append(at.rank)
        error = await failure_of(work)
        expected = {"late": CollectiveTimeoutError, "killed": PeerLostError, "aborted": GroupAbortedError}[how]
        left = how == "aborted" and not warm and isinstance(error, PeerLostError)  # it leaves before it is connected
        assert isinstance(error, expected) or left, repr(error)
        if how == "late":
            assert error.missing == (2,)

    try:
        run_gpu(3, main, devices=1)
    except dist.DistError:
        assert how == "killed"  # the rank that was killed cannot leave well


@pytest.mark.parametrize("path", ["ipc", "staged"])
def test_streams_can_wait_for_what_is_queued(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def main(at: GpuRank) -> None:
        for count in (10, 400_000):
            x = on_one(at, np.full(count, at.rank + 1))
            work = dist.all_reduce(x)
            await work.enqueued()
            stream = at.cuda.runtime.new_stream(0)
            work.wait_stream(stream)
            stream.synchronize()
            assert (x._array == 3).all()
            await work

    run_gpu(2, main, devices=1)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_messages_between_ranks_on_one_gpu(loop: str) -> None:
    """Both directions at once, of all sizes, in order and from any source."""

    async def main(at: GpuRank) -> None:
        other = 1 - at.rank
        sizes = (0, 1, 1000, 300_000, 3_000_000)
        sent = [on_one(at, values_of(at.rank, size, np.uint8, size)) for size in sizes]
        into = [on_one(at, np.zeros(size, np.uint8)) for size in sizes]
        works = [dist.isend(array, other) for array in sent] + [dist.irecv(array, None) for array in into]
        await asyncio.gather(*works)
        for array, size in zip(into, sizes, strict=True):
            assert equal(array, values_of(other, size, np.uint8, size))
        assert (other, False) in shared_lines(at)
        x = on_one(at, np.full(5, at.rank))
        await asyncio.gather(dist.isend(x, at.rank, tag=3), dist.irecv(x, at.rank, tag=3))  # oneself
        await dist.all_reduce(x)
        assert equal(x, np.ones(5))

    run_gpu(2, main, devices=1, loop=loop)


def shared_lines(at: GpuRank) -> Any:
    return at.group.pairs._gpu()._ipc


def test_messages_take_the_host_where_memory_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> int:
        raise dist.DistError("not here")

    async def main(at: GpuRank) -> None:
        monkeypatch.setattr(at.cuda.runtime, "ipc_open", refuse)
        for turn in range(2):
            arrays = [on_one(at, np.full(100, 10 * turn + index)) for index in range(5)]
            if at.rank:
                await asyncio.gather(*(dist.isend(array, 0) for array in arrays))
            else:
                into = [on_one(at, np.zeros(100, np.int64)) for _ in range(5)]
                await asyncio.gather(*(dist.irecv(array, 1) for array in into))
                assert [int(array.get()[0]) for array in into] == [10 * turn + index for index in range(5)]
            assert all(line.broken for line in shared_lines(at).values())

    run_gpu(2, main, devices=1)


@pytest.mark.parametrize("warm", [False, True])
def test_a_lost_peer_ends_messages(warm: bool) -> None:
    async def main(at: GpuRank) -> None:
        if warm:
            x = on_one(at, np.ones(9))
            await (dist.send(x, 0) if at.rank else dist.recv(x, 1))
        if at.rank:
            work = dist.isend(on_one(at, np.ones(2_000_000)), 0)
            await asyncio.sleep(0.01)
            at.world.kill(1)
            assert isinstance(await failure_of(work), dist.DistError)
            return
        assert isinstance(await failure_of(dist.irecv(on_one(at, np.ones(2_000_001)), 1, tag=1)), PeerLostError)

    with contextlib.suppress(dist.DistError):  # the rank that was killed cannot leave well
        run_gpu(2, main, devices=1)
