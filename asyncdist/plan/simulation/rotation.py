"""Rotation: times a whole world by a few of its ranks, where the plans of all others are theirs with peers moved on.

- A plan that claims `Symmetry.ROTATION` does on rank r + 1 what it does on rank r, with peers and blocks moved on by
  one: one rank stands for all.
- In a two-dimensional ring the same holds along rows and along columns.
- Where hosts make a difference, the ranks of one host stand for those of all.

What rank r gets from rank q at some time, the rank that stands for r gets from the one that stands for q at that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncdist.plan.algorithms import ring_2d
from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.cost.shared_load import slowness_of
from asyncdist.plan.problem import VECTOR_COLLECTIVES, Problem
from asyncdist.plan.simulation.events import Feeds, Hosts, run
from asyncdist.plan.steps import Plan, Recv, RecvReduce, Send, Symmetry

__all__ = ["Rotation", "rotated", "rotation_of"]


class Rotation(NamedTuple):
    """Ranks lie in rows of `width`; each of `period` consecutive ones stands for those some periods further on.

    With `period` 1, ranks are moved along rows and columns; else by whole periods along the line of all ranks.
    """

    world: int
    width: int
    period: int

    def moved(self, rank: int, start: int, end: int) -> int:
        """Return where `rank` comes to when `start` comes to `end`."""
        if self.period > 1:
            return (rank + end - start) % self.world
        column = (rank + end - start) % self.width
        row = (rank // self.width + end // self.width - start // self.width) % (self.world // self.width)
        return row * self.width + column


def rotation_of(problem: Problem, algorithm: str, constants: Constants, chunk_length: int) -> Rotation | None:
    """Return how the plans of a problem rotate, None if they do not, or not enough to save work."""
    world = problem.world
    even = problem.even and (problem.collective not in VECTOR_COLLECTIVES or problem.total % world == 0)
    if problem.private or not even:
        return None
    width = 1
    if algorithm == "ring_2d":
        width = ring_2d.row_length(problem)
    elif build(problem, algorithm, 0, chunk_length).symmetry is not Symmetry.ROTATION:
        return None
    period = 1
    if constants.between is not None or constants.cores:
        period = problem.ranks_per_host
    if period >= world or world % period or (period > 1 and period % width):
        return None
    return Rotation(world, width, period)


def rotated(
    problem: Problem, algorithm: str, itemsize: int, constants: Constants, chunk_length: int, rotation: Rotation
) -> float:
    """Return the seconds of a problem whose plans rotate.

    Ranks within the world stand for the others: the blocks of the first may happen not to wrap around.
    """
    first = problem.world // rotation.period // 3 * rotation.period
    plans = [build(problem, algorithm, rank, chunk_length) for rank in range(first, first + rotation.period)]
    return run(
        plans,
        _feeds(plans, rotation),
        itemsize,
        Hosts(constants, problem.ranks_per_host, slowness_of(problem, itemsize)),
    )


def _feeds(plans: Sequence[Plan], rotation: Rotation) -> Feeds:
    """Match each receive with the send of the rank that stands for its peer."""
    first = plans[0].rank
    sends: dict[tuple[int, int, int], int] = {}
    number = 0
    for plan in plans:
        for step in plan.steps:
            if isinstance(step, Send):
                sends[plan.rank, step.peer, step.slot] = number
            number += 1
    feeds: list[list[int]] = [[] for _ in range(number)]
    number = 0
    for plan in plans:
        for step in plan.steps:
            if isinstance(step, Recv | RecvReduce):
                source = first + (step.peer - first) % rotation.period
                target = rotation.moved(plan.rank, step.peer, source)
                feeds[sends[source, target, step.slot]].append(number)
            number += 1
    return feeds
