"""A rank that leaves in order while another waits for it: an error that names it, on every path."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import GpuRank, equal, failure_of, run_gpu

import asyncdist as dist
from asyncdist.errors import PeerLostError
from asyncdist.gpu import mismatch_probe


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatch_probe, "LEFT_GRACE_S", 0.2)


def array(at: GpuRank, path: str, count: int = 4) -> Any:
    return at.cuda.runtime.array(np.ones(count, np.float32), at.rank if path == "nccl" else 0)


@pytest.mark.parametrize("path", ["nccl", "ipc", "staged"])
@pytest.mark.parametrize("warm", [False, True])
def test_who_left_is_named(path: str, warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def main(at: GpuRank) -> None:
        if warm:
            await dist.all_reduce(array(at, path))
        if at.rank == 1:
            return
        error = await failure_of(dist.all_reduce(array(at, path), timeout=60.0))
        assert isinstance(error, PeerLostError), repr(error)
        assert (error.rank, error.left) == (1, True)

    run_gpu(3, main, devices=3 if path == "nccl" else 1)


def test_what_waits_for_its_callers_kernels_is_left_alone() -> None:
    """The other rank was through with the broadcast long ago; here a kernel comes first."""

    async def main(at: GpuRank) -> None:
        x = at.array(np.full(3, at.rank, np.float32))
        await dist.all_reduce(at.zeros(2))
        if at.rank == 0:
            await dist.broadcast(x, 0)
            return
        gate = at.cuda.runtime.hold(at.cuda.runtime.current_stream(at.device))
        work = dist.broadcast(x, 0)
        await asyncio.sleep(1.0)  # far longer than one is waited for who has left
        gate.open()
        await work
        assert equal(x, np.zeros(3))

    run_gpu(2, main)


@pytest.mark.parametrize("late", [False, True])
def test_a_send_that_its_group_never_takes_ends(late: bool) -> None:
    """As one from the host does; `late`: the group is closed there before it comes."""

    async def main(at: GpuRank) -> None:
        sub = dist.new_group()
        assert isinstance(sub, dist.ProcessGroup)
        if at.rank == 0:
            if late:
                await at.group.recv(np.zeros(1), 1)
            work = sub.isend(at.zeros(3), 1)
            await at.group.send(np.zeros(1), 1)
            with pytest.raises(dist.PeerLostError, match="rank 1 has closed the group without receiving the message"):
                await work
            await sub.close()
        elif late:
            await sub.close()
            await at.group.send(np.zeros(1), 0)
            await at.group.recv(np.zeros(1), 0)
        else:
            await at.group.recv(np.zeros(1), 0)
            await sub.close()
        await dist.barrier(at.group)

    run_gpu(2, main)
