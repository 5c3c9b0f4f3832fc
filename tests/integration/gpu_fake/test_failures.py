"""What goes wrong with collectives on GPU arrays: nobody hangs, and every error names what happened."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import GpuRank, equal, failure_of, run_gpu
from punctual import assert_within, punctual
from waiting import eventually

import asyncdist as dist
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    GroupAbortedError,
    PeerLostError,
)
from asyncdist.testing.fake_nccl import FakeCommunicator, FakeNccl

SOON_S = 1.5
"""When a difference between ranks must have been found, on a busy machine."""


def run_failing(size: int, main: Any, **options: Any) -> list[Any]:
    """As run_gpu, in a group of its own, so that its failure is not the world's."""

    async def in_a_subgroup(at: GpuRank) -> Any:
        at.group = dist.new_group(timeout=60.0)
        return await main(at)

    options.setdefault("may_differ", True)
    return run_gpu(size, in_a_subgroup, **options)


DIFFERENT = {
    "shape": lambda at: dist.all_reduce(at.zeros(4 + at.rank), group=at.group),
    "dtype": lambda at: dist.all_reduce(at.zeros(4, ["float32", "int32"][at.rank]), group=at.group),
    "op": lambda at: dist.all_reduce(at.zeros(4), [ReduceOp.SUM, ReduceOp.MAX][at.rank], at.group),
    "collective": lambda at: (
        dist.all_reduce(at.zeros(4), group=at.group) if at.rank else dist.broadcast(at.zeros(4), 0, at.group)
    ),
    "root": lambda at: dist.broadcast(at.zeros(4), at.rank, at.group),
    "kind": lambda at: dist.all_reduce(at.zeros(4) if at.rank else np.zeros(4, np.float32), group=at.group),
    "kind the other way": lambda at: dist.all_reduce(
        np.zeros(4, np.float32) if at.rank else at.zeros(4), group=at.group
    ),
    "coalesced": lambda at: dist.all_reduce_coalesced(
        [at.zeros(4)] if at.rank else [at.zeros(2), at.zeros(2)], group=at.group
    ),
}


@punctual
@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("warm", [False, True])
def test_ranks_that_differ(what: str, warm: bool) -> None:
    async def main(at: GpuRank) -> None:
        if warm:
            await dist.all_reduce(at.zeros(2), group=at.group)
        began = time.monotonic()
        error = await failure_of(DIFFERENT[what](at))
        assert isinstance(error, CollectiveMismatchError), repr(error)
        if what.startswith("kind"):
            assert "on GPUs" in str(error), error
        assert_within(SOON_S, time.monotonic() - began)

    run_failing(2, main)


