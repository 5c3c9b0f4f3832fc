"""GradientBuckets: operations in one order whatever becomes ready first, in memory that is not copied."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from group_kit import Group
from thread_worlds import run_ranks

import asyncdist as dist
from asyncdist.group.methods.coalesced import adjacent
from asyncdist.testing import run_world

SHAPES = [(3, 4), (4,), (2, 2, 2), (), (0,), (10,)]
DTYPES = [np.float32, np.float32, np.float64, np.float32, np.float64, np.float64]


def parameters() -> list[np.ndarray[Any, Any]]:
    return [np.zeros(shape, dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]


async def step(buckets: dist.GradientBuckets, order: list[int], rank: int, number: int) -> None:
    for index in order:
        if index % 2:
            buckets.gradients[index][...] = rank + index + number
            buckets.ready(index)
        else:
            buckets.ready(index, np.full(SHAPES[index], rank + index + number, DTYPES[index]))
        await asyncio.sleep(0)
    gradients = await buckets.averaged()
    assert gradients is buckets.gradients
    for index, gradient in enumerate(gradients):
        assert gradient.shape == SHAPES[index]
        assert gradient.dtype == DTYPES[index]
        assert (gradient == 1 + index + number).all()  # of ranks 0, 1 and 2


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_ranks_may_be_ready_in_any_order(bucket_bytes: int) -> None:
    async def main(group: Group) -> None:
        shuffle = random.Random(group.rank)
        buckets = dist.GradientBuckets(parameters(), bucket_bytes=bucket_bytes)
        for number in range(4):
            await step(buckets, shuffle.sample(range(len(SHAPES)), len(SHAPES)), group.rank, number)

    for seed in range(3):
        run_world(3, main, seed=seed)


async def test_over_the_communication_thread() -> None:
    async def main(group: Group) -> None:
        buckets = dist.GradientBuckets(parameters(), bucket_bytes=64)
        for number in range(3):
            await step(buckets, list(range(len(SHAPES))), group.rank, number)

    await run_ranks(3, main)


def test_a_bucket_leaves_when_it_and_all_before_are_ready() -> None:
    async def main(group: Group) -> None:
        buckets = dist.GradientBuckets([np.zeros(4), np.zeros(4), np.zeros(4)], bucket_bytes=64)
        assert len(buckets) == 2
        issued = []
        issue = group._collective

        def noted(operation: str, tag: int, timeout: Any, prepare: Any, tensors: list[Any], *rest: Any) -> Any:
            issued.append(len(tensors))
            return issue(operation, tag, timeout, prepare, tensors, *rest)

        group._collective = noted  # type: ignore[method-assign]
        buckets.ready(2)
        buckets.ready(0)
        assert issued == []
        buckets.ready(1)
        assert issued == [2, 1]
        await buckets.averaged()

    run_world(2, main)


def test_gradients_of_a_bucket_are_one_run_of_memory() -> None:
    async def main(group: Group) -> None:
        first, second, third = dist.GradientBuckets([np.zeros((2, 3)), np.zeros(5), np.zeros(1, np.int8)]).gradients
        run = adjacent([first.reshape(-1), second])
        assert run is not None
        run[...] = np.arange(11)
        assert first[1, 2] == 5
        assert second[0] == 6
        assert adjacent([first.reshape(-1), second, third]) is None

    run_world(1, main)


def test_weights_and_a_group() -> None:
    async def main(group: Group) -> None:
        pair = dist.new_group([0, 2])
        if group.rank == 1:
            with pytest.raises(ValueError, match="not a member"):
                dist.GradientBuckets([np.zeros(2)], pair)
            return
        weight = dist.ReduceOp.PREMUL_SUM(0.25 if group.rank == 0 else 0.75)
        buckets = dist.GradientBuckets([np.zeros(2)], pair, op=weight, tag=3)
        buckets.ready(0, np.full(2, float(group.rank)))
        (gradient,) = await buckets.averaged()
        assert gradient.tolist() == [1.5, 1.5]

    run_world(3, main)


def test_mistakes() -> None:
    async def main(group: Group) -> None:
        with pytest.raises(ValueError, match="empty"):
            dist.GradientBuckets([])
        with pytest.raises(TypeError, match=r"parameters\[0\]"):
            dist.GradientBuckets(["weights"])
        with pytest.raises(TypeError, match="bool"):
            dist.GradientBuckets([np.zeros(2, bool)])
        with pytest.raises(ValueError, match="bucket_bytes"):
            dist.GradientBuckets([np.zeros(2)], bucket_bytes=0)
        buckets = dist.GradientBuckets([np.zeros(2), np.zeros(3), np.zeros(4)])
        for index in (-1, 3):
            with pytest.raises(IndexError, match=f"0 to 2, but no {index}"):
                buckets.ready(index)
        with pytest.raises(ValueError, match=r"gradient 0 is float64\[3\], but its parameter is float64\[2\]"):
            buckets.ready(0, np.zeros(3))
        with pytest.raises(ValueError, match="complex64"):
            buckets.ready(0, np.zeros(2, np.complex64))
        buckets.ready(0, np.zeros(2, np.float16))
        with pytest.raises(ValueError, match="ready already"):
            buckets.ready(0)
        with pytest.raises(ValueError, match="not ready yet: gradients 1, 2"):
            buckets.averaged()
        buckets.ready(1)
        buckets.ready(2)
        work = buckets.averaged()
        with pytest.raises(RuntimeError, match="still being averaged"):
            buckets.ready(0)
        await work
        buckets.ready(0)

    run_world(2, main)


def test_models_that_differ() -> None:
    async def main(group: Group) -> None:
        shapes = [2, 3] if group.rank else [3, 2]
        buckets = dist.GradientBuckets([np.zeros(size) for size in shapes])
        buckets.ready(0)
        buckets.ready(1)
        with pytest.raises(dist.CollectiveMismatchError, match=r"3\+2"):
            await buckets.averaged()

    run_world(2, main)


def test_a_rank_that_dies() -> None:
    async def main(group: Group, world: Any) -> None:
        buckets = dist.GradientBuckets([np.zeros(2), np.zeros(3)], bucket_bytes=1)
        if group.rank == 1:
            world.kill(1)
            return
        buckets.ready(0)
        if group.rank == 0:
            await asyncio.sleep(1)  # the group is aborted meanwhile
            with pytest.raises(dist.GroupAbortedError, match="rank 1"):
                buckets.ready(1)
        else:
            buckets.ready(1)
            with pytest.raises(dist.PeerLostError):
                await buckets.averaged()

    run_world(3, main, pass_world=True)
