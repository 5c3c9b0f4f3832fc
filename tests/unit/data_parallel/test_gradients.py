"""Averaging gradients and handing out parameters, and what happens when ranks do not agree."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.data_parallel.gradients import divide
from asyncdist.testing import run_world

SHAPES = [(2, 3), (), (0,), (5,), (40,), (4, 4)]
DTYPES = [np.float32, np.float64, ml_dtypes.bfloat16, np.float32, np.float64, np.float32]


class Unused:
    """Gradients that are looked up one by one, of a layer that has none."""

    def __iter__(self) -> Iterator[Any]:
        raise AttributeError("no attribute 'grad'")


def arrays(rank: int) -> list[np.ndarray[Any, Any]]:
    return [
        np.full(shape, rank + index, dtype) for index, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))
    ]


def test_buckets_have_one_dtype_and_a_bound() -> None:
    single, double = np.zeros(1, np.float32), np.zeros(1)
    mixed = [single, double, single, double, single]
    assert divide(mixed, 1 << 20) == [[1, 3], [0, 2, 4]]
    assert divide(mixed, 8) == [[1], [0, 2], [3], [4]]
    assert divide(mixed, 7) == [[0], [1], [2], [3], [4]]  # one that is larger has a bucket to itself
    assert divide([np.zeros(10), np.zeros(0), np.zeros(1)], 80) == [[0, 1], [2]]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_average(size: int, bucket_bytes: int) -> None:
    async def main(group: Group) -> None:
        own = arrays(group.rank)
        assert await dist.average_gradients(own, bucket_bytes=bucket_bytes) == own
        for index, (array, shape) in enumerate(zip(own, SHAPES, strict=True)):
            assert array.shape == shape
            assert (array == (size - 1) / 2 + index).all()

    run_world(size, main, seed=size)


def test_another_reduction_and_strided_arrays() -> None:
    async def main(group: Group) -> None:
        base = np.full((4, 6), float(group.rank + 1))
        weight = dist.ReduceOp.PREMUL_SUM([0.25, 0.75][group.rank])
        await dist.average_gradients((view for view in [base[:, ::2], base[:2, 1::2].T]), op=weight)
        assert (base[:, ::2] == 1.75).all()
        assert (base[:2, 1::2] == 1.75).all()
        assert (base[2:, 1::2] == group.rank + 1).all()

    run_world(2, main)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_parameters_are_the_sources(bucket_bytes: int) -> None:
    async def main(group: Group) -> None:
        own = arrays(group.rank)
        if group.rank == 2:
            for array in own:
                array.flags.writeable = False
        await dist.broadcast_parameters(own, src=2, bucket_bytes=bucket_bytes)
        for index, array in enumerate(own):
            assert (array == 2 + index).all()
        pair = dist.new_group([1, 3])
        if group.rank in (1, 3):
            mine = [np.full(2, group.rank)]
            await dist.broadcast_parameters(mine, group=pair)  # the group's first rank
            assert mine[0].tolist() == [1, 1]

    run_world(4, main)


def test_any_task_may_wait_or_nobody() -> None:
    async def main(group: Group) -> None:
        own = arrays(group.rank)
        work = dist.average_gradients(own, bucket_bytes=1)
        assert not work.done()
        assert "average_gradients" in repr(work)
        assert await work.wait(timeout=5)
        assert work.result() == own
        dist.average_gradients(arrays(group.rank))  # closing waits for it

    run_world(2, main)


@pytest.mark.parametrize(
    ("wrong", "error", "reason"),
    [
        ([], ValueError, "must not be empty"),
        ([np.ones(2), None], TypeError, r"gradients\[1\]"),
        ([np.ones(2), np.ones(2, object)], TypeError, "object"),
        ([np.frombuffer(b"12345678")], ValueError, r"gradients\[0\] is read-only"),
        (3, TypeError, "a list of arrays, not int; of a torch module its parameters"),
        (np.ones(3), TypeError, "not one ndarray: put it into a list"),
        (b"123", TypeError, "not one bytes"),
        ({"bias": np.ones(3)}, TypeError, r"pass its values\(\)"),
        (Unused(), AttributeError, "no attribute 'grad'"),
    ],
)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_rank_that_refuses_is_told_on(wrong: Any, error: type[Exception], reason: str, bucket_bytes: int) -> None:
    """With one operation the group goes on; with more, the others' later ones have nobody to meet."""

    async def main(group: Group) -> None:
        if group.rank == 1:
            with pytest.raises(error, match=reason):
                dist.average_gradients(wrong)
        else:
            own = [np.ones(2), np.ones(3)]
            with pytest.raises(dist.CollectiveMismatchError, match=f"rank 1.*{reason}"):
                await dist.average_gradients(own, bucket_bytes=bucket_bytes)
        if bucket_bytes > 1:
            await dist.barrier()
        else:
            await later_failure()

    run_world(3, main)


