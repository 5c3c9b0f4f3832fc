"""Chunks of plans through shared memory: small enough for the memory there is, and to stay in the processor's cache.

A lane has memory for the items that a rank has published and not all others have read. A plan comes to its end with
memory for `Plan.outstanding_items` items, whatever the chunk; with less than it puts out per chunk of every slice,
ranks wait for each other all the time. So where there are more slices, chunks are shorter.
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms.shared_reduce import LOOKAHEAD
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import SINGLE_COPY_BYTES

__all__ = ["MAX_SHARED_RANKS", "largest_item_bytes", "shared_chunk_sizes"]

CHUNK_MIN_BYTES: Final = 32 << 10
"""Below this a step costs more than the copy, so that waiting for memory costs less than shorter chunks."""

CHUNK_MAX_BYTES: Final = 512 << 10
"""Several of these stay in a processor's second-level cache, between the rank that writes and those that read."""

LENT_CHUNK_MAX_BYTES: Final = 2 << 20
"""What is read where it lies is in nobody's cache, and each read costs what copying some kilobytes does."""

ITEMS_MAX: Final = 4096
"""Items of a rank in one operation, whose chunks are longer where there would be more: each is a step in the plan, and
some more where it is fetched. A gigabyte is that many of the longest chunks."""

LEAST_ITEMS: Final = 2
"""Items there is always memory for: one is read while the next is written. Plans come to an end with one."""

MAX_SHARED_RANKS: Final = 104
"""Largest world that is expected on one host."""

_SLICED: Final = ("all_reduce", "reduce", "reduce_scatter", "all_to_all", "scatter")
"""Collectives in which somebody publishes a chunk for everyone else, one after another."""


def largest_item_bytes(lane_bytes: int, outstanding_items: int) -> int:
    """Bytes of an item of which a lane always has room for so many, whatever the order they are freed in.

    Items lie behind one another and are not cut: one may not fit at the end, nor before the oldest at the beginning.
    """
    return lane_bytes // (outstanding_items + 1) // _ALIGNMENT * _ALIGNMENT if outstanding_items > 1 else lane_bytes


_ALIGNMENT: Final = 64
"""Items begin at cache lines."""


def shared_chunk_sizes(
    problem: Problem, algorithm: str, itemsize: int, memory_bytes: int, *, single_copy: bool = False
) -> tuple[int, ...]:
    """Return the sizes of chunk that are worth a look: powers of two within the limits, more for the largest blocks.

    Any item may have to be copied after all: its array may lie where the kernel reads nothing for others.
    """
    limit = largest_item_bytes(memory_bytes, LEAST_ITEMS)
    sliced = algorithm == "shared" and problem.collective in _SLICED
    room = memory_bytes // ((LOOKAHEAD + 1) * (problem.world if sliced else 1))
    most = limit if single_copy else min(max(CHUNK_MIN_BYTES, room), limit)
    gathers = problem.collective in ("all_gather", "gather")
    published = max(problem.counts) if gathers else problem.total
    least = min(-(-published * itemsize // ITEMS_MAX), limit)
    size, sizes = SINGLE_COPY_BYTES if single_copy else CHUNK_MIN_BYTES, []
    while size <= (LENT_CHUNK_MAX_BYTES if single_copy else CHUNK_MAX_BYTES):
        if least <= size <= most:
            sizes.append(size)
        size *= 2
    return tuple(sizes) or (max(least, min(CHUNK_MIN_BYTES, most)),)
