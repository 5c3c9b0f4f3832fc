"""A numpy array on one rank and GPU arrays on the others, in every collective: an error soon, which ends the group.

Ranks that only give, or get from others of their kind, may be through before anybody notices, as on the CPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import ArrayMaker, GpuRank, failure_of, run_gpu
from punctual import assert_within, punctual

import asyncdist as dist
from asyncdist.errors import CollectiveMismatchError, GroupAbortedError
from asyncdist.gpu.ipc import scratch as ipc_scratch
from asyncdist.gpu.staged import pipeline as staged_pipeline

SIZE = 3

SOON_S = 6.0
"""When all of them must have failed that were issued at once, on a busy machine; time-outs here are a minute."""


CALLS: dict[str, Callable[[ArrayMaker], Any]] = {
    "all_reduce": lambda one: dist.all_reduce(one(), group=one.group),
    "broadcast": lambda one: dist.broadcast(one(), 1, one.group),
    "reduce": lambda one: dist.reduce(one(), 1, group=one.group),
    "all_gather": lambda one: dist.all_gather(one.each(), one(), one.group),
    "all_gather uneven": lambda one: dist.all_gather([one(2 + i) for i in range(SIZE)], one(2 + one.rank), one.group),
    "all_gather_into_tensor": lambda one: dist.all_gather_into_tensor(one(4 * SIZE), one(), one.group),
    "gather": lambda one: dist.gather(one(), one.each() if one.rank == 1 else None, 1, one.group),
    "scatter": lambda one: dist.scatter(one(), one.each() if one.rank == 1 else None, 1, one.group),
    "reduce_scatter": lambda one: dist.reduce_scatter(one(), one.each(), group=one.group),
    "reduce_scatter_tensor": lambda one: dist.reduce_scatter_tensor(one(), one(4 * SIZE), group=one.group),
    "all_to_all": lambda one: dist.all_to_all(one.each(), one.each(), one.group),
    "all_to_all_single": lambda one: dist.all_to_all_single(one(2 * SIZE), one(2 * SIZE), group=one.group),
    "all_to_all_single uneven": lambda one: dist.all_to_all_single(one(9), one(9), [3] * 3, [3] * 3, one.group),
    "scan": lambda one: dist.scan(one(), group=one.group),
    "exscan": lambda one: dist.exscan(one(), group=one.group),
    "all_reduce_coalesced": lambda one: dist.all_reduce_coalesced([one(), one(2)], group=one.group),
    "broadcast_coalesced": lambda one: dist.broadcast_coalesced([one(), one(2)], 1, one.group),
    "all_gather_coalesced": lambda one: dist.all_gather_coalesced([[one()] for _ in range(SIZE)], [one()], one.group),
    "all_gather_into_tensor_coalesced": lambda one: dist.all_gather_into_tensor_coalesced(
        [one(4 * SIZE)], [one()], group=one.group
    ),
    "reduce_scatter_tensor_coalesced": lambda one: dist.reduce_scatter_tensor_coalesced(
        [one()], [one(4 * SIZE)], group=one.group
    ),
    "all_reduce_multigpu": lambda one: dist.all_reduce_multigpu([one()], group=one.group),
    "broadcast_multigpu": lambda one: dist.broadcast_multigpu([one()], 1, one.group),
    "reduce_multigpu": lambda one: dist.reduce_multigpu([one()], 1, group=one.group),
    "all_gather_multigpu": lambda one: dist.all_gather_multigpu([one.each()], [one()], one.group),
    "reduce_scatter_multigpu": lambda one: dist.reduce_scatter_multigpu([one()], [one.each()], group=one.group),
    "nothing": lambda one: dist.all_reduce(one(0), group=one.group),
    "large": lambda one: dist.all_reduce(one(200_000), group=one.group),
}

NOT_NOTICED = {"nothing"}
"""No message is sent where all ranks say that there is nothing to move; each may end well."""


@pytest.mark.parametrize("path", ["nccl", "ipc", "staged"])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("on_host", [0, 2])
@punctual
def test_one_rank_on_the_host(path: str, warm: bool, on_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)
    monkeypatch.setattr(ipc_scratch, "LARGE_BYTES", 1 << 18)
    monkeypatch.setattr(staged_pipeline, "BUFFER_BYTES", 1 << 18)
    outcomes: dict[str, list[str]] = {}
    took_s: list[float] = []

    async def main(at: GpuRank) -> None:
        groups = {name: dist.new_group(timeout=60.0) for name in CALLS}
        shared = path != "nccl"
        if warm:
            await asyncio.gather(
                *(
                    dist.all_reduce(ArrayMaker(at, group, 0 if shared else at.rank)(), group=group)
                    for group in groups.values()
                )
            )
            await dist.barrier(at.group)  # what ends a group now would end its first operation on who is late, too
        began = time.monotonic()
        for name, said in zip(
            CALLS, await asyncio.gather(*(outcome(n, at, groups[n], shared) for n in CALLS)), strict=True
        ):
            outcomes.setdefault(name, []).append(said)
        took_s.append(time.monotonic() - began)
        await dist.barrier(at.group)
        for name, said in outcomes.items():
            assert set(said) <= {"mismatch", "refused", "done"}, (name, said)
            if name not in NOT_NOTICED:
                assert "mismatch" in said or "refused" in said, (name, said)
                if "refused" not in said:
                    assert isinstance(await failure_of(again(groups[name])), GroupAbortedError), name

    async def again(group: dist.ProcessGroup) -> None:
        await dist.all_reduce(np.ones(1), group=group)

    async def outcome(name: str, at: GpuRank, group: dist.ProcessGroup, shared: bool) -> str:
        try:
            device = None if at.rank == on_host else 0 if shared else at.rank
            work = CALLS[name](ArrayMaker(at, group, device))
        except (TypeError, ValueError):
            return "refused"
        except GroupAbortedError as error:  # the others have met there, and differed, before this rank came
            return "mismatch" if isinstance(error.__cause__, CollectiveMismatchError) else repr(error)
        try:
            async with asyncio.timeout(5 * SOON_S):
                await work
        except CollectiveMismatchError:
            return "mismatch"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    run_gpu(SIZE, main, devices=1 if path != "nccl" else SIZE, may_differ=True)
    assert_within(SOON_S, max(took_s))
