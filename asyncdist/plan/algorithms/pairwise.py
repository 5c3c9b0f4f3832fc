"""Pairwise exchange: all_to_all one partner at a time, for large blocks and worlds whose links all-at-once would flood.

p - 1 rounds for any p; in round d, rank r sends its block for r + d and receives that of r - d, and starts the next
round when both are done. Cost (p - 1)a + mb(p-1)/p with m bytes of INPUT; each rank sends m(p-1)/p bytes, the least.
At any time each rank has one message in each direction, so no receiver is shared and nothing is stored.

Source: Thakur, Rabenseifner and Gropp, 2005 (see `recursive_doubling`), long-message all_to_all for any p.
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms.algorithm import ROUNDS_OF_BLOCKS, Algorithm
from asyncdist.plan.algorithms.exchange import direct
from asyncdist.plan.cost.load import Hop, Load, Shape, Work, alike
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Plan

__all__ = ["ALGORITHMS", "all_to_all"]


def all_to_all(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Exchange blocks round by round, even or uneven; `chunk_length` is not used."""
    del chunk_length
    return direct(problem, "pairwise", rank, 1, in_step=True)


def _all_to_all_cost(shape: Shape) -> Load:
    """p-1 rounds of a block."""
    others, way = shape.world - 1, shape.everybody()
    moved = others * shape.block
    return alike(shape, (Hop(others, moved, 0, way),), (Hop(others, 0, 0, way),), Work(2 * others, moved, moved), way)


ALGORITHMS: Final = (
    Algorithm("all_to_all", "pairwise", all_to_all, _all_to_all_cost, growth=ROUNDS_OF_BLOCKS, chunked=False),
    Algorithm("all_to_all_uneven", "pairwise", all_to_all, _all_to_all_cost, chunked=False),
)