async def later_failure() -> None:
    """The next operations of a group that is out of step do not get far."""
    with pytest.raises((dist.CollectiveMismatchError, dist.GroupAbortedError)):
        await dist.barrier()


def test_what_all_refuse_costs_nothing() -> None:
    async def main(group: Group) -> None:
        with pytest.raises(TypeError, match="bool"):
            dist.average_gradients([np.ones(2, bool)])
        for bucket_bytes, error in [(0, ValueError), (1.5, TypeError), (True, TypeError)]:
            with pytest.raises(error, match="bucket_bytes"):
                dist.average_gradients([np.ones(2)], bucket_bytes=bucket_bytes)  # type: ignore[arg-type]
            with pytest.raises(error, match="bucket_bytes"):
                dist.broadcast_parameters([np.ones(2)], bucket_bytes=bucket_bytes)  # type: ignore[arg-type]
        await dist.average_gradients([np.ones(2)], bucket_bytes=1)

    run_world(2, main)


def test_the_example_of_the_documentation_learns() -> None:
    page = Path(__file__).parents[3] / "docs" / "data-parallel.md"
    source = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert source is not None
    namespace: dict[str, Any] = {}
    exec(source[1], namespace)
    inputs = np.random.default_rng(0).normal(size=(103, 2))
    targets = inputs @ [1.0, 2.0]

    async def main(group: Group) -> np.ndarray[Any, Any]:
        weights = np.full(2, float(group.rank))
        await namespace["train"]([weights], inputs, targets, lambda _index, x, y: 2 * (x @ weights - y) @ x / len(x))
        return weights

    first, *others = run_world(3, main)
    assert np.allclose(first, [1, 2], atol=0.01)
    assert all(np.array_equal(first, other) for other in others)


def test_a_refusal_half_way_ends_the_group() -> None:
    async def main(group: Group) -> None:
        own = [np.ones(2), np.ones(4), np.ones(2)]
        await dist.barrier()  # an abort is told to those who are connected
        if group.rank == 0:
            own[1] = np.lib.stride_tricks.as_strided(np.ones(1), (4,), (0,))
            with pytest.raises(ValueError, match="overlaps itself"):
                dist.average_gradients(own, bucket_bytes=1)
        else:
            with pytest.raises((dist.GroupAbortedError, dist.CollectiveMismatchError), match="overlaps itself"):
                await dist.average_gradients(own, bucket_bytes=1)
        with pytest.raises(dist.GroupAbortedError):
            await dist.barrier()

    run_world(2, main)


def test_lists_that_differ() -> None:
    async def main(group: Group) -> None:
        own = [np.ones(2), np.ones(3)] if group.rank else [np.ones(3), np.ones(2)]
        with pytest.raises(dist.CollectiveMismatchError, match=r"of 3\+2.*of 2\+3"):
            await dist.average_gradients(own)

    run_world(2, main)


def test_a_failure_nobody_asked_about_is_raised_at_the_end_once() -> None:
    async def main(group: Group, world: Any) -> None:
        if group.rank == 1:
            await dist.barrier(tag=1)
            world.kill(1)
            return
        work = dist.average_gradients(arrays(0), bucket_bytes=1)
        await dist.barrier(tag=1)
        ended = asyncio.Event()
        work.add_done_callback(lambda _work: ended.set())
        await ended.wait()
        with pytest.raises(dist.PeerLostError):
            await dist.destroy_process_group()

    async def asked(group: Group, world: Any) -> None:
        if group.rank == 1:
            world.kill(1)
            return
        with pytest.raises(dist.PeerLostError):
            await dist.average_gradients(arrays(0), bucket_bytes=1)
        await dist.destroy_process_group()

    run_world(2, asked, pass_world=True)
    run_world(2, main, pass_world=True)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("average_gradients", lambda arrays: dist.average_gradients(arrays)),
        ("broadcast_parameters", lambda arrays: dist.broadcast_parameters(arrays)),
        ("GradientBuckets", lambda arrays: _averaged(dist.GradientBuckets(arrays))),
    ],
)
def test_errors_name_what_was_called(name: str, call: Any) -> None:
    async def main(group: Group) -> str:
        try:
            await call([np.ones(3 + group.rank), np.ones(2)])
            await group.barrier()
        except dist.CollectiveError as error:
            return str(error)
        return "nothing"

    for told in run_world(2, main):
        assert f"rank 0 runs {name} float64[5] " in told
        assert "coalesced" not in told


def _averaged(buckets: Any) -> Any:
    buckets.ready(0)
    buckets.ready(1)
    return buckets.averaged()
