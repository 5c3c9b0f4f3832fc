"""Algorithm: one way to carry out one collective, with all that is known of it. Each stands at the foot of its file."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.cost.load import Load, Shape, SharedLoad
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import Takes
from asyncdist.plan.steps import Plan

Build: TypeAlias = Callable[[PlanBuilder, Problem, int], Plan]
"""(an empty builder of the rank's plan, the problem, elements in a chunk at most) -> the rank's plan.

Every algorithm serves any world, root and counts. One that is not `chunked` does not look at the chunk's length."""

Cost: TypeAlias = Callable[[Shape], Load | SharedLoad]
"""What the algorithm asks of the network and of the ranks; a SharedLoad if it goes through shared memory."""

FEWEST_HOSTS: Final = 4
"""Hosts of the smallest world that is simulated to see how the time grows: with fewer, none is between others."""

FEWEST_IN_TREES: Final = 16
"""And of the smallest tree, where large vectors meet in inner hosts; a world is halved down to that many or less."""


class Pace(enum.Enum):
    """With what the time grows: with each rank, or with each doubling of the world."""

    ROUNDS = "rounds"
    LEVELS = "levels"


class Kept(enum.Enum):
    """What stays as it is while the world grows."""

    VECTOR = "vector"
    BLOCK = "block"


class Growth(NamedTuple):
    """How the time grows with the world (`simulation.simulate`).

    `period` is how many levels are taken together, down to `fewest` hosts or less.
    """

    pace: Pace
    kept: Kept
    period: int = 1
    fewest: int = FEWEST_HOSTS


ROUNDS_OF_VECTORS: Final = Growth(Pace.ROUNDS, Kept.VECTOR)
ROUNDS_OF_BLOCKS: Final = Growth(Pace.ROUNDS, Kept.BLOCK)
DOUBLING: Final = Growth(Pace.LEVELS, Kept.VECTOR, 3)
HALVING: Final = Growth(Pace.LEVELS, Kept.BLOCK)
SKIPS: Final = Growth(Pace.LEVELS, Kept.BLOCK, 3)
TREE: Final = Growth(Pace.LEVELS, Kept.VECTOR, 3, FEWEST_IN_TREES)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to carry out one collective."""

    collective: str
    name: str
    build: Build
    cost: Cost
    growth: Growth | None = None
    """None: the simulator takes every rank's steps one by one."""
    ordered: bool = False
    """Whether it reduces in rank order in every world and for every root, for operations that do not commute."""
    chunked: bool = True
    """Whether it cuts vectors or blocks into chunks; where it does not, one prediction serves all sizes of chunk."""
    shared: bool = False
    """Whether it publishes and fetches, for which all ranks of the group must share memory."""
    records: Takes | None = None
    """If small ones can go through the records of a lane (`plan.records`): how much a rank takes there."""
