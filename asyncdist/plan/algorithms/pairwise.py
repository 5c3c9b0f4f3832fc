"""Pairwise exchange: all_to_all one partner at a time, for large blocks and worlds whose links all-at-once would flood.

p - 1 rounds for any p; in round d, rank r sends its block for r + d and receives that of r - d, and starts the next
round when both are done. Cost (p - 1)a + mb(p-1)/p with m bytes of INPUT; each rank sends m(p-1)/p bytes, the least. At
any time each rank has one message in each direction, so no receiver is shared and nothing is stored.

`direct` is this with any number of rounds under way, which `linear` uses too. Blocks are not cut into chunks: nothing
is reduced, so there is nothing to overlap, and the transport sends large messages in fragments anyway. So each end sees
at once if the other means another length.

Source: Thakur, Rabenseifner and Gropp, 2005 (see `recursive_doubling`), long-message all_to_all for any p.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from asyncdist.plan.algorithms.algorithm import ROUNDS_OF_BLOCKS, Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Window, blocks_of
from asyncdist.plan.cost.load import Hop, Load, Shape, Work, alike
from asyncdist.plan.problem import PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.steps import Buffer, Plan, Slice, Symmetry

__all__ = ["ALGORITHMS", "all_to_all", "direct", "receive_block", "send_block"]


def all_to_all(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Exchange blocks round by round, even or uneven; `chunk_length` is not used."""
    return direct(builder, problem, 1, in_step=True)


def direct(builder: PlanBuilder, problem: Problem, window: int, *, in_step: bool) -> Plan:
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


def _all_to_all_cost(shape: Shape) -> Load:
    """p-1 rounds of a block."""
    others, way = shape.world - 1, shape.everybody()
    moved = others * shape.block
    return alike(shape, (Hop(others, moved, 0, way),), (Hop(others, 0, 0, way),), Work(2 * others, moved, moved), way)


ALGORITHMS: Final = (
    Algorithm("all_to_all", "pairwise", all_to_all, _all_to_all_cost, growth=ROUNDS_OF_BLOCKS, chunked=False),
    Algorithm("all_to_all_uneven", "pairwise", all_to_all, _all_to_all_cost, chunked=False),
)