@punctual
@pytest.mark.parametrize("length", [1, 100_000])
@pytest.mark.parametrize("path", ["nccl", "ipc", "staged"])
def test_two_roots_are_found_by_what_comes_after(path: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def rounds(at: GpuRank) -> None:
        await dist.all_reduce(at.zeros(2), group=at.group)
        await dist.broadcast(at.zeros(length), at.rank, at.group)
        await dist.all_reduce(at.zeros(2), group=at.group)

    async def main(at: GpuRank) -> None:
        error = await failure_of(rounds(at))
        for rank in range(2):
            assert f"rank {rank} runs broadcast float32[{length}] root {rank} of arrays on GPUs" in str(error)

    run_failing(2, main)


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_refused_operation_leaves_the_group_usable(ahead: int) -> None:
    """Rank 0 refuses one; the others have it, and perhaps some behind it, on the GPU already."""

    async def main(at: GpuRank) -> None:
        group = at.group
        await dist.all_reduce(at.zeros(2), group=group)
        before = dist.all_reduce(at.array(np.ones(2, np.float32)), group=group)
        if at.rank == 0:
            await at.world.store.wait(["go"])  # the others are far ahead
            with pytest.raises(TypeError):
                dist.all_reduce(at.zeros(3), "sum", group)
        else:
            work = dist.all_reduce(at.zeros(3), group=group)
        behind = [dist.all_reduce(at.array(np.ones(2, np.float32)), group=group) for _ in range(ahead)]
        await work.enqueued() if at.rank else None
        if at.rank == 1:
            await asyncio.sleep(0.01)
            await at.world.store.set("go", b"")
        if at.rank:
            error = await failure_of(work)
            assert isinstance(error, CollectiveMismatchError)
            assert "refused" in str(error)
        assert await asyncio.gather(*map(outcome, behind)) == ["CollectiveMismatchError"] * ahead
        await before
        for _ in range(3):
            x = at.array(np.ones(2, np.float32))
            await dist.all_reduce(x, group=group)
            assert equal(x, [3, 3])

    async def outcome(work: Any) -> str:
        try:
            await work
        except DistError as error:
            return type(error).__name__
        return "done"

    run_failing(3, main, may_differ=False)


def test_parts_of_a_refused_operation_give_their_credit_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of a broadcast waits for no rank: it has sent more parts than a pipeline has buffers."""
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", "staged")

    async def main(at: GpuRank) -> None:
        peer = at.group.world.mesh.peer(1 - at.rank)
        x = at.array(np.ones(4, np.float32))
        await dist.all_reduce(x)
        if at.rank == 0:
            work = dist.broadcast_coalesced([at.array(np.ones(1 << 15, np.float32)) for _ in range(40)], 0)
            await eventually(lambda: peer.statistics()["offered"])  # the first parts are eager
            await at.world.store.set("sent", b"")
            assert "refused" in str(await failure_of(work))
        else:
            await at.world.store.wait(["sent"])
            with pytest.raises(TypeError):
                dist.all_reduce("no array")
        await dist.all_reduce(x)
        await eventually(lambda: not peer.statistics()["unexpected_messages"] and not peer.statistics()["offered"])

    run_gpu(2, main)


def test_many_refusals_in_a_row() -> None:
    async def main(at: GpuRank) -> None:
        for round_number in range(6):
            if at.rank == round_number % 3:
                with pytest.raises(TypeError):
                    dist.all_reduce(at.zeros(3), ReduceOp.BAND, at.group)
            else:
                error = await failure_of(dist.all_reduce(at.zeros(3), group=at.group))
                assert isinstance(error, CollectiveMismatchError)
            x = at.array(np.ones(2, np.float32))
            await dist.all_reduce(x, group=at.group)
            assert equal(x, [3, 3])

    run_failing(3, main, may_differ=False)


@pytest.mark.parametrize("warm", [False, True])
def test_a_rank_that_does_not_come_is_named(warm: bool) -> None:
    async def main(at: GpuRank) -> None:
        if warm:
            await dist.all_reduce(at.zeros(2), group=at.group)
        if at.rank == 2:
            await at.world.store.wait(["over"])
            return
        error = await failure_of(dist.all_reduce(at.zeros(2), group=at.group, timeout=0.3))
        assert isinstance(error, CollectiveTimeoutError), repr(error)
        assert error.missing == (2,)
        later = await failure_of(async_call(lambda: dist.all_reduce(at.zeros(2), group=at.group)))
        assert isinstance(later, GroupAbortedError)
        await at.world.store.set("over", b"")

    run_failing(3, main)


async def async_call(function: Any) -> Any:
    return await function()


@pytest.mark.parametrize("warm", [False, True])
def test_a_lost_peer_ends_what_is_on_the_gpu(warm: bool) -> None:
    async def main(at: GpuRank) -> None:
        if warm:
            await dist.all_reduce(at.zeros(2), group=at.group)
        await dist.barrier(at.group)
        if at.rank == 1:
            await at.world.store.wait(["issued/0", "issued/2"])  # before, the barrier would fail
            await asyncio.sleep(0.02)
            at.world.kill(1)
            return
        work = dist.all_reduce(at.zeros(2), group=at.group)
        await at.world.store.set(f"issued/{at.rank}", b"")
        error = await failure_of(work)
        assert isinstance(error, PeerLostError)
        assert error.rank == 1
        left = dist.shrink_group([1], at.group)
        x = at.array(np.ones(2, np.float32))
        await dist.all_reduce(x, group=left)
        assert equal(x, [2, 2])
        assert at.cuda.nccl is not None
        await eventually(lambda: all(one.state != "open" for one in old(at)) or not warm)

    def old(at: GpuRank) -> list[Any]:
        assert at.cuda.nccl is not None
        return [one for one in at.cuda.nccl.communicators if one.size == 3 and one.rank == at.rank]

    run_failing(3, main)


def test_what_the_library_reports_ends_the_group_everywhere() -> None:
    async def main(at: GpuRank) -> None:
        await dist.all_reduce(at.zeros(2), group=at.group)
        if at.rank == 1:
            assert at.cuda.nccl is not None
            for one in at.cuda.nccl.communicators:
                if one.rank == 1:
                    one.fail("the network is gone")
            work = dist.all_reduce(at.zeros(2), group=at.group)
            error = await failure_of(work)
            assert isinstance(error, DistError)
            assert "the network is gone" in str(error)
        else:
            gate = at.cuda.runtime.hold(at.cuda.runtime.current_stream(at.device))
            error = await failure_of(dist.all_reduce(at.zeros(2), group=at.group))
            assert "the network is gone" in str(error)
            gate.open()

    run_failing(2, main)


def test_abort_while_communicators_open() -> None:
    async def main(at: GpuRank) -> None:
        if at.rank == 0:
            work = dist.all_reduce(at.zeros(2), group=at.group)
            await asyncio.sleep(0.01)
            at.group.abort("enough")
            error = await failure_of(work)
        else:
            await eventually(lambda: at.group._core._aborted is not None)
            error = await failure_of(async_call(lambda: dist.all_reduce(at.zeros(2), group=at.group)))
        assert isinstance(error, GroupAbortedError)
        assert "enough" in str(error)

    run_failing(2, main)


def test_opening_that_fails_says_why() -> None:
    async def main(at: GpuRank) -> None:
        error = await failure_of(dist.all_reduce(at.cuda.runtime.array(np.zeros(2), 0), group=at.group))
        assert isinstance(error, DistBackendError | DistError)
        assert "same GPU" in str(error)

    import os

    os.environ["ASYNCDIST_CUDA_PATH"] = "nccl"
    try:
        run_failing(2, main, devices=2)
    finally:
        del os.environ["ASYNCDIST_CUDA_PATH"]


REFUSED = {
    "BAND": (lambda at: dist.all_reduce(at.zeros(2, "int32"), ReduceOp.BAND, at.group), TypeError, "BAND"),
    "custom": (lambda at: dist.all_reduce(at.zeros(2), ReduceOp.custom(np.add), at.group), TypeError, "of one's own"),
    "int16": (lambda at: dist.all_reduce(at.zeros(2, "int16"), group=at.group), TypeError, "int16"),
    "complex product": (
        lambda at: dist.all_reduce(at.zeros(2, "complex64"), ReduceOp.PRODUCT, at.group),
        TypeError,
        "PRODUCT",
    ),
    "strided": (lambda at: dist.all_reduce(at.zeros((4, 4))[:, ::2], group=at.group), ValueError, "C-contiguous"),
    "list with a host array": (
        lambda at: dist.all_gather([np.zeros(2, np.float32), at.zeros(2)], at.zeros(2), at.group),
        ValueError,
        "is on the host, but tensor on cuda",
    ),
    "two GPUs": (
        lambda at: dist.all_gather_into_tensor(
            at.cuda.runtime.array(np.zeros(4, np.float32), 1 - at.device), at.zeros(2), at.group
        ),
        ValueError,
        "cuda:",
    ),
    "another GPU than before": (
        lambda at: dist.all_reduce(at.cuda.runtime.array(np.zeros(2), 1 - at.device), group=at.group),
        ValueError,
        "a rank uses one GPU in a group",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_raise_at_the_call(what: str) -> None:
    call, kind, text = REFUSED[what]

    async def main(at: GpuRank) -> None:
        await dist.all_reduce(at.zeros(2), group=at.group)
        with pytest.raises(kind, match=re.escape(text)):
            call(at)
        x = at.array(np.ones(2, np.float32))
        await dist.all_reduce(x, group=at.group)
        assert equal(x, [2, 2])

    run_failing(2, main)


def test_more_tags_than_communicators() -> None:
    from asyncdist.gpu.nccl.path import MAX_TAGS

    async def main(at: GpuRank) -> None:
        for tag in range(MAX_TAGS):
            await at.group.all_reduce(at.zeros(2), tag=tag)
        error = await failure_of(async_call(lambda: at.group.all_reduce(at.zeros(2), tag=MAX_TAGS)))
        assert f"more than {MAX_TAGS} tags" in str(error)  # here, or refused by the rank that came first
        await at.group.all_reduce(at.zeros(2), tag=3)

    run_failing(2, main)


def test_a_group_for_gpu_arrays_alone_refuses_host_arrays() -> None:
    async def main(at: GpuRank) -> None:
        with pytest.raises(TypeError, match="for GPU arrays only"):
            dist.all_reduce(np.zeros(2), group=at.group)
        objects: list[Any] = [None, None]
        await dist.all_gather_object(objects, at.rank, group=at.group)
        assert objects == [0, 1]
        await dist.barrier(at.group)

    run_gpu(2, main, backend="nccl")


def test_without_a_gpu_arrays_on_one_are_refused() -> None:
    from asyncdist.cuda import override

    async def main(at: GpuRank) -> None:
        with override(None):
            with pytest.raises(TypeError, match="cannot be used here: a test took CUDA away"):
                dist.all_reduce(at.zeros(2), group=at.group)
            with pytest.raises(ValueError, match="took CUDA away"):
                dist.new_group(backend="nccl")

    run_gpu(1, main)


@punctual
def test_a_thread_that_nccl_keeps_does_not_keep_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening blocks on one rank: the time-out comes all the same, and what opens too late is aborted."""
    blocked, genuine = threading.Event(), FakeNccl.open

    def slow(self: FakeNccl, size: int, unique_id: bytes, rank: int, device: int) -> Any:
        if rank == 1:
            blocked.wait(20)
        return genuine(self, size, unique_id, rank, device)

    monkeypatch.setattr(FakeNccl, "open", slow)
    took_s: list[float] = []

    async def main(at: GpuRank) -> None:
        began = time.monotonic()
        error = await failure_of(dist.all_reduce(at.zeros(2), group=at.group, timeout=0.2))
        assert isinstance(error, CollectiveTimeoutError)
        took_s.append(time.monotonic() - began)
        blocked.set()
        assert at.cuda.nccl is not None
        await eventually(lambda: [one.state for one in at.cuda.nccl.communicators] == ["aborted"] * 2)  # type: ignore[union-attr]

    run_failing(2, main)
    assert_within(5, max(took_s))


@punctual
def test_a_launch_that_blocks_is_ended_by_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first send of a pair connects, and blocks for as long as the other rank does not."""
    genuine = FakeCommunicator.send

    def blocking(self: FakeCommunicator, *arguments: Any) -> None:
        deadline = time.monotonic() + 20
        while self.state == "open" and time.monotonic() < deadline:
            time.sleep(0.001)
        genuine(self, *arguments)

    monkeypatch.setattr(FakeCommunicator, "send", blocking)
    took_s: list[float] = []

    async def main(at: GpuRank) -> None:
        began = time.monotonic()
        lists = [at.zeros(1), at.zeros(1)]
        work = dist.all_to_all(lists, [at.zeros(1), at.zeros(1)], at.group)
        behind = dist.all_reduce(at.zeros(1), group=at.group)
        await asyncio.sleep(0.05)
        assert not work.done()
        if at.rank == 0:
            await asyncio.sleep(0.05)  # until the other rank has looked, too
            at.group.abort("enough")
        for one in (work, behind):
            assert isinstance(await failure_of(one), GroupAbortedError)
        await at.group.close()
        took_s.append(time.monotonic() - began)

    run_failing(2, main)
    assert_within(5, max(took_s))


def test_what_goes_on_without_lost_ranks_takes_host_arrays() -> None:
    async def main(at: GpuRank) -> None:
        for _ in range(2):
            with pytest.raises(TypeError, match="on_lost='continue' takes arrays in host memory"):
                dist.all_reduce(at.array(np.ones(2, np.float32)), on_lost="continue")
        assert (await dist.all_reduce(np.ones(1), on_lost="continue")).ranks == (0, 1)

    run_gpu(2, main)
