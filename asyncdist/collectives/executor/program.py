"""Program: a plan made ready to run many times.

The plan's steps become flat instructions, dependencies become counters and successors, and slots become the bytes that
name a message on the wire. Each is worked out once per plan, those of a step when it first begins, and kept with it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from copy import copy
from itertools import compress
from operator import not_
from typing import Final, NamedTuple

from asyncdist.plan.problem import PRIVATE_COLLECTIVES
from asyncdist.plan.steps import (
    ANYONE,
    Copy,
    Fetch,
    FetchReduce,
    Plan,
    Publish,
    Recv,
    RecvReduce,
    Reduce,
    RepeatedSteps,
    Send,
    Step,
)
from asyncdist.plan.summary import Traffic, items, lendable, needs, peers, traffic
from asyncdist.transport.protocol.frame import EARLY_PULL_BYTES, key_suffix

__all__ = [
    "COPY",
    "FETCH",
    "PIECE_SUFFIX",
    "PUBLISH",
    "RECV",
    "RECV_REDUCE",
    "SEND",
    "Instruction",
    "Program",
    "Waiting",
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

LOCAL: Final = ANYONE
"""No peer."""

PIECE_SUFFIX: Final = key_suffix(0, COLLECTIVE_CHANNEL)
"""Of a message in place of an item, of which there is one from each rank to each."""


class Instruction(NamedTuple):
    """One step, ready to run."""

    kind: int
    peer: int
    """Group rank of the other end; LOCAL for local steps, and items that several may read."""
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
    together: int
    """Elements of all the plan's messages that go that way between the two ranks."""
    left: bool
    """Whether the incoming or source operand goes left."""
    lendable: bool
    """Of a published item: whether others may read it where it lies."""
    successors: tuple[int, ...]
    """Steps that wait for this one."""


class Instructions(dict[int, Instruction]):
    """Instructions by step, each made when it is first asked for: a plan has thousands, and they begin one by one.

    Messages are numbered `times` their slot `plus` an offset.
    """

    def __init__(self, steps: Sequence[Step], waiting: Waiting, lendable: Container[int], traffic: Traffic) -> None:
        super().__init__()
        self.times, self.plus = 1, 0
        self._steps = steps
        self._traffic = traffic
        self._waiting = waiting
        self._lendable = lendable

    def __missing__(self, index: int) -> Instruction:
        step = self._steps[index]
        peer, suffix, left, lendable = LOCAL, b"", False, False
        source = source_start = source_stop = together = 0
        match step:
            case Send() | Recv() | RecvReduce():
                peer, suffix = step.peer, key_suffix(step.slot * self.times + self.plus, COLLECTIVE_CHANNEL)
                traffic = self._traffic.sent if isinstance(step, Send) else self._traffic.received
                together = self.times * traffic[peer]
                left = isinstance(step, RecvReduce) and step.incoming_left
            case Copy() | Reduce():
                source, source_start, source_stop = int(step.source.buffer), step.source.offset, step.source.end
                left = isinstance(step, Reduce) and step.source_left
            case Fetch() | FetchReduce():
                peer, source, source_start = step.peer, step.item, step.offset
                source_stop = source_start + step.target.length
                left = isinstance(step, FetchReduce) and step.item_left
            case Publish():
                peer = step.reader
                lendable = index in self._lendable
        buffer, start, length = step.source if isinstance(step, Send | Publish) else step.target
        self[index] = made = Instruction(
            _KINDS[type(step)],
            peer,
            suffix,
            int(buffer),
            start,
            start + length,
            source,
            source_start,
            source_stop,
            together,
            left,
            lendable,
            self._waiting.for_step(index),
        )
        return made

    def renumbered(self, times: int, plus: int) -> Instructions:
        """The same with messages numbered apart."""
        other = Instructions(self._steps, self._waiting, self._lendable, self._traffic)
        other.times, other.plus = self.times * times, self.plus * times + plus
        return other


