"""DistributedDataParallel of arrays on (fake) GPUs: as those of the host, and nothing passes the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import GpuRank, run_gpu

import asyncdist as dist
from asyncdist.data_parallel import PeriodicAverager, hooks

SHAPES = {"first": (3, 4), "second": (4,), "third": (5, 2)}


def model(rank: GpuRank, value: float, dtype: Any = np.float32) -> dict[str, Any]:
    return {name: rank.array(np.full(shape, value, dtype)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("hook", [None, hooks.fp16, hooks.TopK(1.0)], ids=["whole", "fp16", "top"])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_averages(bucket_bytes: int, hook: Any) -> None:
    async def main(rank: GpuRank) -> None:
        chosen = hooks.TopK(1.0) if isinstance(hook, hooks.TopK) else hook
        parameters = model(rank, rank.rank + 5)
        ddp = await dist.DistributedDataParallel(parameters, rank.group, bucket_bytes=bucket_bytes, comm_hook=chosen)
        assert all((array.get() == 5).all() for array in parameters.values())
        for number in range(3):
            with ddp.no_sync():
                ddp.ready("first", rank.array(np.ones(SHAPES["first"], np.float64)))
            for name, shape in SHAPES.items():
                ddp.ready(name, rank.array(np.full(shape, rank.rank + number + len(name), np.float32)))
            averages = await ddp.averaged()
            for name in SHAPES:
                expected = 0.5 + number + len(name) + (name == "first")
                assert (averages[name].get() == expected).all()
                assert averages[name].device.id == rank.device

    run_gpu(2, main)


def test_top_k_keeps_what_it_leaves_out() -> None:
    async def main(rank: GpuRank) -> None:
        ddp = await dist.DistributedDataParallel({"x": rank.zeros(10)}, rank.group, comm_hook=hooks.TopK(0.5))
        sent = np.zeros(10)
        for _ in range(2):
            ddp.ready("x", rank.array(np.arange(1, 11, dtype=np.float32)))
            sent += (await ddp.averaged())["x"].get()
        assert sent.tolist() == [0, 0, 0, 8, 10, 6, 7, 16, 18, 20]

    run_gpu(2, main)


def test_join_and_unused_parameters() -> None:
    async def main(rank: GpuRank) -> float:
        parameters = model(rank, 1)
        ddp = await dist.DistributedDataParallel(parameters, rank.group, find_unused_parameters=True)
        async with ddp.join():
            for _ in range(1 + rank.rank):
                ddp.ready("second", rank.array(np.ones(4, np.float32)))
                averages = await ddp.averaged()
                parameters["second"] -= averages["second"]
        return float(parameters["second"].get()[0])

    assert run_gpu(2, main) == [-0.5, -0.5]


def test_parameters_are_averaged_from_time_to_time() -> None:
    async def main(rank: GpuRank) -> None:
        parameters = model(rank, rank.rank)
        averager = PeriodicAverager(parameters.values(), 2, group=rank.group)
        assert [await averager.step() for _ in range(2)] == [False, True]
        assert all((array.get() == 0.5).all() for array in parameters.values())

    run_gpu(2, main)


def test_what_is_on_the_host_does_not_go_with_what_is_on_a_gpu() -> None:
    async def main(rank: GpuRank) -> None:
        parameters = {"here": np.full(3, rank.rank, np.float32), "there": rank.array(np.full(3, rank.rank, np.float32))}
        ddp = await dist.DistributedDataParallel(parameters, rank.group)
        for name, value in parameters.items():
            ddp.ready(name, value + np.float32(rank.rank))
        averages = await ddp.averaged()
        assert (averages["here"] == 0.5).all()
        assert (averages["there"].get() == 0.5).all()

    run_gpu(2, main)
