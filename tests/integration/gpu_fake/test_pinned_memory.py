"""Page-locked buffers of messages that fail: they are given back, but not before a copy or a message is through."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest
from gpu_fake_kit import GpuRank, failure_of, run_gpu
from waiting import eventually

import asyncdist as dist
from asyncdist.errors import CollectiveTimeoutError, DistBackendError, DistError
from asyncdist.gpu.staged import pipeline as staged_pipeline
from asyncdist.testing.fake_queues import FakeEvent

CHUNK_BYTES = 1 << 12
CHUNKS = 5


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_pipeline, "BUFFER_BYTES", CHUNK_BYTES)


def pinned(at: GpuRank) -> list[Any]:
    """Page-locked buffers that are not freed, of all ranks."""
    return [block for block in at.cuda.runtime.memory.blocks() if block.device is None]


def begin(at: GpuRank, group: Any, timeout_s: float | None = None) -> Any:
    """A message from rank 0 to rank 1, which bounds its receive."""
    array = at.zeros(CHUNKS * CHUNK_BYTES, "uint8")
    return dist.isend(array, 1, group) if at.rank == 0 else dist.irecv(array, 0, group, timeout=timeout_s)


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("how", ["abort", "time-out"])
def test_after_messages_that_fail(slow: int, how: str) -> None:
    """The GPU of rank `slow` has copies of a message on its queue when that fails."""

    async def main(at: GpuRank) -> None:
        group: Any = dist.new_group()
        runtime = at.cuda.runtime
        gate = runtime.hold(runtime.current_stream(at.device)) if at.rank == slow else None
        timeout_s = 0.3 if how == "time-out" and at.rank else None
        work = begin(at, group, timeout_s)
        await eventually(lambda: len(pinned(at)) >= 2)
        if how == "abort" and at.rank == slow:
            await asyncio.sleep(0.01)
            group.abort("enough")
        if at.rank < slow:
            with contextlib.suppress(DistError):  # all may have left before
                await work
        else:
            error = await failure_of(work)
            assert isinstance(error, CollectiveTimeoutError if timeout_s else DistError)
        if at.rank:
            await at.world.store.set("failed", b"")
        await at.world.store.wait(["failed"])
        group.abort("enough")
        if gate is not None:
            await asyncio.sleep(0.01)
            assert pinned(at), "a copy on the queue uses it"
            gate.open()
        await eventually(lambda: not pinned(at))

    run_gpu(2, main, nccl=False)


def test_a_copy_that_fails_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of rank 0 is not told of; its group goes on, and is closed in order."""
    record, left = FakeEvent.record, [10**9]

    def failing(self: FakeEvent, stream: Any) -> None:
        if stream.device == 0:
            left[0] -= 1
            if left[0] < 0:
                raise DistBackendError("cudaErrorIllegalAddress")
        record(self, stream)

    monkeypatch.setattr(FakeEvent, "record", failing)

    async def main(at: GpuRank) -> None:
        group: Any = dist.new_group()
        if at.rank == 0:
            work = begin(at, group)
            left[0] = 2
            assert "cudaErrorIllegalAddress" in str(await failure_of(work))
            left[0] = 10**9
            await at.world.store.set("failed", b"")
        else:
            work = begin(at, group, 0.3)
            await failure_of(work)
            await at.world.store.wait(["failed"])
        await group.close()
        await eventually(lambda: not pinned(at))

    run_gpu(2, main, nccl=False)


def test_one_that_comes_after_its_message_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    async def main(at: GpuRank) -> None:
        group: Any = dist.new_group()
        runtime, made = at.cuda.runtime, []
        if at.rank == 0:
            allocate = runtime.pinned

            def slowly(nbytes: int) -> Any:
                made.append(nbytes)
                assert go_on.wait(60)
                return allocate(nbytes)

            monkeypatch.setattr(runtime, "pinned", slowly)
        work = begin(at, group)
        if at.rank == 0:
            await eventually(lambda: made)
            group.abort("enough")
        await failure_of(work)
        await asyncio.sleep(0.01)  # who waited for it has heard that it need not
        go_on.set()
        await group.close()
        await dist.barrier(at.group)
        await eventually(lambda: not pinned(at))

    run_gpu(2, main, nccl=False)


def test_after_messages_that_fail_others_go_on() -> None:
    """A message that its receiver gives up ends the pair, but no other: what it had is freed."""

    async def main(at: GpuRank) -> None:
        group: Any = dist.new_group()
        if at.rank == 2:
            x = at.zeros(CHUNKS * CHUNK_BYTES, "uint8")
            await dist.recv(x, 0, group)
            await at.world.store.set("received", b"")
        elif at.rank == 1:
            assert isinstance(await failure_of(begin(at, group, 0.3)), CollectiveTimeoutError)
        else:
            runtime = at.cuda.runtime
            gate = runtime.hold(runtime.current_stream(at.device))
            await failure_of(begin(at, group))
            gate.open()
            await dist.isend(at.zeros(CHUNKS * CHUNK_BYTES, "uint8"), 2, group)
        await at.world.store.wait(["received"])
        group.abort("over")
        await eventually(lambda: not pinned(at))

    run_gpu(3, main, nccl=False)


def test_the_next_message_to_anybody_takes_the_same() -> None:
    """Page-locking takes milliseconds."""

    async def main(at: GpuRank) -> None:
        group: Any = dist.new_group()
        x, made = at.zeros(CHUNK_BYTES, "uint8"), set[int]()
        for other in (1, 2, 1):
            if at.rank == 0:
                await dist.send(x, other, group)
                made |= {buffer.pointer for buffer in group.pairs._gpu_pairs._spares[1].free}
            elif at.rank == other:
                await dist.recv(x, 0, group)
            await dist.barrier(at.group)
        if at.rank == 0:
            assert len(made) == 1

    run_gpu(3, main, nccl=False)