class Program:
    """One rank's plan, ready to run.

    `pending` is how many steps each step waits for, `peer_ranks` every peer named, `items` how many items it puts out,
    `needs` which of the others' it reads, how many times; `whole` whether each is a piece of a length that only its two
    ends know.
    """

    __slots__ = (
        "_longest",
        "_ready",
        "_receives_first",
        "instructions",
        "items",
        "needs",
        "peer_ranks",
        "pending",
        "plan",
        "single_copy",
        "whole",
    )

    def __init__(self, plan: Plan) -> None:
        steps = plan.steps
        waiting = Waiting(steps)
        self.plan = plan
        self.single_copy = plan.single_copy
        self.whole = plan.collective in PRIVATE_COLLECTIVES
        self.items = items(steps) if plan.outstanding_items else 0
        self.needs: dict[int, dict[int, int]] = needs(steps) if plan.outstanding_items else {}
        self.instructions = Instructions(steps, waiting, lendable(plan) if self.items else (), traffic(steps))
        self.pending = waiting.counts()
        self._ready = ready = tuple(compress(range(len(steps)), map(not_, self.pending)))
        self.peer_ranks = peers(steps)
        of_messages = (
            () if plan.outstanding_items else ready
        )  # those of shared memory may be a hundred thousand, and wait for items
        receives = {i: step.target.length for i in of_messages if isinstance(step := steps[i], Recv | RecvReduce)}
        self._longest = max(receives.values(), default=0)
        self._receives_first = (*receives, *(index for index in ready if index not in receives)) if receives else ready

    def first_steps(self, itemsize: int) -> tuple[int, ...]:
        """The steps that wait for none, in the order in which to begin, for elements of `itemsize` bytes.

        A large message is asked for by its receiver. What asks must not wait behind a large message that this rank
        sends, or the two would travel one after the other. Small ones do not wait for receives to be posted.
        """
        return self._ready if self._longest * itemsize <= EARLY_PULL_BYTES else self._receives_first

    def renumbered(self, times: int, plus: int) -> Program:
        """The same program with messages numbered apart, so that it can run `times` times in one operation."""
        other = copy(self)
        other.instructions = self.instructions.renumbered(times, plus)
        return other


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


class Waiting:
    """Successors of each step. Those of repeated steps follow from one round, so they are not kept."""

    __slots__ = ("_ahead", "_gap", "_steps", "_written")

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._written: dict[int, list[int]] = {}
        """By step, those that are written and wait for it."""
        self._ahead: list[list[int]] = []
        """By place in a round, how many steps further on it is waited for in the gap."""
        written, first, end = steps, len(steps), len(steps)
        if isinstance(steps, RepeatedSteps):
            written, (first, length, _), end = steps.written, steps.gap, steps.gap.end
            self._ahead = [[] for _ in range(length)]
            for place, step in enumerate(written[first - length : first]):
                for earlier in step.after:
                    distance = first - length + place - earlier
                    self._ahead[(place - distance) % length].append(distance)
        self._gap = range(first, end)
        waiting = self._written
        for index, step in enumerate(written):
            if step.after:
                number = index if index < first else index + end - first
                for earlier in step.after:
                    waiting.setdefault(earlier, []).append(number)

    def for_step(self, index: int) -> tuple[int, ...]:
        """Return the steps that wait for it, in order."""
        written = self._written.get(index, ())
        if not self._ahead:
            return tuple(written)
        gap = self._gap
        ahead = [index + distance for distance in self._ahead[(index - gap.start) % len(self._ahead)]]
        return tuple(sorted([*written, *(later for later in ahead if later in gap)]))

    def counts(self) -> list[int]:
        """By step, how many it waits for."""
        if not isinstance(self._steps, RepeatedSteps):
            return [len(step.after) for step in self._steps]
        written, (first, length, rounds) = [len(step.after) for step in self._steps.written], self._steps.gap
        return written[:first] + written[first - length : first] * rounds + written[first:]
