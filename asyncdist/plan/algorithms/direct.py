"""Direct algorithms: everyone sends to everyone in one round, and reduces what it needs by itself.

One latency instead of log2(p), paid with p-1 messages at every rank. Best in small worlds and for the smallest data.

| collective | rounds | messages per rank | bytes sent per rank | cost |
| --- | --- | --- | --- | --- |
| all_gather | 1 | p-1 | m(p-1)/p, m the whole vector | a + (p-1)o + mb(p-1)/p |
| reduce_scatter | 1 | p-1 | m(p-1)/p | a + (p-1)o + m(b+g)(p-1)/p |
| all_reduce | 1 | p-1 | (p-1)m | a + (p-1)o + (p-1)m(b+g) |

Here a is a latency, o what a message costs a processor, b and g seconds per byte sent and reduced. Messages go out in
rotated order, so that ranks do not all call on the same one first; a rank is ready for a window of them at a time.

A rank that reduces folds in rank order: right for operations that do not commute, and all_reduce (all_gather and local
reduction) is bit-identical on all ranks.

Source: the reference point of Thakur, Rabenseifner and Gropp, 2005 (see `recursive_doubling`).
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms.algorithm import ROUNDS_OF_BLOCKS, ROUNDS_OF_VECTORS, Algorithm
from asyncdist.plan.algorithms.linear import EXCHANGE_WINDOW, all_at_once_cost, fold_in_rank_order
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Window, blocks_of
from asyncdist.plan.cost.load import Hop, Load, Shape, Work, alike, cold
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice, Symmetry

__all__ = ["ALGORITHMS", "all_gather", "all_reduce", "reduce_scatter"]


def all_gather(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone sends its block to everyone; `chunk_length` is not used."""
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
    """Everyone sends everyone its block, and folds its own in rank order; `chunk_length` is not used."""
    rank, world, counts = builder.rank, problem.world, problem.counts
    blocks = blocks_of(Buffer.INPUT, counts)
    for distance in range(1, world):
        peer = (rank + distance) % world
        builder.send(peer, blocks[peer])
    fold_in_rank_order(builder, blocks[rank], Slice(Buffer.OUTPUT, 0, counts[rank]))
    return builder.build(block_aligned=True, ordered=True)


def all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone sends its vector to everyone, everyone folds all of them in rank order; `chunk_length` is not used.

    The vectors of lower ranks are folded in SCRATCH, that goes to the left of the own one, and those of higher ranks
    follow: the same left fold everywhere, without a copy.
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


def _all_reduce_cost(shape: Shape) -> Load:
    """Everyone sends everything to everyone and reduces p-1 vectors."""
    others, way = shape.world - 1, shape.everybody()
    moved = others * shape.total
    worked = cold(moved, shape.total)
    work = Work(2 * others, moved, moved, worked)
    load = alike(shape, (Hop(1, moved, worked, way),), (Hop(1, 0, 0, way),), work, way)
    return load._replace(scratch=moved, hidden=others - 1)


def _all_gather_cost(shape: Shape) -> Load:
    """Everyone's block to everyone, a window of them at a time."""
    return all_at_once_cost(shape, reduces=False)


def _reduce_scatter_cost(shape: Shape) -> Load:
    """Everyone's blocks to those they belong to, which fold p-1 of them in order."""
    return all_at_once_cost(shape, reduces=True)


ALGORITHMS: Final = (
    Algorithm(
        "all_reduce", "direct", all_reduce, _all_reduce_cost, growth=ROUNDS_OF_VECTORS, ordered=True, chunked=False
    ),
    Algorithm("all_gather", "direct", all_gather, _all_gather_cost, growth=ROUNDS_OF_BLOCKS, chunked=False),
    Algorithm(
        "reduce_scatter",
        "direct",
        reduce_scatter,
        _reduce_scatter_cost,
        growth=ROUNDS_OF_BLOCKS,
        ordered=True,
        chunked=False,
    ),
)
