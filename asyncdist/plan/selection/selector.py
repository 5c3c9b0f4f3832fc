"""Which algorithm, cut into which chunks, and which plan: a pure function of what all ranks know, so all choose alike.

The choice is the least predicted time (`plan.cost`) over all algorithms of the collective and a few sizes of chunk,
among those whose temporary memory is bounded. Sizes are bytes. `memory` is what each rank of the group has for items in
its lane, if it has one: then algorithms through shared memory are candidates too.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Final

from asyncdist.plan.algorithms.registry import algorithms, build, familiarity, find, needs_lane, ordered_algorithms
from asyncdist.plan.chunks import WINDOW
from asyncdist.plan.problem import COLLECTIVES, EXCHANGES, Problem
from asyncdist.plan.records import NO_LANE, USUAL_LANE, LaneMemory
from asyncdist.plan.selection.prediction import Prediction, predict, shared_chunk_sizes
from asyncdist.plan.selection.tuning import DEFAULT_TUNING, Tuning
from asyncdist.plan.steps import Plan

__all__ = ["algorithms", "candidates", "choose", "chunk_sizes", "parse_overrides", "plan_for", "plan_id", "usable"]

CHUNK_MIN_BYTES: Final = 128 << 10
"""A chunk should take longer to transfer than its message costs by existing, whatever was measured."""

CHUNK_SLOW_BYTES: Final = 32 << 10
CHUNK_SLOW_S: Final = 0.25e-3
"""Between hosts chunks may be as small as this, but those smaller than `CHUNK_MIN_BYTES` have to take that long: what
goes on only as a whole must not be long on its way. One Gbit/s carries so many bytes in that time."""

CHUNK_MAX_BYTES: Final = 1 << 20
"""Reducing a chunk leaves the event loop free again within about 0.3 ms; larger ones gain nothing, as long as there are
fewer than CHUNKS_MAX."""

CHUNKS_MAX: Final = 128
"""Chunks in the largest blocks, which get larger chunks instead: each is a step with its message, a third of a kB in
the plan, and a pipeline of 128 is already within a percent or two of the wire."""

SHARE_CHUNKS_MAX: Final = 8
"""Chunks of each rank's share of an all_reduce between hosts: enough to use the link all the time. More were slower
there than predicted, the longer the vector the more."""

VECTOR_CHUNKS_MAX: Final = 512
"""Chunks in the largest vectors, likewise: a rank has up to four steps with each, and a plan of two thousand steps is
made in two or three milliseconds. With many ranks it costs nothing, as every chunk goes through so many hands."""

SCRATCH_MAX_BYTES: Final = 32 << 20
"""Temporary memory up to which an algorithm may be chosen because it is fast: page faults on more of it cost what it
saves, and the caller has not asked for it."""

IN_FLIGHT_BYTES: Final = 2 << 20
"""Bytes that a rank is at least ready to receive from a rank of another host: 10 Gbit/s for 1.7 ms. A
network need not be measured to have most of it, and links are now and then slower than they were."""

IN_FLIGHT_MAX_BYTES: Final = 4 << 20
"""And at most: a rank with two children in each of two trees has four times as much temporary memory, and sockets
hold as much."""

TIE: Final = 1.02
"""Predictions this close say nothing about which is faster."""

PLAN_CACHE_PLANS: Final = 512
"""Plans kept. A model has a few hundred tensor shapes. A plan takes 1 to 400 kB, so this is 200 MB with the largest
vectors everywhere, and a few MB as a rule."""


def plan_for(
    collective: str,
    rank: int,
    world: int,
    count: int | Sequence[int],
    itemsize: int,
    root: int = 0,
    algorithm: str | None = None,
    *,
    tuning: Tuning = DEFAULT_TUNING,
    ordered: bool = False,
    memory: LaneMemory = NO_LANE,
    in_records: bool = True,
) -> Plan:
    """Return `rank`'s plan, from the cache where possible (give `count` as int or tuple: a list costs a conversion).

    `count` is as for `Problem.of`; `itemsize` is bytes per element, `root` a group rank. `algorithm` overrides the
    choice, as do the tuning's overrides. `ordered` is for operations that do not commute: only algorithms that reduce
    in rank order are chosen, and overrides with others do not count; nor do overrides with algorithms that need a lane
    where there is none. `in_records`: whether it may go through the records of a lane if it is small enough, as
    `candidates` says. Raises ValueError for anything unknown or out of range.
    """
    if not isinstance(count, int | tuple):
        count = tuple(count)
    return _plan(collective, rank, world, count, itemsize, root, algorithm, tuning, ordered, memory, in_records)


@lru_cache(maxsize=PLAN_CACHE_PLANS)
def _plan(
    collective: str,
    rank: int,
    world: int,
    count: int | tuple[int, ...],
    itemsize: int,
    root: int,
    algorithm: str | None,
    tuning: Tuning,
    ordered: bool,
    memory: LaneMemory,
    in_records: bool,
) -> Plan:
    if itemsize < 1:
        raise ValueError(f"an element has at least one byte, got {itemsize}")
    problem = Problem.of(collective, world, count, root, tuning.ranks_per_host)._replace(hosts=tuning.hosts)
    name, chunk, single_copy = choose(
        problem, itemsize, tuning, ordered=ordered, algorithm=algorithm, memory=memory, in_records=in_records
    )
    problem = problem._replace(window_size=window_size(problem, chunk, tuning), single_copy=single_copy)
    return build(problem, name, rank, max(1, chunk // itemsize))


def window_size(problem: Problem, chunk_bytes: int, tuning: Tuning) -> int:
    """Return how many chunks a rank is ready to receive at a time, of one pipeline.

    Where they come from another host, twice what that link has on its way in a round trip, within limits: the sender of
    a chunk hears that there is room for it half a round trip after there is, and loops pause.
    """
    if problem.world <= problem.ranks_per_host:
        return WINDOW
    link = tuning.constants.between or tuning.constants
    wanted_bytes = 2 * 2 * link.alpha_s / link.beta_s if link.beta_s else IN_FLIGHT_BYTES
    return max(WINDOW, int(min(max(wanted_bytes, IN_FLIGHT_BYTES), IN_FLIGHT_MAX_BYTES)) // chunk_bytes)


def choose(
    problem: Problem,
    itemsize: int,
    tuning: Tuning = DEFAULT_TUNING,
    *,
    ordered: bool = False,
    algorithm: str | None = None,
    memory: LaneMemory = NO_LANE,
    in_records: bool = True,
) -> tuple[str, int, bool]:
    """Name the algorithm, the bytes of a chunk for elements of `itemsize` bytes, and whether it takes a single copy.

    Arguments as for `plan_for`.
    """
    named = algorithm or tuning.override(problem.collective)
    if named and not algorithm and not usable(problem.collective, named, ordered=ordered, shared=memory.nbytes > 0):
        named = None
    if named and needs_lane(problem.collective, named) and not memory.nbytes:
        raise ValueError(f"{problem.collective}:{named} needs memory that all ranks share")
    if named and named not in algorithms(problem.collective, shared=memory.nbytes > 0):
        return named, CHUNK_MAX_BYTES, False  # `build` says what is wrong with it
    if problem.private:  # lengths are this rank's own: they must not sway what all have to do alike
        name = named or ("shared" if memory.nbytes else algorithms(problem.collective)[0])
        return name, CHUNK_MAX_BYTES, memory.single_copy and name == "shared"
    found = candidates(
        problem, itemsize, tuning, ordered=ordered, algorithm=named, memory=memory, in_records=in_records
    )
    if not found:
        raise ValueError(f"{problem.collective} has no algorithm that reduces in rank order")
    return found[0].algorithm, found[0].chunk_bytes, found[0].single_copy


def candidates(
    problem: Problem,
    itemsize: int,
    tuning: Tuning = DEFAULT_TUNING,
    *,
    ordered: bool = False,
    algorithm: str | None = None,
    memory: LaneMemory = NO_LANE,
    in_records: bool = True,
) -> list[Prediction]:
    """Return every algorithm (or only the one named) at its best chunk size, the one to choose first.

    Those that need too much temporary memory come last. Of those that are as good as the best, the one that needs least
    memory is chosen, then the one whose formula is surest. `in_records`: whether small ones may go through the
    records of a lane (`plan.records`), as all do but uneven gathers and reductions by PREMUL_SUM and operations of the
    user's own.
    """
    names = (algorithm,) if algorithm else algorithms(problem.collective, shared=memory.nbytes > 0)
    if ordered and not algorithm:
        names = ordered_algorithms(problem.collective, shared=memory.nbytes > 0)
    sizes, nbytes = chunk_sizes(problem, itemsize, tuning), problem.total * itemsize
    room = memory if memory.nbytes else USUAL_LANE
    for_records = room if in_records and not ordered else room._replace(nbytes=0)
    found = []
    for name in names:
        ways: list[tuple[LaneMemory, Sequence[int]]] = []
        one = find(problem.collective, name)
        if one.shared:
            # "shared_direct" mostly overwrites at once what it puts out, which is copied then.
            for single_copy in (False, True) if room.single_copy and name == "shared" else (False,):
                own_sizes = shared_chunk_sizes(problem, name, itemsize, room.nbytes, single_copy=single_copy)
                ways.append((for_records._replace(single_copy=single_copy), own_sizes))
        else:
            ways.append((NO_LANE, sizes))
        tried = [
            predict(problem, name, itemsize, size, tuning.constants, way)
            for way, way_sizes in ways
            for size in way_sizes[: _first_of_all(way_sizes, nbytes) if one.chunked else 1]
        ]
        if tried:
            found.append(min(tried, key=attrgetter("seconds")))
    found.sort(key=lambda one: (one.scratch_bytes > SCRATCH_MAX_BYTES, one.seconds))
    if not found:  # nothing is reduced, so there is no order
        return []
    limit_s = found[0].seconds * TIE
    ties = [one for one in found if one.seconds <= limit_s and one.scratch_bytes <= SCRATCH_MAX_BYTES] or found[:1]
    best = min(ties, key=lambda one: (one.scratch_bytes // CHUNK_MAX_BYTES, familiarity(one.algorithm)))
    found.remove(best)
    return [best, *found]


def usable(collective: str, algorithm: str, *, ordered: bool, shared: bool) -> bool:
    """Whether an override counts: it keeps the order of ranks where that matters, and has a lane if it needs one."""
    if needs_lane(collective, algorithm) and not shared:
        return False
    return not ordered or algorithm in ordered_algorithms(collective, shared=shared)


def chunk_sizes(problem: Problem, itemsize: int, tuning: Tuning = DEFAULT_TUNING) -> tuple[int, ...]:
    """Return the sizes of chunk that are worth a look: powers of two within the limits, more for the largest blocks."""
    if problem.collective == "all_reduce" or problem.collective in EXCHANGES:
        block_bytes = -(-problem.total // problem.world) * itemsize
    else:
        block_bytes = max(problem.counts) * itemsize
    least = max(-(-block_bytes // CHUNKS_MAX), -(-problem.total * itemsize // VECTOR_CHUNKS_MAX))
    if problem.collective == "all_reduce" and problem.world > problem.ranks_per_host:
        least = max(least, min(-(-block_bytes // SHARE_CHUNKS_MAX), CHUNK_MAX_BYTES))
    size, sizes = _least_chunk(problem, tuning), []
    while size <= CHUNK_MAX_BYTES:
        if size >= least:
            sizes.append(size)
        size *= 2
    return tuple(sizes) or (least,)


def _least_chunk(problem: Problem, tuning: Tuning) -> int:
    size = CHUNK_MIN_BYTES
    if tuning.constants.between is not None and problem.world > problem.ranks_per_host:
        while size > CHUNK_SLOW_BYTES and size // 2 * tuning.constants.between.beta_s >= CHUNK_SLOW_S:
            size //= 2
    return size


def _first_of_all(sizes: Sequence[int], nbytes: int) -> int:
    """How many sizes are worth a look: no more than one that holds all there is, as larger ones do the same."""
    return next((number for number, size in enumerate(sizes, 1) if size >= nbytes), len(sizes))


@lru_cache(maxsize=PLAN_CACHE_PLANS)
def plan_id(
    collective: str, algorithm: str, world: int, count: int | tuple[int, ...], root: int = 0, detail: str = ""
) -> int:
    """Fingerprint, 32 bits, of what ranks must agree on; the same in every process and release that plans alike.

    `detail` is for what a plan does not know but ranks must agree on too: the dtype, the reduce operation.
    """
    problem = Problem.of(collective, world, count, root)
    counts = str(problem.counts[0]) if problem.even else ",".join(map(str, problem.counts))
    if problem.private:  # other ranks have other lengths; the transport compares those of each message
        counts = ""
    return zlib.crc32(f"{collective}:{algorithm}:{world}:{counts}:{problem.root}:{detail}".encode())


def parse_overrides(text: str) -> dict[str, str]:
    """Parse "all_reduce:ring,broadcast:chain" (ASYNCDIST_ALGO) into algorithm by collective; empty text is none.

    Algorithms through shared memory may be named; groups without a lane choose as if they were not.
    Raises ValueError that names the entry and what would be right.
    """
    overrides: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        collective, colon, algorithm = (part.strip() for part in entry.partition(":"))
        if not colon or not collective or not algorithm:
            raise ValueError(f"algorithm override {entry!r} is not of the form collective:algorithm")
        if collective not in COLLECTIVES:
            raise ValueError(f"algorithm override {entry!r}: no such collective; known: {', '.join(COLLECTIVES)}")
        if algorithm not in algorithms(collective, shared=True):
            known = ", ".join(algorithms(collective, shared=True))
            raise ValueError(f"algorithm override {entry!r}: no such algorithm; {collective} has: {known}")
        if collective in overrides:
            raise ValueError(f"algorithm override for {collective} is given twice")
        overrides[collective] = algorithm
    return overrides
