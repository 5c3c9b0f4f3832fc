"""Linear algorithms: the ranks concerned talk directly, in one round.

One latency (two for all_reduce and barrier) instead of log2(p), paid with p-1 messages at the root, or at every rank
where all talk to all. Best in small worlds, and for gather and scatter of large blocks, whose bytes a tree would
forward. Messages go out in rotated order, a window of them at a time. Where all talk to all and everyone needs
everything it is called `direct`.

| collective | messages (busiest rank) | bytes (busiest rank) |
| --- | --- | --- |
| broadcast | p-1 | (p-1)m |
| reduce | p-1 | (p-1)m |
| all_reduce | 2(p-1) | (p-1)m, each way |
| barrier | 2(p-1) | none |
| gather, scatter | p-1 | m(p-1)/p, m the whole vector |
| all_to_all | p-1 | m(p-1)/p, m all a rank sends |

reduce and all_reduce fold in rank order: right for operations that do not commute.

Source: the basic algorithms of Thakur, Rabenseifner and Gropp, 2005 (see `recursive_doubling`).
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms.algorithm import ROUNDS_OF_BLOCKS, ROUNDS_OF_VECTORS, Algorithm
from asyncdist.plan.algorithms.pairwise import direct, receive_block, send_block
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Window, blocks_of
from asyncdist.plan.cost.load import NO_WORK, Hop, Load, Shape, Work, alike, cold
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = [
    "ALGORITHMS",
    "EXCHANGE_WINDOW",
    "all_at_once_cost",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "fold_in_rank_order",
    "gather",
    "reduce",
    "scatter",
]

EXCHANGE_WINDOW: Final = 32
"""Messages a rank has under way in each direction, as in MPICH's all_to_all: enough to hide every latency, few enough
that neither the links into one rank nor its loop have hundreds to share."""


def broadcast(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """The root sends to everyone; `chunk_length` is not used."""
    rank = builder.rank
    whole = Slice(Buffer.OUTPUT, 0, problem.total)
    if rank == problem.root:
        _send_to_all(builder, whole)
    else:
        builder.recv(problem.root, whole)
    return builder.build()


def reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """The root receives everyone's vector and folds them in rank order; `chunk_length` is not used."""
    rank = builder.rank
    root = problem.root
    own = Slice(Buffer.INPUT, 0, problem.total)
    if rank != root:
        builder.send(root, own)
        return builder.build(ordered=True)
    fold_in_rank_order(builder, own, Slice(Buffer.OUTPUT, 0, problem.total))
    return builder.build(ordered=True)


def all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Rank 0 receives everyone's vector, folds them in rank order and sends the sum to all; `chunk_length` is not used.

    The fewest messages of all, which counts where ranks share cores.
    """
    rank, world = builder.rank, problem.world
    whole = Slice(Buffer.OUTPUT, 0, problem.total)
    if rank:
        builder.send(0, whole)
        builder.recv(0, whole)
        return builder.build(ordered=True)
    room = [builder.scratch(problem.total) for _ in range(1, world)[:EXCHANGE_WINDOW]]
    for peer, operand in enumerate(room, start=1):
        builder.recv(peer, operand)
    for peer in range(1, world):
        operand = room[(peer - 1) % EXCHANGE_WINDOW]
        if peer > EXCHANGE_WINDOW:
            builder.recv(peer, operand)
        builder.reduce(operand, whole, source_left=False)
    _send_to_all(builder, whole)
    return builder.build(ordered=True)


def barrier(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone tells rank 0, which tells everyone; `chunk_length` is not used."""
    rank = builder.rank
    if rank:
        builder.signal(0)
        builder.await_signal(0)
        return builder.build()
    heard = [builder.await_signal(peer) for peer in range(1, problem.world)]
    for peer in range(1, problem.world):
        builder.signal(peer, after=heard)
    return builder.build()


