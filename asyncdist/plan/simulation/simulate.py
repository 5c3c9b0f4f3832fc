"""How long a collective takes with given constants, for worlds of any size.

1. Events (`simulation.events`), exact: the plans of all ranks are run together.
2. Rotation, exact: the plans of all ranks are those of a few ranks, with peers moved on.
3. Growth: the time of a world of more than `EXACT_WORLD` ranks follows from the times of smaller worlds.

Rotation. A plan that claims `Symmetry.ROTATION` does on rank r + 1 what it does on rank r, with peers and blocks moved
on by one: one rank stands for all. In a two-dimensional ring the same holds along rows and along columns. Where hosts
make a difference, the ranks of one host stand for the ranks of all hosts. What rank r gets from rank q at some time,
the rank that stands for r gets at that time from the rank that stands for q.

Growth. A world of 24,576 ranks has 10^6 steps with the best algorithms and 10^9 with a ring, but all of them repeat
themselves.

- ROUNDS: each rank more is a round more (rings), a hop more (chains), a message more (linear, pairwise). Time is a
  straight line over the world from a few ranks on, with the bytes of a round kept as they are.
- LEVELS: each doubling of the world is a round more (recursive doubling, halving, circulant graphs, dissemination) or
  a level more (trees). Time grows by what that round or level adds; small worlds show how much that is.

While the world grows, the whole vector is kept, or the length of a rank's block. With blocks the rounds that doubling
adds are those of the shortest messages: growing from p to 2p ranks with m bytes adds what growing from p/2 to p adds
with m/2 bytes, as the blocks are as long. Where ranks share hosts, the number of hosts grows.

What a level adds is not always the same. The skips of a circulant graph are even or odd; what goes up one of two trees
meets what goes down the other in some worlds, and not in worlds twice or half as large. So several levels are looked at
together. In trees over few hosts most hosts are the root or leaves and nothing meets: such worlds show nothing.

The result depends on the arguments alone, to the last bit. A `Sweep` is the cells of a table or plot.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from asyncdist.plan.algorithms import ring_2d
from asyncdist.plan.algorithms.algorithm import FEWEST_HOSTS, Growth, Kept, Pace
from asyncdist.plan.algorithms.registry import algorithms, build, find, needs_lane
from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.cost.load import slowness_of
from asyncdist.plan.problem import (
    BLOCK_COLLECTIVES,
    EXCHANGES,
    PRIVATE_COLLECTIVES,
    ROOTED,
    VECTOR_COLLECTIVES,
    Problem,
)
from asyncdist.plan.selection.selector import candidates
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.plan.simulation.events import Feeds, Hosts, feeds_of, run
from asyncdist.plan.steps import Plan, Recv, RecvReduce, Send, Symmetry

__all__ = ["EXACT_WORLD", "Method", "Sweep", "grow", "simulate", "simulated_collectives"]

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
        problem = problem._replace(ranks_per_host=problem.world, hosts=())

    def exact(smaller: Problem) -> float:
        return _exact(smaller, algorithm, itemsize, constants, chunk_length)

    begun_s = constants.begun_s(min(problem.world, problem.ranks_per_host))
    if problem.world == 1 or problem.hosts or method is Method.EVENTS:
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
    hosts = Hosts(constants, problem.ranks_per_host, slowness_of(problem, itemsize), problem.hosts)
    return run(plans, feeds_of(plans), itemsize, hosts)


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


Timing = Callable[[Problem], float]
"""Seconds of a problem that is small enough to be simulated."""

LINE_RANKS: Final = 64
"""Ranks of the smaller of the two worlds a line is drawn through: more than any window."""

DEARER: Final = 4
"""How many times as many ranks as are asked for are simulated rather than look at fewer levels together."""


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


def growth_of(problem: Problem, algorithm: str) -> Growth:
    """Return how the time of an algorithm grows. Raises ValueError if that is not known."""
    growth = find(problem.collective, algorithm).growth
    if growth is None or not problem.even:
        blocks = "" if problem.even else " with uneven blocks"
        raise ValueError(
            f"{problem.collective}:{algorithm}{blocks} can only be simulated rank by rank: nothing says how its time "
            "grows with the world"
        )
    return growth


def grow(problem: Problem, growth: Growth, timing: Timing, base_ranks: int) -> float:
    """Return the seconds of a problem from those of worlds of at most about `base_ranks` ranks, by `timing`."""
    if growth.pace is Pace.ROUNDS:
        return _line(problem, growth, timing)
    return _levels(problem, growth, timing, base_ranks)


def _line(problem: Problem, growth: Growth, timing: Timing) -> float:
    hosts, near = _hosts(problem), max(FEWEST_HOSTS, LINE_RANKS // _per_host(problem))
    if hosts <= 2 * near:
        return timing(problem)
    block = -(-problem.total // problem.world)  # an uneven vector takes as long as one of its longest blocks

    def at(count: int) -> float:
        world = count * _per_host(problem)
        return timing(_resized(problem, world, block * world if growth.kept is Kept.BLOCK else problem.total))

    near_s, far_s = at(near), at(2 * near)
    return near_s + (far_s - near_s) / near * (hosts - near)


def _levels(problem: Problem, growth: Growth, timing: Timing, base_ranks: int) -> float:
    halved = [_hosts(problem)]
    while halved[-1] > growth.fewest:
        halved.append(-(-halved[-1] // 2))
    worlds = [hosts * _per_host(problem) for hosts in halved]
    level = next((number for number, world in enumerate(worlds) if world <= base_ranks), len(worlds) - 1)
    period = growth.period
    while growth.kept is Kept.VECTOR and 1 < period < len(worlds) and worlds[-1 - period] > DEARER * base_ranks:
        period -= 1
    if growth.kept is Kept.BLOCK:  # the rounds that levels add differ, so the period is walked through
        level += -level % period
    while level + period >= len(worlds):
        level -= period if growth.kept is Kept.BLOCK else 1
    if level <= 0:
        return timing(problem)

    def at(number: int, total: int) -> float:
        return timing(_resized(problem, worlds[number], total))

    if growth.kept is Kept.VECTOR:
        base_s, lower_s = at(level, problem.total), at(level + period, problem.total)
        return base_s + (base_s - lower_s) / period * level
    seconds = at(level, problem.total)
    for step in range(period, level + 1, period):
        total = max(1, round(problem.total / (1 << step))) if problem.total else 0
        seconds += at(level, total) - at(level + period, total)
    return seconds


def _per_host(problem: Problem) -> int:
    """Ranks that come and go together; hosts that are not full count as single ranks."""
    return problem.ranks_per_host if problem.world % problem.ranks_per_host == 0 else 1


def _hosts(problem: Problem) -> int:
    return problem.world // _per_host(problem)


def _resized(problem: Problem, world: int, total: int) -> Problem:
    """The same collective in another world, on a vector of about `total` elements."""
    count = total
    if problem.collective in BLOCK_COLLECTIVES or problem.collective in EXCHANGES:
        count = max(round(total / world), min(total, 1))
    root = problem.root % _per_host(problem) if problem.collective in ROOTED else 0
    return Problem.of(problem.collective, world, count, root, problem.ranks_per_host)
