"""Algorithms without steps in between: each rank sends straight to the ranks that need its data.

They take one latency (two for all_reduce and barrier by `linear`) instead of log2(p), but p-1 messages at the root, or
at every rank where all talk to all. They are best in small worlds, for the smallest data, and for gather, scatter and
all_to_all of large blocks, which a tree would forward.

| algorithm | collective | rounds | messages of the busiest rank | bytes of the busiest rank |
| --- | --- | --- | --- | --- |
| linear | broadcast, reduce | 1 | p-1 | (p-1)m |
| linear | all_reduce | 2 | 2(p-1) | (p-1)m, each way |
| linear | barrier | 2 | 2(p-1) | none |
| linear | gather, scatter | 1 | p-1 | m(p-1)/p, m the whole vector |
| linear | all_to_all | 1 | p-1 | m(p-1)/p, m all a rank sends |
| direct | all_gather, reduce_scatter | 1 | p-1 | m(p-1)/p, m the whole vector |
| direct | all_reduce | 1 | p-1 | (p-1)m |
| pairwise | all_to_all | p-1 | p-1 | m(p-1)/p |

`linear` has a rank in the middle, or moves blocks that only one rank needs. Where every rank needs everything, and each
reduces for itself, the algorithm is called `direct`. `pairwise` exchanges with one partner at a time: no rank receives
from two at once, which large worlds and blocks would flood.

Messages go out in rotated order, so that ranks do not all call on the same rank first, and in windows. Reductions fold
in rank order, as operations that do not commute need it; all ranks get the same bits. Blocks are not cut into chunks:
mostly there is no reduction to overlap, and the transport sends long messages in fragments. So each end sees at once if
the other end means another length.

Source: the basic algorithms of Thakur, Rabenseifner and Gropp, 2005 (see `halving_doubling`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from asyncdist.plan.algorithms.algorithm import ROUNDS_OF_BLOCKS, ROUNDS_OF_VECTORS, Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Window, blocks_of
from asyncdist.plan.cost.load import NO_WORK, Hop, Load, Shape, Work, alike, cold
from asyncdist.plan.problem import PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.steps import Buffer, Plan, Slice, Symmetry

__all__ = ["EXCHANGE_WINDOW"]

EXCHANGE_WINDOW: Final = 32
"""Messages a rank has under way in each direction, as in MPICH's all_to_all: enough to hide every latency, few enough
that neither the links into one rank nor its loop have hundreds to share."""


def broadcast(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """The root sends to everyone."""
    rank = builder.rank
    whole = Slice(Buffer.OUTPUT, 0, problem.total)
    if rank == problem.root:
        _send_to_all(builder, whole)
    else:
        builder.recv(problem.root, whole)
    return builder.build()


def reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """The root receives everyone's vector and folds them in rank order."""
    rank = builder.rank
    root = problem.root
    own = Slice(Buffer.INPUT, 0, problem.total)
    if rank != root:
        builder.send(root, own)
        return builder.build(ordered=True)
    fold_in_rank_order(builder, own, Slice(Buffer.OUTPUT, 0, problem.total))
    return builder.build(ordered=True)


def linear_all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Rank 0 receives everyone's vector, folds them in rank order and sends the sum to all.

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
    """Everyone tells rank 0, which tells everyone."""
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
    """Everyone sends its block to the root, also where only the root knows all lengths."""
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
    """The root sends everyone its block, also where only it knows all lengths."""
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


