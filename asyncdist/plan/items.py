"""Plans for items: things that are whole, whose sizes nobody but their owner knows beforehand.

The plan of a collective of one element per rank moves one thing per rank, whatever that is. Where it sends several in
one message, as trees and Bruck's algorithm do, an item's plan sends as many messages: each then says how large its item
is and goes where it belongs, and no item is copied to be sent beside another.

Source: none; it is what a plan of single elements already says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.problem import Problem
from asyncdist.plan.selector import plan_for
from asyncdist.plan.steps import Copy, Plan, Recv, Send, Slice

__all__ = ["GUESSED_BYTES", "ITEM_COLLECTIVES", "item_plan", "one_by_one"]

ITEM_COLLECTIVES: Final = ("all_gather", "broadcast", "gather", "scatter")
"""Collectives that only move things, each with one item per rank (broadcast: the root's)."""

GUESSED_BYTES: Final = 8 << 10
"""What an item is taken to weigh when its algorithm is chosen: most objects and uneven arrays are small, and for larger
ones no choice made for small ones costs more than a factor of log2(p)."""


def item_plan(collective: str, rank: int, world: int, root: int = 0, algorithm: str | None = None) -> Plan:
    """Return `rank`'s plan: one item per rank, one item per message. Raises as `plan_for`."""
    if collective not in ITEM_COLLECTIVES:
        raise ValueError(f"{collective} is not made of items; these are: {', '.join(ITEM_COLLECTIVES)}")
    return one_by_one(plan_for(collective, rank, world, 1, GUESSED_BYTES, root, algorithm))


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


def item_problem(collective: str, world: int, root: int = 0) -> Problem:
    """The problem that item plans of a collective solve."""
    return Problem.of(collective, world, 1, root)


def _single(piece: Slice) -> Iterator[Slice]:
    for offset in range(piece.offset, piece.end):
        yield Slice(piece.buffer, offset, 1)
