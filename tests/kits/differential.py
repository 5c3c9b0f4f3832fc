"""Collectives beside numpy: what to run, and what numpy says must come of it. Used in simulated and in real worlds."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from asyncdist import ProcessGroup as Group
from asyncdist import ReduceOp as Op
from asyncdist.group.core import core_of
from asyncdist.plan.problem import COLLECTIVES

DTYPES = [
    np.dtype(dtype)
    for dtype in (
        "bool",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    )
]
REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "SUM": lambda stack: np.add.reduce(stack, 0, stack.dtype),  # of bool: whether any is
    "PRODUCT": lambda stack: np.multiply.reduce(stack, 0, stack.dtype),  # of bool: whether all are
    "MIN": lambda stack: np.min(stack, 0),
    "MAX": lambda stack: np.max(stack, 0),
    "BAND": lambda stack: np.bitwise_and.reduce(stack, 0),
    "BOR": lambda stack: np.bitwise_or.reduce(stack, 0),
    "BXOR": lambda stack: np.bitwise_xor.reduce(stack, 0),
    "AVG": lambda stack: np.trunc(stack.sum(0) / len(stack)) if stack.dtype.kind in "iu" else stack.sum(0) / len(stack),
}


def ops_of(dtype: np.dtype[Any]) -> list[str]:
    """What may be asked of a dtype, as the table of `asyncdist.arrays.reduction` says."""
    if dtype.kind == "b":
        return [name for name in REDUCTIONS if name != "AVG"]
    if dtype.kind in "iu":
        return list(REDUCTIONS)
    return ["SUM", "PRODUCT", "AVG"] + (["MIN", "MAX"] if dtype.kind != "c" else [])


def wide(array: np.ndarray) -> np.ndarray:
    """Where numpy works out what narrow floats must give: all values here are exact in both."""
    return array.astype(np.float64) if array.dtype.itemsize <= 2 and array.dtype.kind not in "biu" else array


@lru_cache(256)
def numbers(low: int, high: int, count: int, *seed: int) -> np.ndarray:
    """Random whole numbers: every rank asks for those of all, to know what must come of them."""
    return np.random.default_rng(seed).integers(low, high, count).astype(np.int8)


@dataclass(frozen=True)
class Case:
    """One collective to run; `counts` is one length per rank, of which collectives on vectors use the first."""

    size: int
    dtype: np.dtype[Any]
    op: str
    counts: tuple[int, ...]
    root: int
    salt: int

    def values(self, *place: int, count: int) -> np.ndarray:
        """Small whole numbers of a place: sums and products of up to nine are exact in every dtype, in any order."""
        low = 0 if self.dtype.kind in "bu" or self.dtype.itemsize == 1 else -2
        high = 2 if self.dtype.itemsize == 1 else 3
        return numbers(low, high, count, self.salt, *place).astype(self.dtype)

    def vector(self, rank: int) -> np.ndarray:
        return self.values(rank, count=self.counts[0])

    def block(self, rank: int, index: int) -> np.ndarray:
        return self.values(rank, index, count=self.counts[index])

    def blocks(self, rank: int) -> list[np.ndarray]:
        return [self.block(rank, index) for index in range(len(self.counts))]

    def reduced(self, arrays: list[np.ndarray]) -> np.ndarray:
        """What numpy makes of all ranks' arrays."""
        return REDUCTIONS[self.op](np.stack([wide(array) for array in arrays])).astype(self.dtype)

    def empty(self, count: int) -> np.ndarray:
        return np.ones(count, self.dtype)


def same(found: np.ndarray, expected: np.ndarray, op: str = "") -> bool:
    """Equal; quotients but for the last bit, where they are rounded twice."""
    if op != "AVG" or found.dtype.kind in "iu":
        return np.array_equal(found, expected)
    return np.allclose(wide(found), wide(expected), rtol=0.15 if found.dtype.itemsize == 1 else 0.01)


async def all_reduce(group: Group, case: Case) -> None:
    x = case.vector(group.rank)
    await group.all_reduce(x, Op[case.op])
    assert same(x, case.reduced([case.vector(rank) for rank in range(case.size)]), case.op)


async def reduce(group: Group, case: Case) -> None:
    x = case.vector(group.rank)
    await group.reduce(x, case.root, Op[case.op])
    total = case.reduced([case.vector(rank) for rank in range(case.size)])
    assert same(x, total if group.rank == case.root else case.vector(group.rank), case.op)


async def scan(group: Group, case: Case) -> None:
    op = "SUM" if case.op == "AVG" else case.op
    x = case.vector(group.rank)
    await group.scan(x, Op[op])
    assert same(x, replace(case, op=op).reduced([case.vector(rank) for rank in range(group.rank + 1)]))


async def exscan(group: Group, case: Case) -> None:
    op = "SUM" if case.op == "AVG" else case.op
    x = case.vector(group.rank)
    await group.exscan(x, Op[op])
    before = [case.vector(rank) for rank in range(group.rank)]
    assert same(x, replace(case, op=op).reduced(before) if before else case.vector(0))


