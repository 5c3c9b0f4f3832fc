"""SharedLane: the operations of one lane under way on this rank, moved on whenever a member has moved.

Steps that publish wait for room, steps that fetch for the item. Nobody waits in line for a wake-up: whoever changes
something that another member may wait for rings its doorbell, and every rank looks at all its operations when rung.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final, Protocol

from asyncdist.errors import CollectiveMismatchError
from asyncdist.executor.program import PUBLISH, Instruction, Program
from asyncdist.transport.doorbell import Ringer
from asyncdist.transport.lane import Differs, Lane, LaneOperation

__all__ = ["SharedExecution", "SharedLane", "SharedPart", "different"]

TURN_BYTES: Final = 1 << 20
"""Bytes copied and reduced in one turn of the loop: some 0.2 ms, so that no callback holds it for a millisecond."""


class SharedExecution(Protocol):
    """An operation, as its lane sees it."""

    def payload(self, step: Instruction) -> memoryview:
        """The bytes that a step publishes."""

    def take(self, step: Instruction, item: memoryview) -> None:
        """Copy or reduce a part of a published item into the step's target."""

    def step_done(self, index: int) -> None:
        """A step that was issued, and was not done then, is. It may issue others."""

    def message_failed(self, token: object, error: BaseException) -> None:
        """The operation cannot go on."""

    def rank_of(self, member: int) -> int:
        """The global rank of a member."""


class SharedPart:
    """One operation's share of a lane. Without an execution it only takes its place in the order."""

    __slots__ = ("_execution", "_fetches", "_lane", "_program", "_publishes", "fingerprint", "operation", "over")

    def __init__(
        self, lane: SharedLane, fingerprint: int, program: Program | None, execution: SharedExecution | None
    ) -> None:
        self._lane = lane
        self._program = program
        self._execution = execution
        self.fingerprint = fingerprint
        self.operation: LaneOperation | None = None
        self.over = execution is None
        self._publishes: deque[int] = deque()
        self._fetches: dict[int, list[tuple[int, int]]] = {}  # by member, a heap of (item, step)

    def issue(self, index: int, step: Instruction) -> bool:
        """Try a step; True if it is done, else `step_done` follows."""
        operation, lane = self.operation, self._lane
        if step.kind == PUBLISH:
            if operation is not None and not self._publishes and self._publish(operation, step):
                return True
            self._publishes.append(index)
            return False
        if operation is not None and lane.moved < TURN_BYTES and step.source < lane.available(operation, step.peer):
            self._fetch(operation, step)
            return True
        heappush(self._fetches.setdefault(step.peer, []), (step.source, index))
        return False

    def poll(self) -> bool:
        """Move on as far as possible; whether anything was done."""
        operation, program, execution = self.operation, self._program, self._execution
        if operation is None or self.over or program is None or execution is None:
            return False
        instructions, lane = program.instructions, self._lane
        done = False
        publishes = self._publishes
        while publishes and not self.over and lane.moved < TURN_BYTES:
            index = publishes[0]
            if not self._publish(operation, instructions[index]):
                break
            publishes.popleft()
            done = True
            execution.step_done(index)
        for member, waiting in list(self._fetches.items()):
            while waiting and not self.over and lane.moved < TURN_BYTES:
                item, index = waiting[0]
                if item >= lane.available(operation, member):
                    break
                heappop(waiting)
                self._fetch(operation, instructions[index])
                done = True
                execution.step_done(index)
        return done

    def fail(self, error: Exception) -> None:
        """The operation cannot go on because of what a member has written."""
        execution = self._execution
        if execution is not None and not self.over:
            execution.message_failed(None, error)

    def end(self) -> None:
        """The operation has ended, well or not: nothing of it is read or published any more. Idempotent."""
        if not self.over:
            self.over = True
            self._execution = None
            self._publishes.clear()
            self._fetches.clear()
            self._lane.ended(self)

    def slow_readers(self) -> set[int]:
        """Members that keep us from publishing."""
        return set(self._lane.core.slowest()) if self._publishes else set()

    def _publish(self, operation: LaneOperation, step: Instruction) -> bool:
        execution = self._execution
        assert execution is not None
        payload = execution.payload(step)
        if not self._lane.core.publish(operation, payload):
            return False
        self._lane.moved += len(payload)
        self._lane.changed = True
        return True

    def _fetch(self, operation: LaneOperation, step: Instruction) -> None:
        execution, core = self._execution, self._lane.core
        assert execution is not None
        item = core.item(operation, step.peer, step.source)
        execution.take(step, item)
        core.consumed(operation, step.peer, step.source)
        self._lane.moved += len(item)
        self._lane.consumed = True


