"""Ranks that are merely late are asked what they run, on the host and on GPUs, and nothing comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from gpu_fake_kit import ArrayMaker, GpuRank, run_gpu

import asyncdist as dist
from asyncdist.gpu import mismatch_probe
from asyncdist.gpu.ipc import scratch as ipc_scratch
from asyncdist.gpu.staged import pipeline as staged_pipeline
from asyncdist.group.core import GroupCore

SIZE = 3

LATE_S = 0.5
"""In which others ask several times, with what `eager` sets."""


ARRAYS: dict[str, Callable[[ArrayMaker], Any]] = {
    "all_reduce": lambda one: dist.all_reduce(one(), group=one.group),
    "premul": lambda one: dist.all_reduce(one(), dist.ReduceOp.PREMUL_SUM(one.rank + 1.0), one.group),
    "broadcast": lambda one: dist.broadcast(one(), 1, one.group),
    "reduce": lambda one: dist.reduce(one(), 1, group=one.group),
    "all_gather": lambda one: dist.all_gather([one(2 + i) for i in range(SIZE)], one(2 + one.rank), one.group),
    "all_gather_single": lambda one: dist.all_gather_single(one(4 * SIZE), one(), one.group),
    "gather": lambda one: dist.gather(one(), one.each() if one.rank == 1 else None, 1, one.group),
    "scatter": lambda one: dist.scatter(one(), one.each() if one.rank == 1 else None, 1, one.group),
    "reduce_scatter": lambda one: dist.reduce_scatter(one(), one.each(), group=one.group),
    "all_to_all": lambda one: dist.all_to_all([one(i) for i in range(SIZE)], one.each(one.rank), one.group),
    "all_to_all_single": lambda one: dist.all_to_all_single(
        one(3), one(3 * one.rank), [0, 1, 2], [one.rank] * SIZE, one.group
    ),
    "coalesced": lambda one: dist.all_reduce_coalesced([one(), one(0), one(2)], group=one.group),
    "large": lambda one: dist.all_reduce(one(100_000), group=one.group),
}

HOST: dict[str, Callable[[ArrayMaker], Any]] = {
    "scan": lambda one: dist.scan(one(), group=one.group),
    "barrier": lambda one: dist.barrier(one.group),
    "monitored_barrier": lambda one: dist.monitored_barrier(one.group, timeout=30.0),
    "all_gather_object": lambda one: dist.all_gather_object([None] * SIZE, "x" * one.rank, one.group),
    "gather_object": lambda one: dist.gather_object(
        "x" * one.rank, [None] * SIZE if one.rank == 1 else None, 1, one.group
    ),
    "broadcast_object_list": lambda one: dist.broadcast_object_list(["x" * one.rank], 1, one.group),
    "scatter_object_list": lambda one: dist.scatter_object_list(
        [None], ["a", "bb", "ccc"] if one.rank == 1 else None, 1, one.group
    ),
    "all_gather_array": lambda one: dist.all_gather_array(one(one.rank), one.group),
    "gather_array": lambda one: dist.gather_array(one(one.rank), 1, one.group),
    "broadcast_array": lambda one: dist.broadcast_array(one() if one.rank == 1 else None, 1, one.group),
    "scatter_array": lambda one: dist.scatter_array(one.each() if one.rank == 1 else None, 1, one.group),
    "broadcast_stream": lambda one: drained(dist.broadcast_stream(one(1000), 1, one.group)),
}


async def drained(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatch_probe, "ASK_AFTER_S", 0.05)
    monkeypatch.setattr(mismatch_probe, "LOOK_S", 0.02)
    monkeypatch.setattr(ipc_scratch, "LARGE_BYTES", 1 << 18)
    monkeypatch.setattr(staged_pipeline, "BUFFER_BYTES", 1 << 18)


@pytest.mark.parametrize("path", ["nccl", "ipc", "staged"])
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("late", [0, 1])
def test_nothing_comes_of_it(path: str, on_host: bool, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)
    calls = ARRAYS | HOST if on_host else ARRAYS
    asked: list[int] = []
    ask = GroupCore.ask

    def counted(self: GroupCore, tag: int, sequence: int, rank: int) -> bool:
        asked.append(rank)
        return ask(self, tag, sequence, rank)

    monkeypatch.setattr(GroupCore, "ask", counted)

    async def main(at: GpuRank) -> None:
        device = at.rank if path == "nccl" else 0
        groups = {name: dist.new_group(timeout=60.0) for name in calls}
        await asyncio.gather(
            *(dist.all_reduce(ArrayMaker(at, group, device)(), group=group) for group in groups.values())
        )
        await dist.barrier()
        if at.rank == late:
            await asyncio.sleep(LATE_S)
        await asyncio.gather(
            *(calls[name](ArrayMaker(at, groups[name], None if on_host else device)) for name in calls)
        )
        await dist.barrier()

    run_gpu(SIZE, main, devices=SIZE if path == "nccl" else 1)
    assert late in asked
