"""Plans through shared memory: which there are, and which one for what."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from asyncdist.plan.problem import Problem
from asyncdist.plan.registry import SHARED_ALGORITHMS
from asyncdist.plan.steps import Plan

__all__ = ["SHARED_ALGORITHMS", "SHARED_CHUNK_BYTES", "choose_shared", "shared_plan_for"]

SHARED_CHUNK_BYTES: Final = 256 << 10
"""Bytes of a chunk of a block: it takes longer to copy than to talk about, and a few of them stay in the cache."""

DIRECT_BYTES: Final = {2: 256 << 10, 3: 64 << 10, 4: 64 << 10}
DIRECT_BYTES_ELSE: Final = 16 << 10
"""Largest vector that every rank reduces whole, by ranks: below it a second wait costs more than the work."""

SCAN_BYTES: Final = 1 << 20
"""Largest vector of a scan: rank r reads r vectors, so large ones go along the chain of messages instead."""

PLAN_CACHE_PLANS: Final = 256


def choose_shared(collective: str, world: int, nbytes: int, *, ordered: bool) -> str | None:
    """Name the algorithm for a vector (or the largest block) of `nbytes`; None where messages are the better way."""
    if collective in ("scan", "exscan"):
        return "shared_direct" if nbytes <= SCAN_BYTES else None
    if collective in ("all_reduce", "reduce"):
        if nbytes <= DIRECT_BYTES.get(world, DIRECT_BYTES_ELSE) or (ordered and collective == "all_reduce"):
            return "shared_direct"
        return "shared"
    return "shared" if collective in SHARED_ALGORITHMS else None


@lru_cache(maxsize=PLAN_CACHE_PLANS)
def shared_plan_for(problem: Problem, rank: int, itemsize: int, algorithm: str) -> Plan:
    """Return `rank`'s plan, from the cache where possible."""
    chunk_length = max(1, SHARED_CHUNK_BYTES // itemsize)
    return SHARED_ALGORITHMS[problem.collective][algorithm](problem, rank, chunk_length)
