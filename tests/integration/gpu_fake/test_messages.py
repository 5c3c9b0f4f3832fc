"""Point-to-point messages of GPU arrays."""

from __future__ import annotations

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_fake_kit import GpuRank, equal, failure_of, run_gpu, values_of
from waiting import eventually

import asyncdist as dist
from asyncdist.errors import (
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    PeerLostError,
)
from asyncdist.gpu import pairs as gpu_pairs
from asyncdist.gpu.nccl import path as nccl_path
from asyncdist.gpu.staged import pipeline as staged_pipeline

DTYPES = ["bool", "int16", "int64", "float16", "float64", "complex64", ml_dtypes.bfloat16]

ways = pytest.mark.parametrize("nccl", [True, False], ids=["nccl", "staged"])


@ways
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_messages_in_both_directions_at_once(nccl: bool, loop: str) -> None:
    async def main(at: GpuRank) -> None:
        other = 1 - at.rank
        for dtype in DTYPES:
            for shape in ((3, 2), (), (0,), (5000,)):
                x, y = at.array(values_of(at.rank, shape, dtype)), at.zeros(shape, dtype)
                sent = dist.isend(x, other, at.group)
                assert await dist.recv(y, other, at.group) == other
                await sent
                assert equal(y, values_of(other, shape, dtype)), dtype
        if nccl:
            assert at.cuda.nccl is not None
            assert [one.size for one in at.cuda.nccl.communicators] == [2] * 4

    run_gpu(2, main, nccl=nccl, loop=loop)


@ways
def test_order_tags_and_any_source(nccl: bool) -> None:
    async def main(at: GpuRank) -> None:
        if at.rank == 0:
            found = {}
            for _ in range(4):
                y = at.zeros(2, "int64")
                source = await dist.recv(y, None, at.group, tag=7)
                found.setdefault(source, []).append(int(y.get()[0]))
            assert found == {1: [10, 11], 2: [20, 21]}
            late, early = at.zeros(1, "int64"), at.zeros(1, "int64")
            works = [dist.irecv(late, 1, at.group, tag=2), dist.irecv(early, 1, at.group, tag=1)]
            for work in works:
                await work
            assert (late.get()[0], early.get()[0]) == (2, 1)
        else:
            for number in range(2):
                await dist.isend(at.array(np.array([10 * at.rank + number] * 2)), 0, at.group, tag=7)
            if at.rank == 1:
                works = [dist.isend(at.array(np.array([tag])), 0, at.group, tag=tag) for tag in (1, 2)]
                for work in works:
                    await work

    run_gpu(3, main, nccl=nccl)


@ways
def test_batches_and_messages_to_oneself(nccl: bool) -> None:
    async def main(at: GpuRank) -> None:
        right, left = (at.rank + 1) % at.size, (at.rank - 1) % at.size
        x, y = at.array(np.full(4, at.rank)), at.zeros(4, "int64")
        operations = [dist.P2POp(dist.isend, x, right, at.group), dist.P2POp(dist.irecv, y, left, at.group)]
        for work in dist.batch_isend_irecv(operations):
            await work
        assert equal(y, [left] * 4)
        sent = dist.isend(x, at.rank, at.group)
        await dist.recv(y, at.rank, at.group)
        await sent
        assert equal(y, [at.rank] * 4)

    run_gpu(3, main, nccl=nccl)


def test_large_messages_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_pipeline, "BUFFER_BYTES", 1 << 16)

    async def main(at: GpuRank) -> None:
        values = np.arange(100_003, dtype=np.int32)
        if at.rank == 0:
            await asyncio.gather(*(dist.isend(at.array(values + tag), 1, at.group, tag) for tag in range(3)))
        else:
            arrays = [at.zeros(100_100, "int32") for _ in range(3)]
            works = [dist.irecv(x, 0, at.group, tag) for tag, x in enumerate(arrays)]
            for tag, (work, x) in enumerate(zip(works, arrays, strict=True)):
                await work
                assert work.nbytes == values.nbytes
                assert equal(x[: values.size], values + tag)
                assert not x[values.size :].get().any()

    run_gpu(2, main, nccl=False)


@ways
def test_many_messages_in_flight(nccl: bool) -> None:
    async def main(at: GpuRank) -> None:
        other = 1 - at.rank
        sent = [dist.isend(at.array(np.array([number])), other, at.group) for number in range(300)]
        places = [at.zeros(1, "int64") for _ in sent]
        received = [dist.irecv(place, other, at.group) for place in places]
        for work in sent + received:
            await work
        assert [int(place.get()[0]) for place in places] == list(range(300))

    run_gpu(2, main, nccl=nccl)


@ways
def test_what_does_not_fit_is_refused_on_both_sides(nccl: bool) -> None:
    async def main(at: GpuRank) -> None:
        if at.rank == 0:
            for x in (at.zeros(4), at.zeros(4), at.zeros(4), at.zeros(4), at.zeros(4)):
                error = await failure_of(dist.isend(x, 1, at.group))
                assert isinstance(error, CollectiveMismatchError), error
                assert "rank 1 refused" in str(error)
            await dist.isend(np.zeros(4, np.float32), 1, at.group)
        else:
            for place in (at.zeros(3), at.zeros(4, "int32"), np.zeros(4, np.float32)):
                error = await failure_of(dist.recv(place, 0, at.group))
                assert isinstance(error, CollectiveMismatchError)
                assert "the pair stays usable" in str(error)
            assert "on a GPU" in str(error)
            assert "on a GPU" in str(await failure_of(dist.recv_array(0, at.group)))
            assert "not objects" in str(await failure_of(dist.recv_object_list([None], 0, at.group)))
            assert "from the host" in str(await failure_of(dist.recv(at.zeros(4), 0, at.group)))
        other = 1 - at.rank
        sent, y = dist.isend(at.zeros(1), other, at.group), at.array(np.ones(1, np.float32))
        await dist.recv(y, other, at.group)
        await sent
        assert equal(y, [0])

    run_gpu(2, main, nccl=nccl)


