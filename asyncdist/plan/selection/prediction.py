"""The predicted time of every algorithm, by closed formulas, and the sizes of chunk that shared memory suits.

An algorithm takes as long as the longest of:

- its longest path: alpha per message, beta per byte, gamma per byte reduced, one after another;
- its busiest rank: the waiting that the rank cannot fill with work, and then all of its messages (overhead each), bytes
  (copied into and out of the kernel) and reductions, on one thread;
- the busiest host, where it has more ranks than cores: the work of all its ranks together, on its cores;
- the busiest link: a rank's port, or the card that a host's ranks share.

Through shared memory there are no links, and wake-ups instead of messages (`cost.load.SharedLoad`).

The event simulator knows more (which rank waits for which); a formula costs microseconds, in worlds of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final, NamedTuple

from asyncdist.plan.algorithms.registry import find
from asyncdist.plan.algorithms.shared_reduce import LOOKAHEAD
from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.cost.load import Hop, Load, Shape, SharedLoad, Work, shared_seconds, slowness_of
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, Problem
from asyncdist.plan.records import SINGLE_COPY_BYTES, USUAL_LANE, LaneMemory

SHAPES_KEPT: Final = 8
"""All algorithms of a collective are asked about the same few sizes of chunk, one after another."""


class Prediction(NamedTuple):
    """What an algorithm is expected to take and to move."""

    algorithm: str
    chunk_bytes: int
    seconds: float
    rounds: int
    """Messages on the longest path, or waits for what others publish."""
    sent_bytes: int
    """Or published, by the rank that sends most."""
    scratch_bytes: int = 0
    """Temporary memory of the rank that needs most, beyond a window of chunks."""
    single_copy: bool = False
    """As of `Problem`."""


def predict(
    problem: Problem,
    algorithm: str,
    itemsize: int,
    chunk_bytes: int,
    constants: Constants,
    memory: LaneMemory = USUAL_LANE,
) -> Prediction:
    """Predict one algorithm; `memory` is for those through shared memory; without any none goes through records.

    Raises ValueError for an unknown one.
    """
    cost = find(problem.collective, algorithm).cost
    if problem.world == 1:
        return Prediction(algorithm, chunk_bytes, 0.0, 0, 0)
    load = cost(shape_of(problem, itemsize, chunk_bytes)._replace(memory=memory))
    seconds = _seconds_of(load, problem, itemsize, memory, constants)
    scratch = round(load.scratch)
    if isinstance(load, SharedLoad):
        moved, single_copy = round(load.published), load.lends(memory)
        return Prediction(algorithm, chunk_bytes, seconds, load.rounds, moved, scratch, single_copy)
    rounds = round(math.fsum(hop.rounds for hop in load.path))
    return Prediction(algorithm, chunk_bytes, seconds, rounds, round(load.busiest.sent), scratch)


def seconds_by(
    problem: Problem, algorithm: str, itemsize: int, chunk_bytes: int, memory: LaneMemory = USUAL_LANE
) -> Callable[[Constants], float]:
    """What `predict` says of the seconds, as a function of the constants.

    Raises ValueError for an unknown algorithm.
    """
    cost = find(problem.collective, algorithm).cost
    if problem.world == 1:
        return lambda constants: 0.0
    load = cost(shape_of(problem, itemsize, chunk_bytes)._replace(memory=memory))
    return partial(_seconds_of, load, problem, itemsize, memory)


def _seconds_of(
    load: Load | SharedLoad, problem: Problem, itemsize: int, memory: LaneMemory, constants: Constants
) -> float:
    if isinstance(load, Load):
        return _seconds(load, problem, constants)
    slowness = slowness_of(problem, itemsize)
    return shared_seconds(load, problem.world, constants, slowness, single_copy=load.lends(memory))


@lru_cache(maxsize=SHAPES_KEPT)
def shape_of(problem: Problem, itemsize: int, chunk_bytes: int) -> Shape:
    """Return what formulas need to know of a problem."""
    total = problem.total * itemsize
    if problem.collective in BLOCK_COLLECTIVES or problem.collective in EXCHANGES:
        block = max(problem.counts) * itemsize
    else:
        block = -(-problem.total // problem.world) * itemsize
    per_host = max(map(len, problem.by_host)) if problem.hosts else problem.ranks_per_host
    shape = Shape(problem.world, total, block, max(1, chunk_bytes), per_host, problem.root)
    return shape._replace(hosts=problem.hosts)


def _seconds(load: Load, problem: Problem, constants: Constants) -> float:
    # fsum, since all ranks must get the same bits, and `sum` rounds otherwise from Python 3.12 on.
    path_s = math.fsum([_hop_s(hop, constants) for hop in load.path])
    idle_s = math.fsum([_hop_s(hop, constants, of_latency=True) for hop in load.idle])
    idle_s = max(0.0, idle_s - load.hidden * constants.overhead_s)
    rank_s = _cpu_s(load.busiest, constants)
    port_s = max(load.busiest.sent, load.busiest.received) * constants.beta_s
    host_s = card_s = 0.0
    ranks = max(map(len, problem.by_host)) if problem.hosts else min(problem.world, problem.ranks_per_host)
    if 0 < constants.cores < ranks:  # ranks are about in step, so that all wait at the same time
        work_s = _cpu_s(load.everyone, constants) * ranks / problem.world
        host_s = idle_s * constants.crowding(ranks) + work_s / constants.cores
    if constants.between is not None:
        card_s = load.card * constants.between.beta_s
    return constants.begun_s(ranks) + max(path_s, idle_s + max(rank_s, port_s, card_s), host_s)


def _hop_s(hop: Hop, constants: Constants, *, of_latency: bool = False) -> float:
    """Seconds of a hop; `of_latency`, only what its ranks' processors do not work for."""
    between, crossing = constants.between, hop.way.crossing
    alpha_s = constants.latency_s if of_latency else constants.alpha_s
    beta_s = constants.beta_s
    if between is not None and crossing:
        far_s = constants.between_latency_s if of_latency else between.alpha_s
        alpha_s += crossing * (far_s - alpha_s)
        beta_s += crossing * max(0.0, between.beta_s * hop.way.sharing - beta_s)
    return hop.rounds * alpha_s + hop.nbytes * beta_s + hop.worked * constants.gamma_s


