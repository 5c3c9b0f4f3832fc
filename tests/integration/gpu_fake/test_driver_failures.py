"""Each call of the driver fails once: nobody hangs, every error says where it was, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import PATIENCE_S, GpuRank, failure_of, run_gpu
from gpu_faults_kit import ERROR, Faults
from punctual import assert_within, punctual

import asyncdist as dist
from asyncdist.errors import DistBackendError, DistError, PeerLostError
from asyncdist.gpu.ipc import scratch as ipc_scratch
from asyncdist.gpu.ipc.operation import IpcOperation
from asyncdist.gpu.nccl.channel import NcclChannel
from asyncdist.gpu.staged import pipeline as staged_pipeline
from asyncdist.gpu.staged.pipeline import StagedPipeline

COUNT = 2000
"""Elements of an array of three chunks."""

SOON_S = 1.0
"""When the other end of a message that fails must have heard of it."""


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_scratch, "SMALL_BYTES", 1 << 11)
    monkeypatch.setattr(ipc_scratch, "LARGE_BYTES", 1 << 12)
    monkeypatch.setattr(ipc_scratch, "OTHER_TAGS_LARGE_BYTES", 1 << 12)
    monkeypatch.setattr(staged_pipeline, "SMALL_BUFFER_BYTES", 1 << 10)
    monkeypatch.setattr(staged_pipeline, "BUFFER_BYTES", 1 << 12)


class Sweep:
    """One operation of two ranks, run again and again."""

    def __init__(self, faults: Faults, path: str, what: str) -> None:
        self.faults = faults
        self.path = path
        self.what = what
        self.problems: list[str] = []

    def run(self, which: int) -> None:
        meet = asyncio.Barrier(2)
        devices = 1 if self.path == "ipc" else 2
        self.faults.begin(which)
        try:
            run_gpu(
                2,
                lambda at: self.on_rank(at, meet),
                devices=devices,
                mode="inline",
                nccl=self.path == "nccl",
                may_differ=True,
            )
        except BaseException as error:
            self.problems.append(f"{self.faults.injected}: raised {error!r}")
        deadline = time.monotonic() + (PATIENCE_S if not self.problems else 0)
        while self.faults.left() and time.monotonic() < deadline:
            time.sleep(0.001)  # in threads, which nobody waits for
        self.problems += [f"{self.faults.injected}: left {what}" for what in self.faults.left()]

    async def on_rank(self, at: GpuRank, meet: asyncio.Barrier) -> None:
        group: Any = dist.new_group()
        await meet.wait()
        try:
            async with asyncio.timeout(PATIENCE_S if not self.problems else 1):
                await self.issue(at, group)
        except TimeoutError:
            self.problems.append(f"{self.faults.injected}: rank {at.rank} hangs")
        except DistError as error:
            if f"rank {at.rank}, {self.name(at)}" not in str(error):
                self.problems.append(f"{self.faults.injected}: rank {at.rank} raises {error!r}")
        await meet.wait()
        with contextlib.suppress(DistError):
            await group.close()
        await meet.wait()

    def name(self, at: GpuRank) -> str:
        return "all_reduce" if self.what == "collective" else ("isend", "irecv")[at.rank]

    async def issue(self, at: GpuRank, group: Any) -> None:
        x = at.cuda.runtime.array(np.ones(COUNT, np.float32), 0 if self.path == "ipc" else at.rank)
        try:
            if self.what == "collective":
                work: Any = dist.all_reduce(x, group=group)
            else:
                work = dist.isend(x, 1, group) if at.rank == 0 else dist.irecv(x, 0, group)
        except DistBackendError as error:  # nobody hears of a message that was never sent
            group.abort(str(error))
        else:
            await work


EVERY = 3
"""Of the calls every third fails in one case, and the others in two more."""


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.thorough) for turn in range(1, EVERY))])
@pytest.mark.parametrize(("path", "what"), [*itertools.product(["nccl", "ipc", "staged"], ["collective", "message"])])
def test_each_call_fails_once(path: str, what: str, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)
    faults = Faults(monkeypatch)
    sweep = Sweep(faults, path, what)
    sweep.run(0)
    assert not sweep.problems
    for which in (*range(1, faults.calls + 1), *range(-faults.recordings, 0))[turn::EVERY]:
        sweep.run(which)
    assert not sweep.problems, "\n".join(sweep.problems)


MOVES: Any = {"nccl": (NcclChannel, "_launch"), "ipc": (IpcOperation, "_queue"), "staged": (StagedPipeline, "_queue")}
"""What queues work on the GPU: a part of a message, but on nccl all of it."""


@pytest.mark.parametrize("path", MOVES)
@pytest.mark.parametrize("victim", [0, 1])
@punctual
def test_the_other_end_of_a_message_hears_of_its_failure(
    path: str, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its middle. Later messages of the two fail as well."""
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)
    kind, name = MOVES[path]
    move, moved, took_s = getattr(kind, name), [], list[float]()

    def failing(self: Any, *arguments: Any, **options: Any) -> Any:
        if (self._channel.rank if path == "ipc" else self._around.rank) == victim:
            moved.append(arguments)
            if len(moved) > (path != "nccl"):
                raise DistBackendError(ERROR)
        return move(self, *arguments, **options)

    monkeypatch.setattr(kind, name, failing)

    async def main(at: GpuRank) -> None:
        group: Any = dist.new_group()
        x = at.cuda.runtime.array(np.zeros(COUNT, np.float32), 0 if path == "ipc" else at.rank)
        other, operation = 1 - at.rank, ("isend", "irecv")[at.rank]
        began_s = time.monotonic()
        work = dist.isend(x, other, group) if at.rank == 0 else dist.irecv(x, other, group)
        if at.rank == 0 and victim == 1 and path != "nccl":
            await work  # all has left: its array may be written again
        else:
            error = await failure_of(work)
            took_s.append(time.monotonic() - began_s)
            assert str(error).startswith(f"group {group.name}, rank {at.rank}, {operation} (rank {other})")
            assert isinstance(error, DistBackendError if at.rank == victim else PeerLostError), repr(error)
            assert (ERROR in str(error)) == (at.rank == victim)
        later = await failure_of(dist.irecv(x, other, group))
        assert isinstance(later, PeerLostError)
        assert later.rank == other
        group.abort("over")

    with contextlib.suppress(PeerLostError):  # they cannot leave well
        run_gpu(2, main, devices=1 if path == "ipc" else 2, nccl=path == "nccl", may_differ=True)
    assert took_s
    assert_within(SOON_S, max(took_s))
