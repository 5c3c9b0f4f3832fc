"""Dissemination barrier: ceil(log2 p) rounds for any p, p ceil(log2 p) messages without elements.

In round k, rank r tells rank r + 2^k that it and everyone it has heard of has arrived. After the last round everyone
has heard of everyone.

Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", International Journal of Parallel
Programming 17(1), 1988.
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms.algorithm import DOUBLING, Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.cost.load import Load, Round, Shape, in_rounds
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Plan, Symmetry

__all__ = ["ALGORITHMS", "barrier"]


def barrier(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Return the rank's signals; `chunk_length` is not used."""
    rank, world = builder.rank, problem.world
    heard: list[int] = []
    distance = 1
    while distance < world:
        builder.signal((rank + distance) % world, after=heard)
        heard.append(builder.await_signal((rank - distance) % world))
        distance *= 2
    return builder.build(symmetry=Symmetry.ROTATION)


def _barrier_cost(shape: Shape) -> Load:
    """L rounds of messages without elements."""
    return in_rounds(shape, [Round(0, shape.ahead(1 << bit)) for bit in range(shape.levels)])


ALGORITHMS: Final = (Algorithm("barrier", "dissemination", barrier, _barrier_cost, growth=DOUBLING, chunked=False),)
