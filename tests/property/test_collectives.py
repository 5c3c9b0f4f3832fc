"""Every collective against numpy, over dtypes, reductions, worlds, sizes, algorithms and timing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fewer_cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncdist as dist
from asyncdist.arrays import reduction
from asyncdist.plan.algorithms.registry import algorithms
from asyncdist.testing import run_world

DTYPES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
OPS = [op for op in dist.ReduceOp if op is not dist.ReduceOp.PREMUL_SUM]

worlds = st.integers(1, 6)
dtypes = st.sampled_from(DTYPES).map(np.dtype)
lengths = st.one_of(st.integers(0, 9), st.sampled_from([100, 16_385, 70_001]))
seeds = st.one_of(st.none(), st.integers(0, 2**32))


def values(dtype: np.dtype[Any], length: int, rank: int, salt: int) -> np.ndarray:
    """Small whole numbers, so that sums and products of every dtype are exact in any order."""
    numbers = np.random.default_rng([salt, rank]).integers(0 if dtype.kind in "bu" else -2, 3, length)
    return numbers.astype(dtype)


def reduced(op: dist.ReduceOp, contributions: list[np.ndarray]) -> np.ndarray:
    """What the reduction must give, one rank after the other."""
    total = contributions[0].copy()
    kernel = reduction.kernel(op, total.dtype)
    for contribution in contributions[1:]:
        kernel(total, contribution, total)
    reduction.finish(op, total, len(contributions))
    return total


def defined(op: dist.ReduceOp, dtype: np.dtype[Any]) -> bool:
    try:
        reduction.validate(op, dtype)
    except TypeError:
        return False
    return True


reductions = st.tuples(dtypes, st.sampled_from(OPS)).filter(lambda pair: defined(pair[1], pair[0]))


@settings(max_examples=examples(20))
@given(worlds, reductions, lengths, st.integers(0, 99), seeds)
def test_reducing_collectives(
    size: int, pair: tuple[np.dtype[Any], dist.ReduceOp], length: int, salt: int, seed: int | None
) -> None:
    dtype, op = pair
    contributions = [values(dtype, length, rank, salt) for rank in range(size)]
    expected = reduced(op, contributions)
    root = salt % size
    parts = [values(dtype, length * size, rank, salt) for rank in range(size)]

    async def main(group: dist.ProcessGroup) -> None:
        own = contributions[group.rank].copy()
        works = [group.all_reduce(own, op)]
        to_root = contributions[group.rank].copy()
        works.append(group.reduce(to_root, root, op))
        part = np.empty(length, dtype)
        works.append(group.reduce_scatter_tensor(part, parts[group.rank], op))
        for work in works:
            await work
        assert np.array_equal(own, expected)
        assert np.array_equal(to_root, expected if group.rank == root else contributions[group.rank])
        mine = slice(group.rank * length, (group.rank + 1) * length)
        assert np.array_equal(part, reduced(op, [whole[mine] for whole in parts]))

    run_world(size, main, seed=seed)


@settings(max_examples=examples(20))
@given(worlds, dtypes, lengths, st.integers(0, 99), seeds)
def test_moving_collectives(size: int, dtype: np.dtype[Any], length: int, salt: int, seed: int | None) -> None:
    contributions = [values(dtype, length, rank, salt) for rank in range(size)]
    root = salt % size

    async def main(group: dist.ProcessGroup) -> None:
        own = contributions[group.rank]
        everyone = [np.empty(length, dtype) for _ in range(size)]
        stacked = np.empty((size, length), dtype)
        at_root = [np.empty(length, dtype) for _ in range(size)] if group.rank == root else None
        from_root = own.copy()
        scattered = np.empty(length, dtype)
        for work in [
            group.all_gather(everyone, own),
            group.all_gather_into_tensor(stacked, own),
            group.gather(own, at_root, root),
            group.broadcast(from_root, root),
            group.scatter(scattered, contributions if group.rank == root else None, root),
            group.barrier(),
        ]:
            await work
        assert np.array_equal(everyone, contributions)
        assert np.array_equal(stacked, contributions)
        assert at_root is None or np.array_equal(at_root, contributions)
        assert np.array_equal(from_root, contributions[root])
        assert np.array_equal(scattered, own)

    run_world(size, main, seed=seed)


@settings(max_examples=examples(10))
@given(st.integers(1, 5), st.data(), seeds)
def test_uneven_reduce_scatter(size: int, data: st.DataObject, seed: int | None) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 5, 20_000]), min_size=size, max_size=size))

    async def main(group: dist.ProcessGroup) -> None:
        out = np.empty(sizes[group.rank])
        await group.reduce_scatter(out, [np.full(n, group.rank + index * 10.0) for index, n in enumerate(sizes)])
        assert (out == sum(range(size)) + size * group.rank * 10.0).all()

    run_world(size, main, seed=seed)


@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
def test_random_floats_are_bit_identical_on_all_ranks(algorithm: str) -> None:
    async def main(group: dist.ProcessGroup) -> bytes:
        group._core._backend._overrides["all_reduce"] = algorithm  # type: ignore[attr-defined]
        x = np.random.default_rng(group.rank).standard_normal(10_007).astype(np.float32)
        await group.all_reduce(x)
        return x.tobytes()

    for size in (2, 3, 5, 8):
        assert len(set(run_world(size, main, seed=size))) == 1
