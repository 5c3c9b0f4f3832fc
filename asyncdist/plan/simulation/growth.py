"""Growth: how the time of an algorithm grows with the world, so that large worlds need not be enumerated.

Simulated step by step, a world of 24,576 ranks has 10^6 steps with the best algorithms and 10^9 with a ring. But all
of them repeat themselves:

- ROUNDS: each rank more is a round more (rings), a hop more (chains), a message more (linear, pairwise). Time is a
  straight line over the world from a few ranks on, with the bytes of a round kept as they are.
- LEVELS: each doubling of the world is a round more (recursive doubling, halving, circulant graphs, dissemination) or
  a level more (trees). Time grows by what that round or level adds, and a small world shows how much that is.

What is kept while the world grows is the whole vector, or the length of a rank's block. With blocks the rounds that
doubling adds are those of the shortest messages: growing from p to 2p ranks with m bytes adds what growing from p/2 to
p adds with m/2 bytes, as the blocks are as long.

Where ranks share hosts it is the number of hosts that grows. What a level adds is not always the same: the skips of a
circulant graph are even or odd, and in one world of a double tree, but not in those twice and half as large, what comes
up one tree meets what goes down the other. So several levels are looked at together. In trees over few hosts most are
the root or leaves and nothing meets, so that worlds of that kind show nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, ROOTED, Problem

__all__ = ["LAWS", "Kept", "Law", "Pace", "grow", "law_of"]

Timing = Callable[[Problem], float]
"""Seconds of a problem that is small enough to be simulated."""

LINE_RANKS: Final = 64
"""Ranks of the smaller of the two worlds a line is drawn through: more than any window."""

FEWEST_HOSTS: Final = 4
"""Hosts of the smallest world that is looked at: with fewer, none is between others."""

FEWEST_IN_TREES: Final = 16
"""And of the smallest tree, where large vectors meet in inner hosts; a world is halved down to that many or less."""

DEARER: Final = 4
"""How many times as many ranks as are asked for are simulated rather than look at fewer levels together."""


class Pace(enum.Enum):
    """With what the time grows."""

    ROUNDS = "rounds"
    LEVELS = "levels"


class Kept(enum.Enum):
    """What stays as it is while the world grows."""

    VECTOR = "vector"
    BLOCK = "block"


class Law(NamedTuple):
    """How one algorithm grows; `period` is how many levels are taken together, down to `fewest` hosts or less."""

    pace: Pace
    kept: Kept
    period: int = 1
    fewest: int = FEWEST_HOSTS


_LINE_VECTOR = Law(Pace.ROUNDS, Kept.VECTOR)
_LINE_BLOCK = Law(Pace.ROUNDS, Kept.BLOCK)
_DOUBLING = Law(Pace.LEVELS, Kept.VECTOR, 3)
_TREE = Law(Pace.LEVELS, Kept.VECTOR, 3, FEWEST_IN_TREES)
_HALVING = Law(Pace.LEVELS, Kept.BLOCK)
_CIRCULANT = Law(Pace.LEVELS, Kept.BLOCK, 3)

LAWS: Final[Mapping[str, Mapping[str, Law]]] = MappingProxyType(
    {
        "all_reduce": {
            "direct": _LINE_VECTOR,
            "linear": _LINE_VECTOR,
            "recursive_doubling": _DOUBLING,
            "halving_doubling": _HALVING,
            "circulant": _CIRCULANT,
            "binary_tree": _TREE,
            "double_tree": _TREE,
            "ring": _LINE_BLOCK,
        },
        "broadcast": {
            "linear": _LINE_VECTOR,
            "binomial_tree": _DOUBLING,
            "binary_tree": _TREE,
            "double_tree": _TREE,
            "chain": _LINE_VECTOR,
        },
        "reduce": {
            "linear": _LINE_VECTOR,
            "binomial_tree": _DOUBLING,
            "binary_tree": _TREE,
            "double_tree": _TREE,
            "chain": _LINE_VECTOR,
            "ordered_chain": _LINE_VECTOR,
        },
        "barrier": {"dissemination": _DOUBLING, "linear": _LINE_VECTOR},
        "all_gather": {
            "direct": _LINE_BLOCK,
            "recursive_doubling": _HALVING,
            "circulant": _CIRCULANT,
            "ring": _LINE_BLOCK,
            "neighbor_exchange": _LINE_BLOCK,
        },
        "reduce_scatter": {
            "direct": _LINE_BLOCK,
            "recursive_halving": _HALVING,
            "circulant": _CIRCULANT,
            "ring": _LINE_BLOCK,
        },
        "gather": {"linear": _LINE_BLOCK, "binomial_tree": _HALVING},
        "scatter": {"linear": _LINE_BLOCK, "binomial_tree": _HALVING},
        "all_to_all": {"linear": _LINE_BLOCK, "pairwise": _LINE_BLOCK, "bruck": _DOUBLING},
        "scan": {"recursive_doubling": _DOUBLING, "chain": _LINE_VECTOR},
        "exscan": {"recursive_doubling": _DOUBLING, "chain": _LINE_VECTOR},
    }
)
"""By collective and algorithm. The two-dimensional ring is not here: its rows rotate (`simulation.rotation`)."""


def law_of(problem: Problem, algorithm: str) -> Law:
    """Return how an algorithm grows. Raises ValueError if that is not known."""
    law = LAWS.get(problem.collective, {}).get(algorithm)
    if law is None or not problem.even:
        blocks = "" if problem.even else " with uneven blocks"
        raise ValueError(
            f"{problem.collective}:{algorithm}{blocks} can only be simulated rank by rank: nothing says how its time "
            "grows with the world"
        )
    return law


def grow(problem: Problem, law: Law, timing: Timing, base_ranks: int) -> float:
    """Return the seconds of a problem from those of worlds of about `base_ranks` ranks at most, which `timing` says."""
    if law.pace is Pace.ROUNDS:
        return _line(problem, law, timing)
    return _levels(problem, law, timing, base_ranks)


def _line(problem: Problem, law: Law, timing: Timing) -> float:
    hosts, near = _hosts(problem), max(FEWEST_HOSTS, LINE_RANKS // _per_host(problem))
    if hosts <= 2 * near:
        return timing(problem)
    block = -(-problem.total // problem.world)  # an uneven vector takes as long as one of its longest blocks

    def at(count: int) -> float:
        world = count * _per_host(problem)
        return timing(_resized(problem, world, block * world if law.kept is Kept.BLOCK else problem.total))

    near_s, far_s = at(near), at(2 * near)
    return near_s + (far_s - near_s) / near * (hosts - near)


def _levels(problem: Problem, law: Law, timing: Timing, base_ranks: int) -> float:
    halved = [_hosts(problem)]
    while halved[-1] > law.fewest:
        halved.append(-(-halved[-1] // 2))
    worlds = [hosts * _per_host(problem) for hosts in halved]
    level = next((number for number, world in enumerate(worlds) if world <= base_ranks), len(worlds) - 1)
    period = law.period
    while law.kept is Kept.VECTOR and 1 < period < len(worlds) and worlds[-1 - period] > DEARER * base_ranks:
        period -= 1
    if law.kept is Kept.BLOCK:  # the rounds that levels add differ, so the period is walked through
        level += -level % period
    while level + period >= len(worlds):
        level -= period if law.kept is Kept.BLOCK else 1
    if level <= 0:
        return timing(problem)

    def at(number: int, total: int) -> float:
        return timing(_resized(problem, worlds[number], total))

    if law.kept is Kept.VECTOR:
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