def test_receives_are_withdrawn_without_losing_a_message() -> None:
    async def main(at: GpuRank) -> None:
        if at.rank == 1:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await dist.recv(at.zeros(2), 0, at.group)
            error = await failure_of(dist.recv(at.zeros(2), 0, at.group, timeout=0.01))
            assert isinstance(error, CollectiveTimeoutError)
            work = dist.irecv(at.zeros(2), 0, at.group)
            assert work.cancel()
            assert isinstance(await failure_of(work), ClosedError)
            await dist.barrier(at.group)
            y = at.zeros(2)
            await dist.recv(y, 0, at.group)
            assert equal(y, [1, 1])
        else:
            await dist.barrier(at.group)
            await dist.isend(at.array(np.ones(2, np.float32)), 1, at.group)

    run_gpu(2, main)


@ways
def test_messages_wait_for_what_was_queued_before(nccl: bool) -> None:
    async def main(at: GpuRank) -> None:
        runtime, x = at.cuda.runtime, at.zeros(2)
        if at.rank == 0:
            runtime.compute(0.05, runtime.current_stream(at.device))
            x.set(1)
            await dist.isend(x, 1, at.group)
        else:
            await dist.recv(x, 0, at.group)
            assert equal(x, [1, 1])

    run_gpu(2, main, nccl=nccl)


@ways
def test_a_lost_peer_ends_messages(nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pairs, "ENDING_S", 0.3)  # what the dead rank sends never ends
    monkeypatch.setattr(nccl_path, "ENDING_S", 0.3)

    async def main(at: GpuRank) -> None:
        if at.rank == 1:
            gate = at.cuda.runtime.hold(at.cuda.runtime.current_stream(at.device))
            work = dist.isend(at.zeros(2), 0, at.group)  # announced, but the data never comes
            await at.world.store.wait(["waits"])
            at.world.kill(1)
            at.group.abort("this rank is dead, and nobody hears it")
            assert isinstance(await failure_of(work), DistError)
            gate.open()
            return
        work = dist.irecv(at.zeros(2), 1, at.group)
        if nccl:
            await work.enqueued()
        else:
            await eventually(lambda: work.peer == 1 and bool(at.group.pairs._gpu_pairs._works))  # type: ignore[attr-defined,union-attr]
        await at.world.store.set("waits", b"")
        error = await failure_of(work)
        assert isinstance(error, PeerLostError)
        assert error.rank == 1

    run_gpu(2, main, nccl=nccl)


def test_abort_ends_messages() -> None:
    async def main(at: GpuRank) -> None:
        group = dist.new_group()
        if at.rank == 0:
            gate = at.cuda.runtime.hold(at.cuda.runtime.current_stream(at.device))
            work: Any = dist.isend(at.zeros(2), 1, group)
        else:
            work = dist.irecv(at.zeros(2), 0, group)
            await work.enqueued()
            group.abort("enough")
        assert "enough" in str(await failure_of(work))
        if at.rank == 0:
            gate.open()

    run_gpu(2, main)


def test_what_nccl_reports_ends_messages_of_the_pair() -> None:
    async def main(at: GpuRank) -> None:
        other = 1 - at.rank
        if at.rank == 0:
            await dist.isend(at.zeros(2), other, at.group)
            gate = at.cuda.runtime.hold(at.cuda.runtime.current_stream(at.device))
            error = await failure_of(dist.isend(at.zeros(2), other, at.group))
            assert isinstance(error, PeerLostError)
            gate.open()
        else:
            await dist.recv(at.zeros(2), other, at.group)
            work = dist.irecv(at.zeros(2), other, at.group)
            await work.enqueued()
            assert at.cuda.nccl is not None
            for one in at.cuda.nccl.communicators:
                if one.rank == 1:
                    one.fail("a cable was cut")
            error = await failure_of(work)
            assert isinstance(error, DistBackendError)
            assert "a cable was cut" in str(error)

    run_gpu(2, main)


def test_threads_touch_no_gpu_but_the_messages() -> None:
    """A new thread's current GPU is the first, where page-locking memory would open a context of no use."""
    current: list[tuple[str, int]] = []

    def recorded(cuda: Any, name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            current.append((name, cuda.runtime.current_device()))
            return function(*arguments)

        return call

    async def main(at: GpuRank) -> None:
        if at.rank == 0:
            pinned = at.cuda.runtime.pinned

            def recording(nbytes: int) -> Any:
                buffer: Any = recorded(at.cuda, "allocate", pinned)(nbytes)
                buffer.close = recorded(at.cuda, "free", buffer.close)
                return buffer

            at.cuda.runtime.pinned = recording  # type: ignore[method-assign]
        await dist.barrier(at.group)
        x = at.array(np.full(3, at.rank), 1)
        await (dist.send(x, 1) if at.rank == 0 else dist.recv(x, 0))
        assert equal(x, np.zeros(3))

    run_gpu(2, main, devices=3, nccl=False)
    assert sorted(current) == [("allocate", 1), ("allocate", 2), ("free", 1), ("free", 2)]
