"""Simulation: how long a collective takes with given constants, for worlds of any size.

Three ways:

1. Rotation (`simulation.shortcuts`): one rank, or one host's, stands for all, where plans say so. Exact.
2. Events (`simulation.events`): all ranks' plans are run together. Exact.
3. Growth (`simulation.shortcuts`): the time of a world of more than `EXACT_WORLD` ranks follows from those of smaller
   ones, by rounds or by levels.

The result depends on the arguments alone, to the last bit. A `Sweep` is the cells of a table or plot.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from asyncdist.plan.algorithms.registry import algorithms, build, needs_lane
from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.cost.load import slowness_of
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, PRIVATE_COLLECTIVES, VECTOR_COLLECTIVES, Problem
from asyncdist.plan.selection.selector import candidates
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.plan.simulation.events import Hosts, feeds_of, run
from asyncdist.plan.simulation.shortcuts import grow, growth_of, rotated, rotation_of

__all__ = ["EXACT_WORLD", "Method", "Sweep", "simulate", "simulated_collectives"]

EXACT_WORLD: Final = 512
"""Largest world whose ranks are all simulated: a few seconds for the algorithms with most steps."""

BASE_STEPS: Final = 200_000
"""Steps of the largest world from which a larger one is grown: about a second."""

RESULTS: Final = 1024
"""Results of small worlds that are kept: those of several large worlds are grown from the same ones."""

SMALLEST_BASE: Final = 96
"""Ranks of the world from which a larger one is grown, whatever its steps: in smaller ones no rank is in the middle."""

LARGEST_BASE: Final = 1024
"""And at most: to plan for one rank takes time in proportion to the world."""


class Method(enum.Enum):
    """How to simulate.

    AUTO derives the time of worlds of more than EXACT_WORLD ranks from smaller ones, SYMMETRY wherever it can, and
    EVENTS simulates every rank of any world, however long that takes.
    """

    AUTO = "auto"
    EVENTS = "events"
    SYMMETRY = "symmetry"


def simulate(
    problem: Problem,
    algorithm: str,
    itemsize: int,
    constants: Constants,
    chunk_length: int,
    *,
    method: Method = Method.AUTO,
    base_ranks: int | None = None,
) -> float:
    """Return the seconds from the common start until the last rank is done.

    Where ranks share cores, the start is not quite common: all have begun after `Constants.begun_s`, which is added.

    `problem.ranks_per_host` says which ranks share a host; with 1 and `constants.between`, every message is between
    hosts. Algorithms through shared memory are simulated on one host, whatever it says. Elements have `itemsize` bytes,
    chunks `chunk_length` elements at most. Worlds are grown from such of at most `base_ranks` ranks; unless given, as
    many as take about a second.

    Raises ValueError for an unknown algorithm, for collectives whose ranks know only their own lengths, and for large
    worlds whose time cannot be derived from small ones (uneven blocks).
    """
    if problem.private:
        raise ValueError(f"{problem.collective} cannot be simulated: its problem differs from rank to rank")
    if algorithm not in algorithms(problem.collective, shared=True):
        known = ", ".join(algorithms(problem.collective, shared=True))
        raise ValueError(f"{problem.collective} has no algorithm {algorithm!r}; it has: {known}")

    if needs_lane(problem.collective, algorithm):
        problem = problem._replace(ranks_per_host=problem.world)

    def exact(smaller: Problem) -> float:
        return _exact(smaller, algorithm, itemsize, constants, chunk_length)

    begun_s = constants.begun_s(min(problem.world, problem.ranks_per_host))
    if problem.world == 1 or method is Method.EVENTS:
        return begun_s + _events(problem, algorithm, itemsize, constants, chunk_length)
    if method is Method.AUTO and problem.world <= EXACT_WORLD:
        return begun_s + exact(problem)
    if algorithm == "ring_2d":
        return begun_s + exact(_evened(problem))
    growth = growth_of(problem, algorithm)
    return begun_s + grow(problem, growth, exact, base_ranks or _affordable_ranks(problem, algorithm, chunk_length))


@lru_cache(maxsize=RESULTS)
def _exact(problem: Problem, algorithm: str, itemsize: int, constants: Constants, chunk_length: int) -> float:
    rotation = rotation_of(problem, algorithm, constants, chunk_length)
    if rotation is None:
        return _events(problem, algorithm, itemsize, constants, chunk_length)
    return rotated(problem, algorithm, itemsize, constants, chunk_length, rotation)


def _events(problem: Problem, algorithm: str, itemsize: int, constants: Constants, chunk_length: int) -> float:
    plans = [build(problem, algorithm, rank, chunk_length) for rank in range(problem.world)]
    return run(
        plans, feeds_of(plans), itemsize, Hosts(constants, problem.ranks_per_host, slowness_of(problem, itemsize))
    )


def _evened(problem: Problem) -> Problem:
    """The problem with its vector rounded up to a whole number of elements for each rank."""
    if problem.collective not in VECTOR_COLLECTIVES:
        return problem
    return problem._replace(counts=(-(-problem.total // problem.world) * problem.world,))


def _affordable_ranks(problem: Problem, algorithm: str, chunk_length: int) -> int:
    """Ranks of the world to grow from, judged by the steps of one in the middle."""
    steps = len(build(problem, algorithm, problem.world // 2, chunk_length).steps)
    return max(SMALLEST_BASE, min(LARGEST_BASE, BASE_STEPS // max(1, steps)))


CHUNKS_MAX: Final = 256
"""Chunks of a vector that are simulated. With more the time of small chunks is the same within a percent, and that of
the simulation is not."""


def simulated_collectives() -> tuple[str, ...]:
    """Names of the collectives that can be simulated."""
    return tuple(
        name for name in (*BLOCK_COLLECTIVES, *EXCHANGES, *VECTOR_COLLECTIVES) if name not in PRIVATE_COLLECTIVES
    )


@dataclass(frozen=True, slots=True)
class Sweep:
    """What all cells of a table have in common. `ranks_per_host` consecutive ranks share a host."""

    collective: str
    constants: Constants
    ranks_per_host: int = 1
    itemsize: int = 4
    method: Method = Method.AUTO

    def seconds(self, algorithm: str, world: int, nbytes: int) -> float:
        """Simulate one cell: a vector of `nbytes` in all (of all_to_all: what one rank sends), rounded up to elements.

        Chunks are those the selector would take for this algorithm, or larger where there would be very many. In
        worlds of no whole number of hosts, every rank is its own host. Raises ValueError as `simulate` does.
        """
        problem = self.problem(world, nbytes)
        tuning = Tuning(self.constants, problem.ranks_per_host)
        found = candidates(problem, self.itemsize, tuning, algorithm=algorithm)
        chunk_bytes = max(found[0].chunk_bytes if found else 0, nbytes // CHUNKS_MAX, self.itemsize)
        chunk_length = chunk_bytes // self.itemsize
        return simulate(problem, algorithm, self.itemsize, self.constants, chunk_length, method=self.method)

    def problem(self, world: int, nbytes: int) -> Problem:
        """Return the problem of one cell."""
        per_host = self.ranks_per_host if world % self.ranks_per_host == 0 else 1
        return Problem.of_bytes(self.collective, world, nbytes, self.itemsize, ranks_per_host=per_host)

    def algorithms(self) -> tuple[str, ...]:
        """Names of the algorithms of the collective."""
        return algorithms(self.collective)
