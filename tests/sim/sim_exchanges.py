"""Exchanges, prefixes and uneven gathers of a simulated program; see `sim_collectives`."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from sim_programs import Collective, Scenario, reduced, values

import asyncdist as dist
from asyncdist import ReduceOp
from asyncdist.work import Work

EXCHANGES = (
    "all_to_all",
    "all_to_all_single",
    "all_to_all_splits",
    "scan",
    "exscan",
    "all_gather_uneven",
    "gather_uneven",
    "scatter_uneven",
    "last",
)
FROM_FEW = ("scan", "exscan", "all_gather_uneven", "gather_uneven", "scatter_uneven")
"""Kinds that end well on ranks that need nothing of one that refused: a lower one's, or no elements."""
LAST = ReduceOp.custom(lambda left, right: right, commutative=False, name="last")

Issue = tuple[Work[Any], list[np.ndarray], list[tuple[np.ndarray, np.ndarray]]]


def with_exchanges(made: Scenario) -> Scenario:
    """The scenario with some of its collectives replaced by kinds of this file."""
    dice = Random(f"exchanges {made.seed}")
    made.tracks = [
        replace(track, collectives=tuple(_replaced(dice, op) for op in track.collectives)) for track in made.tracks
    ]
    return made


def _replaced(dice: Random, op: Collective) -> Collective:
    if dice.random() < 0.5 or op.kind == "barrier":
        return op
    return replace(op, kind=dice.choice(EXCHANGES), op=ReduceOp.SUM if op.op is ReduceOp.AVG else op.op)


def issue_exchange(
    group: dist.ProcessGroup, op: Collective, count: int, place: tuple[int, int], options: dict[str, Any]
) -> Issue:
    """Call the collective; returns its work, the arrays it was given, and what which of them must hold in the end."""
    if op.kind in ("scan", "exscan", "last"):
        return _reduction(group, op, count, place, options)
    if op.kind.startswith("all_to_all"):
        return _all_to_all(group, op, count, place, options)
    sizes = [_length(count, rank, op.root) for rank in range(group.size)]
    everyone = [values(op.dtype, size, *place, rank) for rank, size in enumerate(sizes)]
    own = everyone[group.rank].copy()
    if op.kind == "scatter_uneven":
        out = np.full_like(own, 3)
        blocks = [block.copy() for block in everyone] if group.rank == op.root else None
        work = group.scatter(out, blocks, op.root, uneven=True, **options)
        return work, [out, *(blocks or [])], [(out, everyone[group.rank])]
    needed = op.kind == "all_gather_uneven" or group.rank == op.root
    found = [np.full(size, 3, op.dtype) for size in sizes] if needed else []
    if op.kind == "all_gather_uneven":
        work = group.all_gather(found, own, **options)
    else:
        work = group.gather(own, found or None, op.root, uneven=True, **options)
    return work, [own, *found], list(zip(found, everyone, strict=True)) if found else []


def _reduction(
    group: dist.ProcessGroup, op: Collective, count: int, place: tuple[int, int], options: dict[str, Any]
) -> Issue:
    everyone = [values(op.dtype, count, *place, rank) for rank in range(group.size)]
    own = everyone[group.rank].copy()
    if op.kind == "last":
        return group.all_reduce(own, LAST, **options), [own], [(own, everyone[-1])]
    if op.kind == "scan":
        return group.scan(own, op.op, **options), [own], [(own, reduced(op.op, everyone[: group.rank + 1]))]
    below = everyone[: group.rank]
    return group.exscan(own, op.op, **options), [own], [(own, reduced(op.op, below) if below else everyone[0])]


def _all_to_all(
    group: dist.ProcessGroup, op: Collective, count: int, place: tuple[int, int], options: dict[str, Any]
) -> Issue:
    size, rank = group.size, group.rank
    even = op.kind == "all_to_all_single"

    def block(source: int, target: int) -> np.ndarray:
        return values(op.dtype, count if even else _length(count, source, target), *place, source, target)

    inputs = [block(rank, target) for target in range(size)]
    expected = [block(source, rank) for source in range(size)]
    if op.kind == "all_to_all":
        outputs = [np.full_like(array, 3) for array in expected]
        work = group.all_to_all(outputs, inputs, **options)
        return work, [*inputs, *outputs], list(zip(outputs, expected, strict=True))
    whole = np.concatenate(inputs)
    output = np.full(sum(array.size for array in expected), 3, op.dtype)
    splits = ([], []) if even else ([array.size for array in expected], [array.size for array in inputs])
    work = group.all_to_all_single(output, whole, *splits, **options)
    return work, [whole, output], [(output, np.concatenate(expected))]


def _length(count: int, source: int, target: int) -> int:
    """Of two ranks' block: differs by both, and is nothing between some."""
    return count * ((source + 2 * target) % 3) // 2
