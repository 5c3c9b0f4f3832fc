"""Exchanges, prefix reductions, uneven collectives and functions of the user's against numpy, in worlds of 1 to 9."""

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
from asyncdist.plan.problem import BLOCK_COLLECTIVES
from asyncdist.testing import run_world

DTYPES = [np.dtype(name) for name in ("bool", "uint8", "int16", "int64", "float16", "float32", "complex128")]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BXOR]
LAST = dist.ReduceOp.custom(lambda left, right: right, commutative=False, name="last")
FIRST = dist.ReduceOp.custom(lambda left, right: left, commutative=False, name="first")

sizes = st.integers(1, 9)
dtypes = st.sampled_from(DTYPES)
seeds = st.one_of(st.none(), st.integers(0, 2**32))
lengths = st.one_of(st.integers(0, 6), st.sampled_from([0, 1, 3_000, 20_001]))


def values(dtype: np.dtype[Any], shape: Any, *seed: int) -> np.ndarray:
    numbers = np.random.default_rng(seed).integers(0 if dtype.kind in "bu" else -2, 3, shape)
    return numbers.astype(dtype)


def choose(group: dist.ProcessGroup, data: dict[str, str]) -> None:
    group._core._backend._overrides.update(data)  # type: ignore[attr-defined]


@st.composite
def overrides(draw: st.DrawFn, *collectives: str) -> dict[str, str]:
    """One of the algorithms of each collective, or the one that is chosen."""
    drawn = {name: draw(st.sampled_from([None, *algorithms(name)])) for name in collectives}
    return {name: algorithm for name, algorithm in drawn.items() if algorithm is not None}


@settings(max_examples=examples(20))
@given(sizes, dtypes, st.data(), overrides("all_to_all", "all_to_all_uneven"), st.integers(0, 99), seeds)
def test_exchanges(
    size: int, dtype: np.dtype[Any], data: st.DataObject, chosen: dict[str, str], salt: int, seed: int | None
) -> None:
    rows = data.draw(st.lists(lengths, min_size=size * size, max_size=size * size))
    lines = [rows[rank * size : (rank + 1) * size] for rank in range(size)]
    even = data.draw(lengths)
    columns = data.draw(st.integers(1, 2))

    def block(source: int, target: int, n: int) -> np.ndarray:
        return values(dtype, (n, columns), salt, source, target)

    async def main(group: dist.ProcessGroup) -> None:
        choose(group, chosen)
        rank = group.rank
        received = [line[rank] for line in lines]
        inputs = [block(rank, target, n) for target, n in enumerate(lines[rank])]
        expected = [block(source, rank, n) for source, n in enumerate(received)]
        outputs = [np.zeros((n, columns), dtype) for n in received]
        single = np.zeros((sum(received), columns), dtype)
        shared = np.zeros((size * even, columns), dtype)
        whole = np.concatenate([block(rank, target, even) for target in range(size)])
        for work in [
            group.all_to_all(outputs, inputs),
            group.all_to_all_single(single, np.concatenate(inputs), received, lines[rank]),
            group.all_to_all_single(shared, whole),
        ]:
            await work
        assert all(np.array_equal(output, wanted) for output, wanted in zip(outputs, expected, strict=True))
        assert np.array_equal(single, np.concatenate(expected))
        assert np.array_equal(shared, np.concatenate([block(source, rank, even) for source in range(size)]))

    run_world(size, main, seed=seed)


@settings(max_examples=examples(20))
@given(sizes, dtypes, st.sampled_from(OPS), lengths, overrides("scan", "exscan"), st.integers(0, 99), seeds)
def test_prefixes(
    size: int,
    dtype: np.dtype[Any],
    op: dist.ReduceOp,
    length: int,
    chosen: dict[str, str],
    salt: int,
    seed: int | None,
) -> None:
    try:
        kernel = reduction.kernel(op, dtype)
    except TypeError:
        return
    everyone = [values(dtype, length, salt, rank) for rank in range(size)]
    prefixes = [everyone[0]]
    for other in everyone[1:]:
        total = prefixes[-1].copy()
        kernel(total, other, total)
        prefixes.append(total)

    async def main(group: dist.ProcessGroup) -> None:
        choose(group, chosen)
        x, y = everyone[group.rank].copy(), everyone[group.rank].copy()
        works = [group.scan(x, op), group.exscan(y, op)]
        for work in works:
            await work
        assert np.array_equal(x, prefixes[group.rank])
        assert np.array_equal(y, prefixes[group.rank - 1] if group.rank else everyone[0])

    run_world(size, main, seed=seed)


@settings(max_examples=examples(14))
@given(sizes, dtypes, st.data(), overrides("all_gather"), st.integers(0, 99), seeds)
def test_uneven_gathers(
    size: int, dtype: np.dtype[Any], data: st.DataObject, chosen: dict[str, str], salt: int, seed: int | None
) -> None:
    counts = data.draw(st.lists(lengths, min_size=size, max_size=size))
    root = data.draw(st.integers(0, size - 1))
    expected = [values(dtype, n, salt, rank) for rank, n in enumerate(counts)]

    async def main(group: dist.ProcessGroup) -> None:
        choose(group, chosen)
        own = expected[group.rank]
        everyone = [np.zeros(n, dtype) for n in counts]
        at_root = [np.zeros(n, dtype) for n in counts] if group.rank == root else None
        back = np.zeros(own.size, dtype)
        for work in [
            group.all_gather(everyone, own),
            group.gather(own, at_root, root, uneven=True),
            group.scatter(back, expected if group.rank == root else None, root, uneven=True),
        ]:
            await work
        for found in filter(None, (everyone, at_root)):
            assert all(np.array_equal(one, wanted) for one, wanted in zip(found, expected, strict=True))
        assert np.array_equal(back, own)

    run_world(size, main, seed=seed)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter", "scan", "exscan"])
@settings(max_examples=examples(8))
@given(sizes, lengths, st.data(), st.integers(0, 99), seeds)
def test_rank_order(collective: str, size: int, length: int, data: st.DataObject, salt: int, seed: int | None) -> None:
    """Operations whose result is the lowest or the highest rank's operand."""
    chosen = data.draw(overrides(collective))
    root = salt % size
    total = length * size if collective in BLOCK_COLLECTIVES else length

    async def main(group: dist.ProcessGroup) -> None:
        choose(group, chosen)
        rank = group.rank
        last = {"scan": rank, "exscan": max(rank - 1, 0)}.get(collective, size - 1)
        for op, winner in ((FIRST, 0), (LAST, last)):
            x = values(np.dtype(int), total, salt, rank)
            expected = values(np.dtype(int), total, salt, winner)
            if collective == "reduce":
                await group.reduce(x, root, op)
                expected = expected if rank == root else values(np.dtype(int), total, salt, rank)
            elif collective == "reduce_scatter":
                out = np.zeros(length, int)
                await group.reduce_scatter_tensor(out, x, op)
                x, expected = out, expected[rank * length : (rank + 1) * length]
            else:
                await getattr(group, collective)(x, op)
            assert np.array_equal(x, expected)

    run_world(size, main, seed=seed)
