"""Plans for items: things that are whole, whose sizes only their owners know beforehand.

The plan of a collective of one element per rank moves one thing per rank, whatever that is. Where it sends several in
one message, as trees and Bruck's algorithm do, an item's plan sends as many messages: each then says how large its item
is and goes where it belongs, and no item is copied to be sent beside another.

Source: none; it is what a plan of single elements already says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.steps import Copy, Plan, Recv, Send, Slice

__all__ = ["GUESSED_BYTES", "one_by_one"]

GUESSED_BYTES: Final = 8 << 10
"""What an item is taken to weigh when its algorithm is chosen: most objects and uneven arrays are small, and for larger
ones no choice made for small ones costs more than a factor of log2(p)."""


def one_by_one(plan: Plan) -> Plan:
    """Return `plan`, of items, with a message of its own for every item.

    Messages without items are left out at both ends: an item's plan needs no order but that of the items' ways. Slots
    are the plan's times the world, plus the item's place in its message: no message holds more items than there are
    ranks. Raises ValueError for a plan that reduces.
    """
    world = plan.world
    builder = PlanBuilder(plan.collective, plan.algorithm, plan.rank, world)
    builder.scratch(plan.scratch_count)
    for step in plan.steps:
        if isinstance(step, Send):
            for index, piece in enumerate(_single(step.source)):
                builder.send(step.peer, piece, slot=step.slot * world + index)
        elif isinstance(step, Recv):
            for index, piece in enumerate(_single(step.target)):
                builder.recv(step.peer, piece, slot=step.slot * world + index)
        elif isinstance(step, Copy):
            for source, target in zip(_single(step.source), _single(step.target), strict=True):
                builder.copy(source, target)
        else:
            raise ValueError(f"{plan.collective} by {plan.algorithm} reduces, which items cannot be")
    return builder.build(block_aligned=True)


def _single(piece: Slice) -> Iterator[Slice]:
    for offset in range(piece.offset, piece.end):
        yield Slice(piece.buffer, offset, 1)
