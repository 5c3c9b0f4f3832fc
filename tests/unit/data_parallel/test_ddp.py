"""DistributedDataParallel: alike on all ranks, whatever the order, the hook, and the number of steps."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.data_parallel import GradientBucket, PeriodicAverager, hooks
from asyncdist.testing import run_world

SHAPES = {"first": (3, 4), "second": (4,), "third": (5, 2)}


def arrays(value: float = 0.0) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


def test_rank_0_s_parameters_are_everybody_s() -> None:
    async def main(group: Group) -> None:
        ddp = await dist.DistributedDataParallel(arrays(group.rank + 5))
        assert all((array == 5).all() for array in ddp.parameters.values())
        await ddp.sync_parameters()
        assert repr(ddp) == "<DistributedDataParallel of 3 parameters in 1 buckets>"

    run_world(3, main)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_averages_come_by_name(bucket_bytes: int) -> None:
    async def main(group: Group) -> None:
        ddp = await dist.DistributedDataParallel(arrays(), bucket_bytes=bucket_bytes)
        shuffle = random.Random(group.rank)
        for number in range(3):
            for name in shuffle.sample(list(SHAPES), 3):
                ddp.ready(name, np.full(SHAPES[name], group.rank + number + len(name), np.float64))
            averages = await ddp.averaged()
            assert averages is ddp.gradients
            assert all((averages[name] == 1 + number + len(name)).all() for name in SHAPES)

    run_world(3, main)


def test_what_is_added_up_without_sending_goes_with_the_next_step() -> None:
    async def main(group: Group) -> None:
        ddp = await dist.DistributedDataParallel(arrays())
        for _ in range(2):
            with ddp.no_sync():
                for number in range(3):
                    for name in SHAPES:
                        ddp.ready(name, np.full(SHAPES[name], 10 * number + group.rank, np.float32))
            for name in SHAPES:
                ddp.ready(name, np.full(SHAPES[name], 100, np.float32))
            averages = await ddp.averaged()
            assert all((array == 100 + 30 + 3).all() for array in averages.values())

    run_world(3, main)


def test_unused_parameters_count_as_zeros_where_they_may() -> None:
    async def main(group: Group) -> None:
        strict = await dist.DistributedDataParallel(arrays())
        ddp = await dist.DistributedDataParallel(arrays(), find_unused_parameters=True)
        for rank in range(2):
            for name in SHAPES if group.rank == rank else ["first"]:
                ddp.ready(name, np.full(SHAPES[name], 4, np.float32))
            averages = await ddp.averaged()
            assert [array.flat[0] for array in averages.values()] == [2, 2, 4]
        strict.ready("first", np.zeros(SHAPES["first"]))
        with pytest.raises(ValueError, match="not ready yet: gradients 0, 1"):
            strict.averaged()

    run_world(2, main)


@pytest.mark.parametrize("steps", [(0, 0, 0), (3, 1, 2), (0, 0, 4), (5, 5, 5)])
def test_uneven_inputs(steps: tuple[int, ...]) -> None:
    """Averages are over all ranks, those without a step among them; at the end all have the last one's parameters."""

    async def main(group: Group) -> Any:
        ddp = await dist.DistributedDataParallel(arrays())
        seen = []
        async with ddp.join():
            for number in range(steps[group.rank]):
                with ddp.no_sync():
                    ddp.ready("second", np.zeros(SHAPES["second"]))
                for name in SHAPES:
                    ddp.ready(name, np.full(SHAPES[name], 3 * 2**group.rank, np.float32))
                averages = await ddp.averaged()
                seen.append(float(averages["second"][0]))
                for name, parameter in ddp.parameters.items():
                    parameter += averages[name]
                assert number < steps[group.rank]
        return seen, {name: array.tolist() for name, array in ddp.parameters.items()}

    results = run_world(3, main)
    averages = [float(sum(2**rank for rank in range(3) if steps[rank] > number)) for number in range(max(steps))]
    for rank, (seen, parameters) in enumerate(results):
        assert seen == averages[: steps[rank]]
        assert parameters == {name: np.full(shape, sum(averages)).tolist() for name, shape in SHAPES.items()}


def test_uneven_inputs_with_a_hook() -> None:
    """What says that a rank goes on has a tag of its own."""

    async def main(group: Group) -> Any:
        ddp = await dist.DistributedDataParallel(arrays(), comm_hook=hooks.fp16, bucket_bytes=1)
        async with ddp.join():
            for _ in range(group.rank):
                for name in SHAPES:
                    ddp.ready(name, np.full(SHAPES[name], 2, np.float32))
                await ddp.averaged()

    run_world(2, main)