async def broadcast(group: Group, case: Case) -> None:
    x = case.vector(group.rank)
    await group.broadcast(x, case.root)
    assert same(x, case.vector(case.root))


async def barrier(group: Group, case: Case) -> None:
    await group.barrier()


async def all_gather(group: Group, case: Case) -> None:
    found = [case.empty(count) for count in case.counts]
    await group.all_gather(found, case.block(group.rank, group.rank))
    assert all(same(one, case.block(rank, rank)) for rank, one in enumerate(found))
    whole = case.empty(case.size * case.counts[0])
    await group.all_gather_into_tensor(whole, case.vector(group.rank))
    assert same(whole, np.concatenate([case.vector(rank) for rank in range(case.size)]))


async def reduce_scatter(group: Group, case: Case) -> None:
    out = case.empty(case.counts[group.rank])
    await group.reduce_scatter(out, case.blocks(group.rank), Op[case.op])
    assert same(out, case.reduced([case.block(rank, group.rank) for rank in range(case.size)]), case.op)
    count = case.counts[0]
    wholes = [case.values(rank, 99, count=count * case.size) for rank in range(case.size)]
    await group.reduce_scatter_tensor(part := case.empty(count), wholes[group.rank], Op[case.op])
    mine = slice(group.rank * count, (group.rank + 1) * count)
    assert same(part, case.reduced([whole[mine] for whole in wholes]), case.op)


async def gather(group: Group, case: Case, uneven: bool = False) -> None:
    places = [case.empty(count if uneven else case.counts[0]) for count in case.counts]
    given = [case.block(rank, rank) if uneven else case.vector(rank) for rank in range(case.size)]
    here = group.rank == case.root
    await group.gather(given[group.rank], places if here else None, case.root, uneven=uneven)
    assert not here or all(same(one, expected) for one, expected in zip(places, given, strict=True))


async def scatter(group: Group, case: Case, uneven: bool = False) -> None:
    given = case.blocks(case.root) if uneven else [case.vector(rank) for rank in range(case.size)]
    out = case.empty(given[group.rank].size)
    await group.scatter(out, given if group.rank == case.root else None, case.root, uneven=uneven)
    assert same(out, given[group.rank])


async def gather_uneven(group: Group, case: Case) -> None:
    await gather(group, case, uneven=True)


async def scatter_uneven(group: Group, case: Case) -> None:
    await scatter(group, case, uneven=True)


async def all_to_all(group: Group, case: Case) -> None:
    count = case.counts[0]
    sent = [case.values(rank, count=count * case.size) for rank in range(case.size)]
    out = case.empty(count * case.size)
    await group.all_to_all_single(out, sent[group.rank])
    mine = slice(group.rank * count, (group.rank + 1) * count)
    assert same(out, np.concatenate([whole[mine] for whole in sent]))


async def all_to_all_uneven(group: Group, case: Case) -> None:
    def sizes(source: int) -> list[int]:
        return [case.counts[(source + target) % case.size] for target in range(case.size)]

    def block(source: int, target: int) -> np.ndarray:
        return case.values(source, target, count=sizes(source)[target])

    mine = [block(group.rank, target) for target in range(case.size)]
    theirs = [block(source, group.rank) for source in range(case.size)]
    outputs = [case.empty(one.size) for one in theirs]
    await group.all_to_all(outputs, mine)
    assert all(same(one, expected) for one, expected in zip(outputs, theirs, strict=True))
    out = case.empty(sum(one.size for one in theirs))
    await group.all_to_all_single(out, np.concatenate(mine), [one.size for one in theirs], sizes(group.rank))
    assert same(out, np.concatenate(theirs))


RUNS: dict[str, Callable[[Group, Case], Awaitable[None]]] = {
    name: function for name in COLLECTIVES if (function := globals().get(name))
}


def choose(group: Group, collective: str, algorithm: str, ranks_per_host: int) -> None:
    """Have `group` use an algorithm, as ASYNCDIST_ALGO does on hosts of so many ranks."""
    backend: Any = core_of(group)._backend
    backend._overrides[collective] = algorithm
    backend._tuning = replace(backend._tuning, ranks_per_host=ranks_per_host)


def random_case(generator: random.Random, size: int) -> Case:
    """A case of `size` ranks, without hypothesis, for processes that cannot ask it."""
    dtype = generator.choice(DTYPES)
    counts = tuple(generator.choice([0, 1, 5, 1000, 20_011]) for _ in range(size))
    if generator.random() < 0.5:
        counts = (counts[0],) * size
    op = generator.choice(ops_of(dtype))
    return Case(size, dtype, op, counts, generator.randrange(size), generator.randrange(100))


class Tagged:
    """A group all of whose collectives have a tag."""

    def __init__(self, group: Group, tag: int) -> None:
        self._group = group
        self._tag = tag
        self.rank = group.rank

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        return lambda *arguments, **options: method(*arguments, **options, tag=self._tag)
