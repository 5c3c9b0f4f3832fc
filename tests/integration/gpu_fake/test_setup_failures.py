"""A rank that dies at each stage of setting GPU arrays up: the others hear who it was, soon, and go on without it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import GpuRank, equal, failure_of, run_gpu
from punctual import assert_within, punctual
from waiting import eventually

import asyncdist as dist
from asyncdist.errors import DistError, GroupAbortedError, PeerLostError
from asyncdist.gpu.ipc import scratch as ipc_scratch
from asyncdist.gpu.path import HostExchange
from asyncdist.gpu.staged import pipeline as staged_pipeline
from asyncdist.testing.fake_nccl import FakeNccl

SIZE = 3
SOON_S = 3.0
"""When the others must know, on a busy machine; time-outs here are a minute."""

STAGES = {
    "nccl": ["before path", "after path", "before nccl", "after nccl", "unique id", "open", "first"],
    "ipc": ["before path", "after path", "before ipc 0", "after ipc 0", "before ipc 1", "after ipc 1", "first"],
    "staged": ["before path", "after path", "first"],
}
"""Exchanges between the ranks, calls of NCCL, and the first collective, of which the victim's part is on the GPU."""

CASES = [(path, stage, victim) for path, stages in STAGES.items() for stage in stages for victim in (0, 2)]
CASES.remove(("nccl", "unique id", 2))


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_scratch, "LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(staged_pipeline, "BUFFER_BYTES", 1 << 16)


class Death:
    """Rank `victim` of a world is killed when it comes to `stage`: a thread or a coroutine never goes on."""

    def __init__(self, path: str, stage: str, victim: int, monkeypatch: pytest.MonkeyPatch, maker: int = 0) -> None:
        self.path = path
        self.stage = stage
        self.victim = victim
        self.maker = maker  # of unique ids
        self.world: Any = None
        self.loop: Any = None
        self.happened = threading.Event()
        self.over = threading.Event()
        self.survivors: list[int] = []
        self.took_s: list[float] = []
        monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)
        self.install(monkeypatch)

    def run(self, main: Callable[[GpuRank, Any, int], Awaitable[None]]) -> None:
        """Run `main(rank, group, device)` on all ranks; the others must have heard in time and gone on."""

        async def on_rank(at: GpuRank) -> None:
            self.world, self.loop = at.world, asyncio.get_running_loop()
            await main(at, dist.new_group(timeout=60.0), at.rank if self.path == "nccl" else 0)

        with contextlib.suppress(PeerLostError):  # who was killed cannot leave well
            run_gpu(SIZE, on_rank, devices=SIZE if self.path == "nccl" else 1, may_differ=True)
        assert len(self.survivors) == SIZE - 1
        assert_within(SOON_S, max(self.took_s))

    async def die(self, group: Any, work: Any) -> None:
        """The end of the victim."""
        await eventually(self.happened.is_set)
        group.abort("this rank is dead, and nobody hears it")
        assert isinstance(await failure_of(work), DistError)
        await eventually(lambda: len(self.survivors) == SIZE - 1)

    async def hear(self, work: Any, began_s: float) -> None:
        """What another is told, and when."""
        error = await failure_of(work)
        assert isinstance(error, PeerLostError), repr(error)
        assert error.rank == self.victim
        self.took_s.append(time.monotonic() - began_s)

    def survive(self, rank: int) -> None:
        self.survivors.append(rank)
        self.over.set()

    def comes(self, rank: int, stage: str) -> bool:
        return self.world is not None and rank == self.victim and stage == self.stage and not self.happened.is_set()

    def strike(self) -> None:
        self.happened.set()
        self.world.kill(self.victim)

    def strike_in_thread(self) -> None:
        self.loop.call_soon_threadsafe(self.strike)
        self.over.wait(20)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        all_gather, unique_id, opened = HostExchange.all_gather, FakeNccl.unique_id, FakeNccl.open

        async def exchange(self_: HostExchange, name: str, tag: int, number: int, message: bytes) -> Any:
            what = f"{name} {number}" if name == "ipc" else name
            if self.comes(self_._rank, f"before {what}"):
                self.strike()
                await asyncio.Event().wait()
            told = await all_gather(self_, name, tag, number, message)
            if self.comes(self_._rank, f"after {what}"):
                self.strike()
                await asyncio.Event().wait()
            return told

        def make_id(self_: FakeNccl) -> bytes:
            if self.comes(self.maker, "unique id"):
                self.strike_in_thread()
            return unique_id(self_)

        def open_one(self_: FakeNccl, size: int, unique: bytes, rank: int, device: int) -> Any:
            if self.comes(rank, "open"):
                self.strike_in_thread()
            return opened(self_, size, unique, rank, device)

        monkeypatch.setattr(HostExchange, "all_gather", exchange)
        monkeypatch.setattr(FakeNccl, "unique_id", make_id)
        monkeypatch.setattr(FakeNccl, "open", open_one)