def _cpu_s(work: Work, constants: Constants) -> float:
    moved = work.sent + work.received
    return work.messages * constants.overhead_s + moved * constants.copy_s + work.worked * constants.gamma_s


CHUNK_MIN_BYTES: Final = 32 << 10
"""Below this a step costs more than the copy, so that waiting for memory costs less than shorter chunks."""

CHUNK_MAX_BYTES: Final = 512 << 10
"""Several of these stay in a processor's second-level cache, between the rank that writes and those that read."""

LENT_CHUNK_MAX_BYTES: Final = 2 << 20
"""What is read where it lies is in no cache, and each read costs what copying some kilobytes does."""

ITEMS_MAX: Final = 4096
"""Items of a rank in one operation, whose chunks are longer where there would be more: each is a step in the plan, and
some more where it is fetched. A gigabyte is that many of the longest chunks."""

LEAST_ITEMS: Final = 2
"""Items there is always memory for: one is read while the next is written. Plans come to an end with one."""

MAX_SHARED_RANKS: Final = 104
"""Largest world that is expected on one host."""

_SLICED: Final = ("all_reduce", "reduce", "reduce_scatter", "all_to_all", "scatter")
"""Collectives in which a rank publishes a chunk for everyone else, one after another."""


def largest_item_bytes(lane_bytes: int, outstanding_items: int) -> int:
    """The longest item of which a lane always has room for `outstanding_items`, in whatever order they are freed.

    Items lie behind one another and are not cut: one may fit neither at the end nor before the oldest at the beginning.
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
