"""SharedPart: one collective's share of a lane on this rank. Steps that publish wait for room, others for the item."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Protocol

from asyncdist.collectives.executor.program import PUBLISH, Instruction, Program
from asyncdist.collectives.shared.channel import Differs, LaneFault, LaneOperation
from asyncdist.collectives.shared.layout import Travelling
from asyncdist.errors import CollectiveMismatchError, DistError
from asyncdist.transport.shared_memory.process_memory import RemoteBytes, Unreadable

if TYPE_CHECKING:
    from asyncdist.collectives.shared.runner import SharedLane

__all__ = [
    "LENT_NEWS",
    "PART_BYTES",
    "TURN_BYTES",
    "DifferentOperation",
    "SharedExecution",
    "SharedPart",
    "another_length",
    "different",
]

LEND_BYTES: Final = 64 << 10
"""Shortest item that is lent where its memory is shared: copying a shorter one costs less than having it back."""

LENT_NEWS: Final = 16
"""Lent items after which the others are told, the first at once: so many go out in one turn."""

LEND_COST_BYTES: Final = 64 << 10
"""What lending an item counts as in a turn: in the time that it takes, with a system call, so much could be copied."""

TURN_BYTES: Final = 1 << 20
"""Bytes copied and reduced in one turn of the loop after which nothing else is begun: some 0.2 ms, so that no callback
holds it for a millisecond."""

PART_BYTES: Final = 2 << 20
"""A longer item is taken in parts, one in a turn. Shorter parts cost more: after each Python finds the processor's
caches full of data."""

PIECE_BYTES: Final = 512 << 10
"""A longer piece of an operation whose lengths its two ends alone know comes by message, if it has to be copied: it is
cut then, so that one end copies in while the other copies out."""

DONE, LATER, ELSEWHERE = range(3)
"""What has become of a step: done; to be gone on with in a later turn; not for us to do any more, as its message, or
news that its operation was given up, will follow."""


class SharedExecution(Protocol):
    """An operation, as its lane sees it."""

    def payload(self, step: Instruction) -> memoryview:
        """The bytes that a step publishes."""

    def take(self, step: Instruction, item: memoryview | RemoteBytes, begin: int, most: int) -> int:
        """Copy or reduce a part of a published item into the step's target, from byte `begin` of that on.

        Where more than `most` bytes are left, takes so many, and returns where to go on; 0 once all is taken. Raises
        Unreadable.
        """

    def step_done(self, index: int) -> None:
        """A step that was issued, and was not done then, is. It may issue others."""

    def send(self, index: int, step: Instruction) -> bool:
        """Send what a step publishes by message; if it has not gone at once, `index` completes later."""

    def receive(self, index: int, step: Instruction, nbytes: int) -> bool:
        """Receive an item of `nbytes` bytes, which comes by message, likewise. Raises CollectiveMismatchError."""

    def hold(self) -> None:
        """Do not end before `release`: something of its arrays was lent."""

    def release(self) -> None:
        """All of that was read."""

    def message_failed(self, token: object, error: BaseException) -> None:
        """The operation cannot go on."""

    def rank_of(self, member: int) -> int:
        """The global rank of a member."""


class SharedPart:
    """One operation's share of a lane. Without an execution it only takes its place in the order.

    `given`: whether all that its steps publish is in its record's payload already.
    """

    __slots__ = (
        "_execution",
        "_fetches",
        "_given",
        "_lane",
        "_lent",
        "_program",
        "_publishes",
        "_single_copy",
        "_taken",
        "fingerprint",
        "operation",
        "over",
    )

    def __init__(
        self,
        lane: SharedLane,
        fingerprint: int,
        program: Program | None,
        execution: SharedExecution | None,
        *,
        given: bool = False,
    ) -> None:
        self._lane = lane
        self._program = program
        self._single_copy = program is not None and program.single_copy
        self._execution = execution
        self._given = given
        self.fingerprint = fingerprint
        self.operation: LaneOperation | None = None
        self.over = execution is None
        self._lent = False
        self._publishes: deque[int] = deque()
        self._fetches: dict[int, list[tuple[int, int]]] = {}  # by member, a heap of (item, step)
        self._taken: dict[int, int] = {}  # by step, the bytes taken of an item of which there is more

    def issue(self, index: int, step: Instruction) -> bool:
        """Try a step; True if it is done, else `step_done` follows."""
        lane = self._lane
        if not lane.pumping:
            lane.soon()
        operation = self.operation if lane.moved < TURN_BYTES else None
        try:
            if step.kind == PUBLISH:
                if self._given:
                    return True
                found = LATER if operation is None or self._publishes else self._publish(operation, index, step)
                if found == LATER:
                    self._publishes.append(index)
                return found == DONE
            if operation is not None and step.source < lane.core.available(operation, step.peer):
                found = self._fetch(operation, index, step)
                if found != LATER:
                    return found == DONE
        except LaneFault as error:
            lane.fault(error)
            return False
        except Differs as error:
            raise lane.different(error.member) from None
        heappush(self._fetches.setdefault(step.peer, []), (step.source, index))
        return False

    @property
    def number(self) -> int:
        """Its place in the order; -1 until it has begun."""
        return -1 if self.operation is None else self.operation.number

    def poll(self) -> bool:
        """Move on as far as possible; whether anything was done. Raises LaneFault."""
        try:
            return self._poll()
        except LaneFault:
            raise
        except Differs as error:
            self.fail(self._lane.different(error.member))
        except Exception as error:  # a mismatch, or a reduction of the user's own
            self.fail(error)
        return True

    def _poll(self) -> bool:
        operation, program, execution = self.operation, self._program, self._execution
        if operation is None or self.over or program is None or execution is None:
            return False
        instructions, lane = program.instructions, self._lane
        available = lane.core.available
        done = False
        publishes = self._publishes
        while publishes and not self.over and lane.moved < TURN_BYTES:
            index = publishes[0]
            found = self._publish(operation, index, instructions[index])
            if found == LATER:
                break
            publishes.popleft()
            done = True
            if found == DONE:
                execution.step_done(index)
        for member, waiting in list(self._fetches.items()):
            while waiting and not self.over and lane.moved < TURN_BYTES:
                item, index = waiting[0]
                if item >= available(operation, member):
                    break
                heappop(waiting)
                done = True
                found = self._fetch(operation, index, instructions[index])
                if found == DONE:
                    execution.step_done(index)
                elif found == LATER:
                    heappush(waiting, (item, index))
        if (
            self._lent
            and not self.over
            and operation.published == operation.item_count
            and lane.core.returned(operation)
        ):
            self._lent = False
            done = True
            execution.release()
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
            self._taken.clear()
            self._lane.ended(self)

    def slow_readers(self) -> set[int]:
        """Members that keep us from publishing, or from having back what we have lent."""
        core = self._lane.core
        if self.operation is None:
            return set(core.least_finished())
        return set(core.slowest()) if self._publishes or self._lent else set()

    def _publish(self, operation: LaneOperation, index: int, step: Instruction) -> int:
        """Put out an item if it is its turn and there is room; says what has become of it."""
        execution, program = self._execution, self._program
        assert execution is not None
        assert program is not None
        lane, payload = self._lane, execution.payload(step)
        length, found = len(payload), DONE
        place = lane.lend(payload, self._single_copy) if step.left and length >= LEND_BYTES else None
        if place is not None:
            if not self._lend(operation, *place, length):
                return LATER
        elif program.whole and length > PIECE_BYTES:
            if not lane.core.travels(operation, length):
                return LATER
            found = DONE if execution.send(index, step) else ELSEWHERE
            lane.changed = True
        elif lane.core.publish(operation, payload):
            lane.moved += length
            lane.changed = True
        else:
            return LATER
        if self._lent and operation.published == operation.item_count and lane.core.returned(operation):
            lane.soon()
        return found

    def _lend(self, operation: LaneOperation, segment: int, offset: int, length: int) -> bool:
        lane, execution = self._lane, self._execution
        assert execution is not None
        if not lane.core.lend(operation, segment, offset, length):
            return False
        lane.moved += LEND_COST_BYTES
        lane.changed = True
        if operation.published % LENT_NEWS == 1:
            lane.tell()
        if not self._lent:
            self._lent = True
            execution.hold()
        return True

    def _fetch(self, operation: LaneOperation, index: int, step: Instruction) -> int:
        """Take what this turn has room for of an item that is there; says what has become of it."""
        execution, core, lane = self._execution, self._lane.core, self._lane
        assert execution is not None
        item = core.item(operation, step.peer, step.source)
        if item is None:
            return ELSEWHERE
        if isinstance(item, Travelling):
            return self._receive(operation, index, step, item)
        begin = self._taken.pop(index, 0) if self._taken else 0
        try:
            end = execution.take(step, item, begin, PART_BYTES)
        except Unreadable as error:
            core.borrowed = False
            if error.gone or not core.intact(operation, step.peer, step.source):
                return ELSEWHERE
            raise DistError(f"of rank {execution.rank_of(step.peer)}, {error}") from None
        if core.borrowed:
            core.borrowed = False
            if not core.intact(operation, step.peer, step.source):
                return ELSEWHERE  # given up, and its memory may have changed under our hands
        if end:
            self._taken[index] = end
            lane.moved += end - begin
            return LATER
        core.consumed(operation, step.peer, step.source)
        lane.moved += len(item) - begin
        return DONE

    def _receive(self, operation: LaneOperation, index: int, step: Instruction, item: Travelling) -> int:
        execution, program = self._execution, self._program
        assert execution is not None
        if program is None or not program.whole:
            raise LaneFault(step.peer, "an item comes by message, in an operation without messages")
        found = DONE if execution.receive(index, step, item.nbytes) else ELSEWHERE
        self._lane.core.consumed(operation, step.peer, step.source)
        return found


class DifferentOperation(CollectiveMismatchError):
    """All that is known yet is that another operation runs there."""


def different(rank: int) -> DifferentOperation:
    """Global rank `rank` runs another operation in this place of the order."""
    return DifferentOperation(
        f"rank {rank} runs something else in this place of the order: another collective, reduction, dtype, root, size "
        "or algorithm",
        rank,
    )


def another_length(rank: int, sent: int, expected: int) -> CollectiveMismatchError:
    """Global rank `rank` has sent so many bytes, and others are expected here."""
    return CollectiveMismatchError(f"rank {rank} sent {sent} bytes where {expected} are expected here", rank)
