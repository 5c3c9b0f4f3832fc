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

from collections.abc import Callable
from typing import Final

from asyncdist.plan.algorithms.algorithm import FEWEST_HOSTS, Growth, Kept, Pace
from asyncdist.plan.algorithms.registry import find
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, ROOTED, Problem

__all__ = ["grow", "growth_of"]

Timing = Callable[[Problem], float]
"""Seconds of a problem that is small enough to be simulated."""

LINE_RANKS: Final = 64
"""Ranks of the smaller of the two worlds a line is drawn through: more than any window."""

DEARER: Final = 4
"""How many times as many ranks as are asked for are simulated rather than look at fewer levels together."""


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
    """Return the seconds of a problem from those of worlds of about `base_ranks` ranks at most, which `timing` says."""
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
