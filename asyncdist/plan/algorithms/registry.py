"""Every algorithm, by collective and name: a file of `plan.algorithms` is imported here, and named in `_MODULES`.

Most exchange messages. Those through shared memory need a lane: memory that all ranks of the group share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from asyncdist.plan.algorithms import (
    binary_trees,
    binomial_tree,
    bruck,
    chain,
    circulant,
    halving_doubling,
    linear,
    ring,
    ring_2d,
    scan,
    shared_move,
    shared_reduce,
)
from asyncdist.plan.algorithms.algorithm import Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.problem import COLLECTIVES, Problem
from asyncdist.plan.steps import Plan

_MODULES: Final = (
    binary_trees,
    binomial_tree,
    bruck,
    chain,
    circulant,
    halving_doubling,
    linear,
    ring,
    ring_2d,
    scan,
    shared_move,
    shared_reduce,
)

FAMILIAR: Final = (
    "recursive_doubling",
    "linear",
    "direct",
    "ring",
    "chain",
    "binomial_tree",
    "halving_doubling",
    "recursive_halving",
    "ring_2d",
)
"""Of algorithms predicted alike the first of these is taken: the figures of real machines and of the event simulator
agree best with their formulas."""


def familiarity(name: str) -> int:
    """The algorithm's place in `FAMILIAR`, or the place behind all of them."""
    return FAMILIAR.index(name) if name in FAMILIAR else len(FAMILIAR)


EVERY: Final = sorted((one for module in _MODULES for one in module.ALGORITHMS), key=lambda one: familiarity(one.name))


def _table(*, shared: bool) -> Mapping[str, Mapping[str, Algorithm]]:
    rows: dict[str, dict[str, Algorithm]] = {collective: {} for collective in COLLECTIVES}
    for one in EVERY:
        if one.shared is shared:
            rows[one.collective][one.name] = one
    return MappingProxyType({collective: MappingProxyType(row) for collective, row in rows.items()})


ALGORITHMS: Final = _table(shared=False)
"""Those that exchange messages, by collective and name."""

SHARED_ALGORITHMS: Final = _table(shared=True)
"""Those that publish and fetch."""


def algorithms(collective: str, *, shared: bool = False) -> tuple[str, ...]:
    """Names of the algorithms of a collective; `shared`: also of those that need a lane.

    Raises ValueError for an unknown one.
    """
    return _names(collective, shared, lambda one: True)


def ordered_algorithms(collective: str, *, shared: bool = False) -> tuple[str, ...]:
    """Names of those that reduce in rank order in every world and for every root, for operations that do not commute.

    Empty for collectives that reduce nothing. `shared`: also those that need a lane. Raises ValueError for an unknown
    one.
    """
    return _names(collective, shared, lambda one: one.ordered)


def _names(collective: str, shared: bool, wanted: Callable[[Algorithm], bool]) -> tuple[str, ...]:
    _check(collective)
    tables = (ALGORITHMS, SHARED_ALGORITHMS) if shared else (ALGORITHMS,)
    return tuple(one.name for table in tables for one in table[collective].values() if wanted(one))


def _check(collective: str) -> None:
    if collective not in ALGORITHMS:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}")


def find(collective: str, name: str) -> Algorithm:
    """Return an algorithm. Raises ValueError for an unknown collective or name, with the known ones."""
    _check(collective)
    found = ALGORITHMS[collective].get(name) or SHARED_ALGORITHMS[collective].get(name)
    if found is None:
        known = ", ".join(algorithms(collective, shared=True))
        raise ValueError(f"{collective} has no algorithm {name!r}; it has: {known}")
    return found


def needs_lane(collective: str, algorithm: str) -> bool:
    """Whether an algorithm publishes and fetches, for which all ranks of the group must share memory."""
    return algorithm in SHARED_ALGORITHMS[collective]


def build(problem: Problem, algorithm: str, rank: int, chunk_length: int) -> Plan:
    """Build `rank`'s plan, in chunks of at most `chunk_length` elements. Raises ValueError for an unknown name."""
    found = find(problem.collective, algorithm)
    if not 0 <= rank < problem.world:
        raise ValueError(f"rank {rank} is not in a world of {problem.world}")
    if chunk_length < 1:
        raise ValueError(f"a chunk needs at least one element, got {chunk_length}")
    return found.build(PlanBuilder.of(problem, algorithm, rank), problem, chunk_length)
