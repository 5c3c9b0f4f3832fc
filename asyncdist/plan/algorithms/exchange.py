"""What the direct forms of all_to_all share: every block in one message, a bounded number of them under way.

Blocks are not cut into chunks: nothing is reduced, so there is nothing to overlap, and the transport sends large
messages in fragments anyway. So each end sees at once if the other means another length.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import blocks_of
from asyncdist.plan.problem import PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.steps import Buffer, Plan, Slice, Symmetry
from asyncdist.plan.window import Window

__all__ = ["direct", "receive_block", "send_block"]


def direct(problem: Problem, algorithm: str, rank: int, window: int, *, in_step: bool) -> Plan:
    """Send to and receive from the ranks at distance 1, 2, ...: at most `window` of each at a time.

    In round d, rank r sends to r + d and receives from r - d, so that no rank is called on twice in a round. The round
    starts when that of `window` rounds before is done: its message of the same direction, or both (`in_step`).
    """
    world = problem.world
    builder = PlanBuilder.of(problem, algorithm, rank)
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