def test_a_step_after_join_says_nothing_more() -> None:
    async def main(group: Group) -> None:
        ddp = await dist.DistributedDataParallel(arrays())
        with pytest.raises(ZeroDivisionError):
            async with ddp.join():
                raise ZeroDivisionError
        async with ddp.join():
            with pytest.raises(RuntimeError, match="entered already"):
                async with ddp.join():
                    pass
        for name in SHAPES:
            ddp.ready(name, np.ones(SHAPES[name]))
        assert (await ddp.averaged())["first"][0, 0] == 1

    run_world(2, main)


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize("chosen", ["fp16", "bf16", "all of them"])
def test_hooks_that_average(chosen: str, bucket_bytes: int) -> None:
    pytest.importorskip("ml_dtypes")

    async def main(group: Group) -> None:
        hook = {"fp16": hooks.fp16, "bf16": hooks.bf16}.get(chosen) or hooks.TopK(1.0)
        ddp = await dist.DistributedDataParallel(arrays(), comm_hook=hook, bucket_bytes=bucket_bytes)
        rng = np.random.default_rng(7)
        for _ in range(3):
            everybody = rng.standard_normal((3, 12)).astype(np.float32)
            for name in SHAPES:
                ddp.ready(name, everybody[group.rank, : np.prod(SHAPES[name])].reshape(SHAPES[name]))
            averages = await ddp.averaged()
            for name in SHAPES:
                expected = everybody.mean(axis=0)[: np.prod(SHAPES[name])]
                np.testing.assert_allclose(averages[name].ravel(), expected, atol=0.02)

    run_world(3, main)


def test_what_top_k_leaves_out_comes_later() -> None:
    """With one of four gradients sent in each step, four steps have sent all of the first one's."""

    async def main(group: Group) -> Any:
        top = hooks.TopK(0.25)
        ddp = await dist.DistributedDataParallel({"x": np.zeros(4, np.float32)}, comm_hook=top)
        total = np.zeros(4, np.float32)
        for number in range(4):
            ddp.ready("x", np.array([1, 2, 3, 4], np.float32) * (number == 0) * (group.rank + 1))
            total += (await ddp.averaged())["x"]
        return total.tolist()

    assert run_world(2, main) == [[1.5, 3, 4.5, 6]] * 2
    with pytest.raises(ValueError, match="ratio must be above 0"):
        hooks.TopK(0)


def test_a_hook_that_fails_ends_the_step_everywhere() -> None:
    async def main(group: Group) -> None:
        async def hook(bucket: GradientBucket) -> None:
            if group.rank == 1:
                raise ZeroDivisionError("no")
            await group.all_reduce(bucket.buffer, tag=bucket.tag)

        ddp = await dist.DistributedDataParallel(arrays(), comm_hook=hook)
        for name in SHAPES:
            ddp.ready(name, np.ones(SHAPES[name]))
        expected = ZeroDivisionError if group.rank == 1 else dist.GroupAbortedError
        with pytest.raises(expected, match="no"):
            await ddp.averaged()

    run_world(2, main)


def test_gradients_may_come_from_any_thread() -> None:
    async def main(group: Group) -> None:
        ddp = await dist.DistributedDataParallel(arrays(), bucket_bytes=1)

        def backward() -> None:
            for name in SHAPES:
                ddp.ready(name, np.full(SHAPES[name], group.rank, np.float32))

        await asyncio.to_thread(backward)
        averages = await ddp.averaged()
        assert all((array == 0.5).all() for array in averages.values())
        await asyncio.to_thread(ddp.ready, "first", np.ones(7))
        with pytest.raises(ValueError, match="gradient 'first' is float64"):
            ddp.averaged()

    run_world(2, main, loop_factory=asyncio.new_event_loop)


def test_other_names_are_told() -> None:
    async def main(group: Group) -> None:
        parameters = arrays()
        if group.rank == 2:
            parameters = dict(reversed(parameters.items()))
        said = "group ranks 0, 1 list" if group.rank == 2 else "group ranks 2 list"
        with pytest.raises(dist.CollectiveMismatchError, match=said):
            await dist.DistributedDataParallel(parameters)

    run_world(3, main)


def test_what_is_no_module() -> None:
    async def main(group: Group) -> None:
        with pytest.raises(TypeError, match=r"module must be a dict of arrays, or have named_parameters\(\), not list"):
            dist.DistributedDataParallel([np.zeros(3)])
        with pytest.raises(ValueError, match="parameters must not be empty"):
            dist.DistributedDataParallel({})
        ddp = dist.DistributedDataParallel(arrays())
        with pytest.raises(KeyError, match="no parameter is called 'fourth'"):
            ddp.ready("fourth", np.zeros(3))
        with pytest.raises(ValueError, match="period must be at least 1"):
            PeriodicAverager([], 0)

    run_world(1, main)


def test_averaging_every_n_steps() -> None:
    async def main(group: Group) -> Any:
        parameter = np.zeros(2)
        averager = PeriodicAverager([parameter], period=3, warmup_steps=1)
        seen = []
        for _ in range(7):
            parameter += group.rank
            seen.append(await averager.step())
        return seen, parameter.tolist()

    averaged = [True, False, False, True, False, False, True]
    assert run_world(3, main) == [(averaged, [7, 7])] * 3
