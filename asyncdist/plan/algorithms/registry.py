"""Every algorithm by collective and name.

Most exchange messages. Those through shared memory need a lane: memory that all ranks of the group share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from asyncdist.plan.algorithms import (
    binary_tree,
    binomial_tree,
    bruck,
    chain,
    circulant,
    direct,
    dissemination,
    double_tree,
    halving_doubling,
    linear,
    neighbor_exchange,
    ordered_chain,
    pairwise,
    recursive_doubling,
    recursive_halving,
    ring,
    ring_2d,
    scan,
    shared_move,
    shared_pieces,
    shared_reduce,
)
from asyncdist.plan.problem import COLLECTIVES, Problem
from asyncdist.plan.steps import Plan

__all__ = [
    "ALGORITHMS",
    "SHARED_ALGORITHMS",
    "Algorithm",
    "algorithms",
    "build",
    "needs_lane",
    "ordered_algorithms",
]

Algorithm: TypeAlias = Callable[[Problem, int, int], Plan]
"""(problem, rank, elements in a chunk at most) -> the rank's plan; every one serves any world, root and counts."""

ALGORITHMS: Final[Mapping[str, Mapping[str, Algorithm]]] = MappingProxyType(
    {
        "all_reduce": {
            "direct": direct.all_reduce,
            "linear": linear.all_reduce,
            "recursive_doubling": recursive_doubling.all_reduce,
            "halving_doubling": halving_doubling.all_reduce,
            "circulant": circulant.all_reduce,
            "binary_tree": binary_tree.all_reduce,
            "double_tree": double_tree.all_reduce,
            "ring": ring.all_reduce,
            "ring_2d": ring_2d.all_reduce,
        },
        "broadcast": {
            "linear": linear.broadcast,
            "binomial_tree": binomial_tree.broadcast,
            "binary_tree": binary_tree.broadcast,
            "double_tree": double_tree.broadcast,
            "chain": chain.broadcast,
        },
        "reduce": {
            "linear": linear.reduce,
            "binomial_tree": binomial_tree.reduce,
            "binary_tree": binary_tree.reduce,
            "double_tree": double_tree.reduce,
            "chain": chain.reduce,
            "ordered_chain": ordered_chain.reduce,
        },
        "barrier": {"dissemination": dissemination.barrier, "linear": linear.barrier},
        "all_gather": {
            "direct": direct.all_gather,
            "recursive_doubling": recursive_doubling.all_gather,
            "circulant": circulant.all_gather,
            "ring": ring.all_gather,
            "ring_2d": ring_2d.all_gather,
            "neighbor_exchange": neighbor_exchange.all_gather,
        },
        "reduce_scatter": {
            "direct": direct.reduce_scatter,
            "recursive_halving": recursive_halving.reduce_scatter,
            "circulant": circulant.reduce_scatter,
            "ring": ring.reduce_scatter,
            "ring_2d": ring_2d.reduce_scatter,
        },
        "all_to_all": {"linear": linear.all_to_all, "pairwise": pairwise.all_to_all, "bruck": bruck.all_to_all},
        "all_to_all_uneven": {"linear": linear.all_to_all, "pairwise": pairwise.all_to_all},
        "scan": {"recursive_doubling": scan.scan_doubling, "chain": scan.scan_chain},
        "exscan": {"recursive_doubling": scan.exscan_doubling, "chain": scan.exscan_chain},
        "gather_uneven": {"linear": linear.gather},
        "scatter_uneven": {"linear": linear.scatter},
        "gather": {"linear": linear.gather, "binomial_tree": binomial_tree.gather},
        "scatter": {"linear": linear.scatter, "binomial_tree": binomial_tree.scatter},
    }
)

SHARED_ALGORITHMS: Final[Mapping[str, Mapping[str, Algorithm]]] = MappingProxyType(
    {
        "all_reduce": {"shared_direct": shared_reduce.all_reduce_direct, "shared": shared_reduce.all_reduce},
        "reduce": {"shared_direct": shared_reduce.reduce_direct, "shared": shared_reduce.reduce},
        "reduce_scatter": {"shared": shared_reduce.reduce_scatter},
        "scan": {"shared_direct": shared_reduce.scan_direct},
        "exscan": {"shared_direct": shared_reduce.scan_direct},
        "broadcast": {"shared": shared_move.broadcast},
        "all_gather": {"shared": shared_move.all_gather},
        "gather": {"shared": shared_move.gather},
        "scatter": {"shared": shared_move.scatter},
        "all_to_all": {"shared": shared_move.all_to_all},
        "barrier": {"shared": shared_move.barrier},
        "all_to_all_uneven": {"shared": shared_pieces.all_to_all},
        "gather_uneven": {"shared": shared_pieces.gather},
        "scatter_uneven": {"shared": shared_pieces.scatter},
    }
)
"""Those that publish and fetch."""

_ORDERED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "all_reduce": ("direct", "linear", "recursive_doubling", "halving_doubling", "binary_tree"),
        "reduce": ("linear", "ordered_chain"),
        "reduce_scatter": ("direct",),
        "scan": ("recursive_doubling", "chain"),
        "exscan": ("recursive_doubling", "chain"),
    }
)


_SHARED_ORDERED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "all_reduce": ("shared_direct",),
        "reduce": ("shared_direct", "shared"),
        "reduce_scatter": ("shared",),
        "scan": ("shared_direct",),
        "exscan": ("shared_direct",),
    }
)


def algorithms(collective: str, *, shared: bool = False) -> tuple[str, ...]:
    """Names of the algorithms of a collective; `shared`: also of those that need a lane.

    Raises ValueError for an unknown one.
    """
    if collective not in ALGORITHMS:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}")
    names = tuple(ALGORITHMS[collective])
    return names + tuple(SHARED_ALGORITHMS[collective]) if shared else names


def ordered_algorithms(collective: str, *, shared: bool = False) -> tuple[str, ...]:
    """Names of those that reduce in rank order in every world and for every root, for operations that do not commute.

    Empty for collectives that reduce nothing. `shared`: also those that need a lane. Raises ValueError for an unknown
    one.
    """
    algorithms(collective)
    names = _ORDERED.get(collective, ())
    return names + _SHARED_ORDERED.get(collective, ()) if shared else names


def needs_lane(collective: str, algorithm: str) -> bool:
    """Whether an algorithm publishes and fetches, for which all ranks of the group must share memory."""
    return algorithm in SHARED_ALGORITHMS[collective]


def build(problem: Problem, algorithm: str, rank: int, chunk_length: int) -> Plan:
    """Build `rank`'s plan, in chunks of at most `chunk_length` elements. Raises ValueError for an unknown name."""
    if algorithm not in algorithms(problem.collective, shared=True):
        known = ", ".join(algorithms(problem.collective, shared=True))
        raise ValueError(f"{problem.collective} has no algorithm {algorithm!r}; it has: {known}")
    if not 0 <= rank < problem.world:
        raise ValueError(f"rank {rank} is not in a world of {problem.world}")
    if chunk_length < 1:
        raise ValueError(f"a chunk needs at least one element, got {chunk_length}")
    table = SHARED_ALGORITHMS if needs_lane(problem.collective, algorithm) else ALGORITHMS
    return table[problem.collective][algorithm](problem, rank, chunk_length)
