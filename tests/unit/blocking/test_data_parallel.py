"""Data-parallel training from ordinary threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

import asyncdist.blocking as dist


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_averages_and_parameters() -> None:
    x = np.ones(3)
    assert dist.average_gradients([x]) == [x]
    work = dist.average_gradients([x], async_op=True)
    assert work.wait()
    assert work.result() == [x]
    assert dist.broadcast_parameters(iter([x]), src=0) == [x]
    with pytest.raises(TypeError, match=r"gradients\[0\]"):
        dist.average_gradients(["x"])


def test_buckets() -> None:
    buckets = dist.GradientBuckets(np.zeros((2, 3)) for _ in range(2))
    assert len(buckets) == 1
    assert "2 gradients" in repr(buckets)
    for step in range(3):
        buckets.ready(1, np.full((2, 3), step))
        buckets.gradients[0][...] = -step
        buckets.ready(0)
        first, second = buckets.averaged() if step else buckets.averaged(async_op=True).result()
        assert (first == -step).all()
        assert (second == step).all()
    with pytest.raises(ValueError, match="not ready yet"):
        buckets.averaged()
    with pytest.raises(IndexError):
        buckets.ready(2)


def test_a_wrapped_model() -> None:
    ddp = dist.DistributedDataParallel({"x": np.zeros(2), "y": np.zeros(3)}, bucket_bytes=1)
    assert repr(ddp) == "<blocking DistributedDataParallel of 2 parameters in 2 buckets>"
    ddp.sync_parameters()
    with ddp.join():
        with ddp.no_sync():
            ddp.ready("x", np.ones(2))
        for async_op in (False, True):
            for name in ("y", "x"):
                ddp.ready(name, np.full(ddp.parameters[name].shape, 2))
            averages = ddp.averaged(async_op)
            averages = averages.result() if async_op else averages
            assert averages["x"].tolist() == ([2, 2] if async_op else [3, 3])
            assert averages["y"].tolist() == [2, 2, 2]
    with pytest.raises(KeyError):
        ddp.ready("z")


def test_a_group_of_ones_own() -> None:
    group = dist.new_group([0])
    buckets = dist.GradientBuckets([np.zeros(2)], group)
    buckets.ready(0, np.ones(2))
    assert buckets.averaged()[0].tolist() == [1, 1]
    with pytest.raises(TypeError, match="ReduceOp"):
        dist.GradientBuckets([np.zeros(2)], group, op="SUM")


def test_sampler_of_the_default_group() -> None:
    sampler = dist.DistributedSampler(range(4), shuffle=False)
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    assert list(sampler) == [0, 1, 2, 3]


def test_not_inside_a_loop() -> None:
    buckets = dist.GradientBuckets([np.zeros(2)])

    async def inside() -> None:
        for call in (lambda: buckets.ready(0), buckets.averaged, lambda: dist.GradientBuckets([np.zeros(2)])):
            with pytest.raises(RuntimeError, match="inside a running event loop"):
                call()

    asyncio.run(inside())