def linear_all_to_all(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone sends everyone its block, even or uneven."""
    return exchange_blocks(builder, problem, EXCHANGE_WINDOW, in_step=False)


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


def _linear_all_reduce_cost(shape: Shape) -> Load:
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


def _all_at_once_cost(shape: Shape, *, reduces: bool = False) -> Load:
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


def all_gather(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone sends its block to everyone."""
    rank, world, counts = builder.rank, problem.world, problem.counts
    own = Slice(Buffer.INPUT, 0, counts[rank])
    blocks = blocks_of(Buffer.OUTPUT, counts)
    sends, receives = Window(EXCHANGE_WINDOW), Window(EXCHANGE_WINDOW)
    for distance in range(1, world):
        source = (rank - distance) % world
        sends.add(builder.send((rank + distance) % world, own, after=sends.after))
        receives.add(builder.recv(source, blocks[source], after=receives.after))
    builder.copy(own, blocks[rank])
    return builder.build(symmetry=Symmetry.ROTATION if problem.even else Symmetry.NONE, block_aligned=True)


def reduce_scatter(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone sends everyone its block, and folds its own in rank order."""
    rank, world, counts = builder.rank, problem.world, problem.counts
    blocks = blocks_of(Buffer.INPUT, counts)
    for distance in range(1, world):
        peer = (rank + distance) % world
        builder.send(peer, blocks[peer])
    fold_in_rank_order(builder, blocks[rank], Slice(Buffer.OUTPUT, 0, counts[rank]))
    return builder.build(block_aligned=True, ordered=True)


def direct_all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Every rank sends its vector to all others, and folds all vectors in rank order.

    The vectors of lower ranks are folded in SCRATCH, which then goes to the left of the own vector. The vectors of
    higher ranks follow. That is the same left fold on every rank, without a copy.
    """
    rank, world = builder.rank, problem.world
    whole = Slice(Buffer.OUTPUT, 0, problem.total)
    for distance in range(1, world):
        builder.send((rank + distance) % world, whole)
    others = [peer for peer in range(world) if peer != rank]
    room = [builder.scratch(problem.total) for _ in others[: 1 + EXCHANGE_WINDOW]]
    incoming = {peer: room[1 + (index - 1) % EXCHANGE_WINDOW if index else 0] for index, peer in enumerate(others)}
    for peer in others[: len(room)]:
        builder.recv(peer, incoming[peer])
    for index, peer in enumerate(others):
        if index >= len(room):
            builder.recv(peer, incoming[peer])
        if peer > rank:
            builder.reduce(incoming[peer], whole, source_left=False)
        elif peer:
            builder.reduce(incoming[peer], incoming[0], source_left=False)
        if peer == rank - 1:
            builder.reduce(incoming[0], whole, source_left=True)
    return builder.build(ordered=True)


def _direct_all_reduce_cost(shape: Shape) -> Load:
    """Everyone sends everything to everyone and reduces p-1 vectors."""
    others, way = shape.world - 1, shape.everybody()
    moved = others * shape.total
    worked = cold(moved, shape.total)
    work = Work(2 * others, moved, moved, worked)
    load = alike(shape, (Hop(1, moved, worked, way),), (Hop(1, 0, 0, way),), work, way)
    return load._replace(scratch=moved, hidden=others - 1)


def pairwise_all_to_all(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Exchange blocks round by round, even or uneven."""
    return exchange_blocks(builder, problem, 1, in_step=True)


def exchange_blocks(builder: PlanBuilder, problem: Problem, window: int, *, in_step: bool) -> Plan:
    """Send to and receive from the ranks at distance 1, 2, ...: at most `window` of each at a time.

    In round d, rank r sends to r + d and receives from r - d, so that no rank is called on twice in a round. The round
    starts when that of `window` rounds before is done: its message of the same direction, or both (`in_step`).
    """
    rank, world = builder.rank, problem.world
    sends = blocks_of(Buffer.INPUT, problem.send_counts)
    receives = blocks_of(Buffer.OUTPUT, problem.receive_counts)
    sent, received = Window(window), Window(window)
    for distance in range(1, world):
        source, target = (rank - distance) % world, (rank + distance) % world
        both = (*sent.after, *received.after)
        received.add(receive_block(builder, source, receives[source], after=both if in_step else received.after))
        sent.add(send_block(builder, target, sends[target], after=both if in_step else sent.after))
    builder.copy(sends[rank], receives[rank])
    symmetry = Symmetry.NONE if problem.private else Symmetry.ROTATION
    return builder.build(symmetry=symmetry, block_aligned=True)


def send_block(builder: PlanBuilder, peer: int, piece: Slice, *, after: Iterable[int | None] = ()) -> int | None:
    """Send `piece`, in an uneven collective even if it is empty: the peer may expect something."""
    if not piece.length and builder.collective in PRIVATE_COLLECTIVES:
        return builder.signal(peer, after=after)
    return builder.send(peer, piece, after=after)


def receive_block(builder: PlanBuilder, peer: int, piece: Slice, *, after: Iterable[int | None] = ()) -> int | None:
    """Receive what `send_block` sends."""
    if not piece.length and builder.collective in PRIVATE_COLLECTIVES:
        return builder.await_signal(peer, after=after)
    return builder.recv(peer, piece, after=after)


def _pairwise_cost(shape: Shape) -> Load:
    """p-1 rounds of a block."""
    others, way = shape.world - 1, shape.everybody()
    moved = others * shape.block
    return alike(shape, (Hop(others, moved, 0, way),), (Hop(others, 0, 0, way),), Work(2 * others, moved, moved), way)


ALGORITHMS: Final = (
    Algorithm(
        "all_reduce",
        "linear",
        linear_all_reduce,
        _linear_all_reduce_cost,
        ROUNDS_OF_VECTORS,
        ordered=True,
        chunked=False,
    ),
    Algorithm("broadcast", "linear", broadcast, _broadcast_cost, ROUNDS_OF_VECTORS, chunked=False),
    Algorithm("reduce", "linear", reduce, _reduce_cost, ROUNDS_OF_VECTORS, ordered=True, chunked=False),
    Algorithm("barrier", "linear", barrier, _barrier_cost, ROUNDS_OF_VECTORS, chunked=False),
    Algorithm("gather", "linear", gather, _gather_cost, ROUNDS_OF_BLOCKS, chunked=False),
    Algorithm("scatter", "linear", scatter, _gather_cost, ROUNDS_OF_BLOCKS, chunked=False),
    Algorithm("all_to_all", "linear", linear_all_to_all, _all_at_once_cost, ROUNDS_OF_BLOCKS, chunked=False),
    Algorithm("gather_uneven", "linear", gather, _gather_cost, chunked=False),
    Algorithm("scatter_uneven", "linear", scatter, _gather_cost, chunked=False),
    Algorithm("all_to_all_uneven", "linear", linear_all_to_all, _all_at_once_cost, chunked=False),
    Algorithm(
        "all_reduce",
        "direct",
        direct_all_reduce,
        _direct_all_reduce_cost,
        ROUNDS_OF_VECTORS,
        ordered=True,
        chunked=False,
    ),
    Algorithm("all_gather", "direct", all_gather, _all_at_once_cost, ROUNDS_OF_BLOCKS, chunked=False),
    Algorithm(
        "reduce_scatter",
        "direct",
        reduce_scatter,
        partial(_all_at_once_cost, reduces=True),
        ROUNDS_OF_BLOCKS,
        ordered=True,
        chunked=False,
    ),
    Algorithm("all_to_all", "pairwise", pairwise_all_to_all, _pairwise_cost, ROUNDS_OF_BLOCKS, chunked=False),
    Algorithm("all_to_all_uneven", "pairwise", pairwise_all_to_all, _pairwise_cost, chunked=False),
)
