"""Program: a plan made ready to run many times.

The plan's steps become flat instructions, dependencies become counters and successors, and slots become the bytes that
name a message on the wire. All of it is worked out once per plan and kept with it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncdist.plan.lending import lendable
from asyncdist.plan.steps import (
    Buffer,
    Copy,
    Fetch,
    FetchReduce,
    Plan,
    Publish,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Slice,
    Step,
)
from asyncdist.transport.frame import key_suffix, suffix_slot
from asyncdist.transport.lane import Needs

__all__ = [
    "COPY",
    "FETCH",
    "FETCH_REDUCE",
    "PUBLISH",
    "RECV",
    "RECV_REDUCE",
    "REDUCE",
    "SEND",
    "Instruction",
    "Program",
]

SEND: Final = 0
RECV: Final = 1
RECV_REDUCE: Final = 2
REDUCE: Final = 3
COPY: Final = 4
PUBLISH: Final = 5
FETCH: Final = 6
FETCH_REDUCE: Final = 7

COLLECTIVE_CHANNEL: Final = 1


class Instruction(NamedTuple):
    """One step, ready to run."""

    kind: int
    peer: int
    """Group rank of the other end; -1 for local steps."""
    suffix: bytes
    """End of the message's key."""
    buffer: int
    """Which buffer is sent or written, from `start` to `stop`."""
    start: int
    stop: int
    source: int
    """Which buffer local steps read, or which item fetching ones, from `source_start` to `source_stop`."""
    source_start: int
    source_stop: int
    left: bool
    """Whether the incoming or source operand goes left."""
    successors: tuple[int, ...]
    """Steps that wait for this one."""


class Program:
    """One rank's plan, compiled.

    `pending` is how many steps each step waits for, `ready` those that wait for none, `peer_ranks` every peer named,
    `items` how many items it puts out, `needs` which of the others' it reads, how many times, and `lendable` the steps
    whose items the others may read where they are, as nothing overwrites them until all have.
    """

    __slots__ = ("instructions", "items", "lendable", "needs", "peer_ranks", "pending", "plan", "ready")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.items = sum(isinstance(step, Publish) for step in plan.steps)
        self.needs = _needs(plan)
        self.lendable = lendable(plan) if self.items else frozenset()
        successors: list[list[int]] = [[] for _ in plan.steps]
        for index, step in enumerate(plan.steps):
            for earlier in step.after:
                successors[earlier].append(index)
        self.instructions = tuple(
            _instruction(step, tuple(after)) for step, after in zip(plan.steps, successors, strict=True)
        )
        self.pending = [len(step.after) for step in plan.steps]
        self.ready = tuple(index for index, step in enumerate(plan.steps) if not step.after)
        self.peer_ranks = tuple(sorted({instruction.peer for instruction in self.instructions} - {-1}))

    def renumbered(self, times: int, plus: int) -> Program:
        """The same program with messages numbered apart, so that it can run `times` times in one operation."""
        other = Program.__new__(Program)
        other.plan, other.pending, other.ready, other.peer_ranks = self.plan, self.pending, self.ready, self.peer_ranks
        other.items, other.needs, other.lendable = self.items, self.needs, self.lendable
        other.instructions = tuple(
            step._replace(suffix=key_suffix(suffix_slot(step.suffix) * times + plus, COLLECTIVE_CHANNEL))
            if step.suffix
            else step
            for step in self.instructions
        )
        return other


def _instruction(step: Step, successors: tuple[int, ...]) -> Instruction:
    place = step.source if isinstance(step, Send | Publish) else step.target
    source: tuple[int, int, int] = (_NOTHING.buffer, 0, 0)
    if isinstance(step, Copy | Reduce):
        source = (step.source.buffer, step.source.offset, step.source.end)
    elif isinstance(step, Fetch | FetchReduce):
        source = (step.item, step.offset, step.offset + step.target.length)
    left = False
    if isinstance(step, RecvReduce):
        left = step.incoming_left
    elif isinstance(step, Reduce):
        left = step.source_left
    elif isinstance(step, FetchReduce):
        left = step.item_left
    return Instruction(
        kind=_KINDS[type(step)],
        peer=step.peer if isinstance(step, _MESSAGES | Fetch | FetchReduce) else -1,
        suffix=key_suffix(step.slot, COLLECTIVE_CHANNEL) if isinstance(step, _MESSAGES) else b"",
        buffer=int(place.buffer),
        start=place.offset,
        stop=place.end,
        source=int(source[0]),
        source_start=source[1],
        source_stop=source[2],
        left=left,
        successors=successors,
    )


_NOTHING: Final = Slice(Buffer.SCRATCH, 0, 0)
_KINDS: Final = {
    Send: SEND,
    Recv: RECV,
    RecvReduce: RECV_REDUCE,
    Reduce: REDUCE,
    Copy: COPY,
    Publish: PUBLISH,
    Fetch: FETCH,
    FetchReduce: FETCH_REDUCE,
}
_MESSAGES: Final = Send | Recv | RecvReduce


def _needs(plan: Plan) -> Needs:
    needs: Needs = {}
    for step in plan.steps:
        if isinstance(step, Fetch | FetchReduce):
            items = needs.setdefault(step.peer, {})
            items[step.item] = items.get(step.item, 0) + 1
    return {peer: dict(sorted(items.items())) for peer, items in needs.items()}