class SharedLane:
    """One member's side of a lane: `core` is the memory, `ringers` wake the other members (None for ourselves)."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, core: Lane, ranks: Sequence[int], ringers: Sequence[Ringer | None]
    ) -> None:
        self.core = core
        self.moved = 0
        self.changed = False
        self.consumed = False
        self._loop = loop
        self._ranks = ranks
        self._ringers = ringers
        self._others = [ringer for ringer in ringers if ringer is not None]
        self._parts: list[SharedPart] = []
        self._unbegun: deque[SharedPart] = deque()
        self._again: asyncio.Handle | None = None
        self.closed = False

    def add(
        self, fingerprint: int, program: Program | None = None, execution: SharedExecution | None = None
    ) -> SharedPart:
        """Take the next place in the order, for an operation that runs here, or (without one) elsewhere or nowhere."""
        part = SharedPart(self, fingerprint, program, execution)
        self._unbegun.append(part)
        self.moved = 0
        self._begin()
        return part

    def poll(self) -> bool:
        """Look at what the members have done, and move on; whether anything was done."""
        if self.closed:
            return False
        self.moved = 0
        done = False
        try:
            self.core.retire()
            if self._unbegun:
                done = self._begin()
        except Exception as error:
            self._fail_all(error)
            return True
        for part in list(self._parts):
            try:
                done |= part.poll()
            except Exception as error:
                part.fail(error)
                done = True
        self.flush()
        return done

    def flush(self) -> None:
        """Ring for what has changed since the last time; go on in the loop's next turn if this one was full."""
        if self.changed:
            self.changed = self.consumed = False
            for ringer in self._others:
                ringer.ring()
        elif self.consumed:
            self.consumed = False
            for member in self.core.wanted_by():
                waiting = self._ringers[member]
                if waiting is not None:
                    waiting.ring()
        if self.moved >= TURN_BYTES and self._again is None and not self.closed:
            self._again = self._loop.call_soon(self._go_on)

    def ended(self, part: SharedPart) -> None:
        """An operation is over."""
        if part in self._parts:
            self._parts.remove(part)
        if part.operation is not None and not self.closed:
            self.core.end(part.operation)
            self.consumed = True

    def available(self, operation: LaneOperation, member: int) -> int:
        """How many items of `member` are there. Raises CollectiveMismatchError if it runs something else."""
        try:
            return self.core.available(operation, member)
        except Differs as error:
            raise different(self._ranks[error.member]) from None

    def close(self) -> None:
        """Touch the memory no more. Idempotent."""
        self.closed = True
        if self._again is not None:
            self._again.cancel()
        self._parts.clear()
        self._unbegun.clear()

    def _go_on(self) -> None:
        self._again = None
        self.poll()

    def _begin(self) -> bool:
        unbegun, done = self._unbegun, False
        while unbegun:
            part = unbegun[0]
            program = part._program
            needs = {} if program is None else {peer: items.copy() for peer, items in program.needs.items()}
            operation = self.core.begin(part.fingerprint, 0 if program is None else program.items, needs)
            if operation is None:
                break
            unbegun.popleft()
            done = True
            part.operation = operation
            if part.over:
                self.core.end(operation)
                self.consumed = True
            else:
                self._parts.append(part)
        return done

    def _fail_all(self, error: Exception) -> None:
        parts = [*self._parts, *self._unbegun]
        self.close()
        for part in parts:
            part.fail(error)


def different(rank: int) -> CollectiveMismatchError:
    """Global rank `rank` runs another operation in this place of the order."""
    return CollectiveMismatchError(
        f"rank {rank} runs something else in this place of the order: another collective, reduction, dtype, root, size "
        "or algorithm",
        rank,
    )