def gather(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone sends its block to the root, also where only the root knows all lengths; `chunk_length` is not used."""
    rank = builder.rank
    own = Slice(Buffer.INPUT, 0, problem.counts[rank])
    if rank != problem.root:
        send_block(builder, problem.root, own)
    else:
        blocks, window = blocks_of(Buffer.OUTPUT, problem.counts), Window(EXCHANGE_WINDOW)
        for peer in reversed(_others(rank, problem.world)):
            window.add(receive_block(builder, peer, blocks[peer], after=window.after))
        builder.copy(own, blocks[rank])
    return builder.build(block_aligned=True)


def scatter(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """The root sends everyone its block, also where only it knows all lengths; `chunk_length` is not used."""
    rank = builder.rank
    own = Slice(Buffer.OUTPUT, 0, problem.counts[rank])
    if rank != problem.root:
        receive_block(builder, problem.root, own)
    else:
        blocks, window = blocks_of(Buffer.INPUT, problem.counts), Window(EXCHANGE_WINDOW)
        for peer in _others(rank, problem.world):
            window.add(send_block(builder, peer, blocks[peer], after=window.after))
        builder.copy(blocks[rank], own)
    return builder.build(block_aligned=True)


def all_to_all(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone sends everyone its block, even or uneven; `chunk_length` is not used."""
    return direct(builder, problem, EXCHANGE_WINDOW, in_step=False)


def _send_to_all(builder: PlanBuilder, whole: Slice) -> None:
    window = Window(EXCHANGE_WINDOW)
    for peer in _others(builder.rank, builder.world):
        window.add(builder.send(peer, whole, after=window.after))


def _others(rank: int, world: int) -> list[int]:
    return [(rank + distance) % world for distance in range(1, world)]


def fold_in_rank_order(builder: PlanBuilder, own: Slice, result: Slice) -> None:
    """Receive everyone's operand and fold it with `own` into `result` in rank order; a window of receives comes first.

    The lowest other rank's operand is received into `result` itself, so that nothing needs to be copied.
    """
    rank, world = builder.rank, builder.world
    if world == 1:
        builder.copy(own, result)
        return
    first, *others = (peer for peer in range(world) if peer != rank)
    room = [builder.scratch(result.length) for _ in others[:EXCHANGE_WINDOW]]
    builder.recv(first, result)
    for peer, operand in zip(others, room, strict=False):
        builder.recv(peer, operand)
    if not rank:
        builder.reduce(own, result, source_left=True)
    for index, peer in enumerate(others):
        operand = room[index % EXCHANGE_WINDOW]
        if index >= EXCHANGE_WINDOW:
            builder.recv(peer, operand)
        if rank and peer == rank + 1:
            builder.reduce(own, result, source_left=False)
        builder.reduce(operand, result, source_left=False)
    if rank and rank == world - 1:
        builder.reduce(own, result, source_left=False)


def _broadcast_cost(shape: Shape) -> Load:
    """p-1 vectors through the root's link."""
    others, way = shape.world - 1, shape.rooted()
    moved = others * shape.total
    everyone = Work(2 * others, moved, moved)
    path = Hop(1, moved, 0, way)
    return Load((path,), (Hop(1, 0, 0, way),), Work(others, moved, 0), everyone, way.crossing * moved)


def _reduce_cost(shape: Shape) -> Load:
    """p-1 vectors through the root's link, and into its sum."""
    others, way = shape.world - 1, shape.rooted()
    moved = others * shape.total
    worked = cold(moved, shape.total)
    everyone = Work(2 * others, moved, moved, worked)
    path = Hop(1, moved, cold(shape.total, shape.total), way)
    root = Work(others, 0, moved, worked)
    return Load((path,), (Hop(1, 0, 0, way),), root, everyone, way.leaving * moved, 0, moved - shape.total)


def _all_reduce_cost(shape: Shape) -> Load:
    """p-1 vectors into the sum of rank 0, and p-1 sums out of it."""
    others, way = shape.world - 1, shape.rooted()
    moved = others * shape.total
    worked = cold(moved, shape.total)
    everyone = Work(4 * others, 2 * moved, 2 * moved, worked)
    path = Hop(2, 2 * moved, cold(shape.total, shape.total), way)
    hub = Work(2 * others, moved, moved, worked)
    return Load((path,), (Hop(2, 0, 0, way),), hub, everyone, way.crossing * moved, 0, moved)


def _barrier_cost(shape: Shape) -> Load:
    """Signals to rank 0 and back."""
    others, way = shape.world - 1, shape.rooted()
    path = Hop(2, 0, 0, way)
    hub = Work(2 * others + 2, 0, 0)  # and the last rank's two, which nothing hides
    return Load((path,), (path,), hub, Work(4 * others, 0, 0), 0.0)


def _gather_cost(shape: Shape) -> Load:
    """p-1 blocks through the root's link; scatter is the same downward."""
    others, way = shape.world - 1, shape.rooted()
    moved = shape.total * others / shape.world
    everyone = Work(2 * others, moved, moved)
    path = Hop(1, moved, 0, way)
    return Load((path,), (Hop(1, 0, 0, way),), Work(others, 0, moved), everyone, way.crossing * moved)


def _all_to_all_cost(shape: Shape) -> Load:
    """Every block to the rank it is for, a window of them at a time."""
    return all_at_once_cost(shape, reduces=False)


def all_at_once_cost(shape: Shape, *, reduces: bool) -> Load:
    """Return what blocks from every rank to every other ask, a window of them at a time."""
    others, way = shape.world - 1, shape.everybody()
    moved = others * shape.block
    worked = cold(moved, shape.block) if reduces else 0.0
    windows = -(-others // EXCHANGE_WINDOW)
    path = Hop(windows, moved, worked, way)
    work = Work(2 * others, moved, moved, worked)
    load = alike(shape, (path,), (Hop(windows, 0, 0, way),), work, way)
    everyone, hidden = NO_WORK.plus(work, shape.full(shape.world)), min(others, EXCHANGE_WINDOW) - 1
    return load._replace(everyone=everyone, scratch=moved if reduces else 0.0, hidden=hidden)


ALGORITHMS: Final = (
    Algorithm(
        "all_reduce", "linear", all_reduce, _all_reduce_cost, growth=ROUNDS_OF_VECTORS, ordered=True, chunked=False
    ),
    Algorithm("broadcast", "linear", broadcast, _broadcast_cost, growth=ROUNDS_OF_VECTORS, chunked=False),
    Algorithm("reduce", "linear", reduce, _reduce_cost, growth=ROUNDS_OF_VECTORS, ordered=True, chunked=False),
    Algorithm("barrier", "linear", barrier, _barrier_cost, growth=ROUNDS_OF_VECTORS, chunked=False),
    Algorithm("gather", "linear", gather, _gather_cost, growth=ROUNDS_OF_BLOCKS, chunked=False),
    Algorithm("scatter", "linear", scatter, _gather_cost, growth=ROUNDS_OF_BLOCKS, chunked=False),
    Algorithm("all_to_all", "linear", all_to_all, _all_to_all_cost, growth=ROUNDS_OF_BLOCKS, chunked=False),
    Algorithm("gather_uneven", "linear", gather, _gather_cost, chunked=False),
    Algorithm("scatter_uneven", "linear", scatter, _gather_cost, chunked=False),
    Algorithm("all_to_all_uneven", "linear", all_to_all, _all_to_all_cost, chunked=False),
)