@pytest.mark.parametrize(("path", "stage", "victim"), CASES)
@punctual
def test_a_rank_dies(path: str, stage: str, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    death = Death(path, stage, victim, monkeypatch)

    async def main(at: GpuRank, group: Any, device: int) -> None:
        x = at.cuda.runtime.array(np.ones(3000, np.float32), device)
        gate = None
        if stage == "first" and at.rank != victim:  # the others' part never comes until the victim is dead
            gate = at.cuda.runtime.hold(at.cuda.runtime.current_stream(device))
        work = dist.all_reduce(x, group=group)
        if at.rank == victim:
            if stage == "first":
                await asyncio.wait([asyncio.ensure_future(work.enqueued())], timeout=0.3)
                death.strike()
            await death.die(group, work)
            return
        await eventually(death.happened.is_set)
        await death.hear(work, time.monotonic())
        if gate is not None:
            gate.open()
        with pytest.raises(GroupAbortedError):
            dist.all_reduce(x, group=group)
        left = dist.shrink_group([victim], group)
        y = at.cuda.runtime.array(np.full(3000, at.rank, np.float32), device)
        await dist.all_reduce(y, group=left)
        assert equal(y, np.full(3000, 3 - victim))
        await left.close()
        death.survive(at.rank)

    death.run(main)


MESSAGES = {
    "nccl": ["unique id", "open"],
    "ipc": ["before ipc 0", "after ipc 0", "before ipc 1", "after ipc 1"],
}
"""What the first message between two ranks sets up. The receiver, rank 1, makes the unique id."""

MESSAGE_CASES = [(path, stage, victim) for path, stages in MESSAGES.items() for stage in stages for victim in (0, 1)]
MESSAGE_CASES.remove(("nccl", "unique id", 0))


@pytest.mark.parametrize(("path", "stage", "victim"), MESSAGE_CASES)
@punctual
def test_a_rank_dies_over_its_first_message(
    path: str, stage: str, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages with others go on."""
    death = Death(path, stage, victim, monkeypatch, maker=1)

    async def main(at: GpuRank, group: Any, device: int) -> None:
        x = at.cuda.runtime.array(np.full(3000, at.rank, np.float32), device)
        if at.rank == 2:
            await eventually(death.happened.is_set)
            y = at.cuda.runtime.array(np.zeros(3000, np.float32), device)
            await dist.recv(y, 1 - victim, group)
            assert equal(y, np.full(3000, 1 - victim))
        else:
            began_s = time.monotonic()
            work = dist.isend(x, 1, group) if at.rank == 0 else dist.irecv(x, 0, group)
            if at.rank == victim:
                await death.die(group, work)
                return
            await death.hear(work, began_s)
            await dist.send(at.cuda.runtime.array(np.full(3000, at.rank, np.float32), device), 2, group)
        death.survive(at.rank)

    death.run(main)
