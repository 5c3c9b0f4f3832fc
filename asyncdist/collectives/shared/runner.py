"""LaneRunner: the operations of one lane under way on this rank, moved on whenever a member has moved.

Steps that publish wait for room, steps that fetch wait for the item. No rank waits in line for a wake-up: a rank that
changes something that another member may wait for rings its doorbell, and every rank looks at all its operations when
rung.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Final, NamedTuple, TypeAlias, TypeVar
from weakref import ref

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.collectives.executor.program import FETCH, PUBLISH, Instruction, Program
from asyncdist.collectives.executor.runner import Execution, another_length, different
from asyncdist.collectives.shared.inline import NO_NEEDS, Inline, InlineOperation, InlineQueue
from asyncdist.collectives.shared.items import ZCOPY_NEWS, Borrow, Items
from asyncdist.collectives.shared.layout import SKIPPED, TURN_BYTES, ByMessage, Differs, LaneFault, LaneOperation
from asyncdist.collectives.shared.turns import Turns
from asyncdist.errors import CollectiveMismatchError, DistError, PeerLostError
from asyncdist.transport.shared_memory.doorbell import Ringer
from asyncdist.transport.shared_memory.process_memory import RemoteBytes, Unreadable

T = TypeVar("T")


class Exposed(NamedTuple):
    """Where all members can read a buffer of ours: from `offset` of a segment on, its runs of `least_bytes` or more."""

    segment: int
    offset: int
    least_bytes: int = 0


Expose: TypeAlias = Callable[[memoryview, bool], Exposed | None]

ZCOPY_BYTES: Final = 64 << 10
"""Shortest item that is read where it lies in a mapped segment: copying a shorter one costs less than having it back.
In another process's own memory it is `SINGLE_COPY_BYTES` (`plan/records.py`)."""

ZCOPY_COST_BYTES: Final = 64 << 10
"""What a zcopy item counts as in a turn: in the time that it takes so much could be copied."""

PART_BYTES: Final = 2 << 20
"""A longer item is taken in parts, one in a turn. Shorter parts cost more: after each Python finds the processor's
caches full of data."""

READ_BYTES: Final = 512 << 10
"""What is read of another process's memory at a time to be reduced: it is still in this core's cache then."""

PIECE_BYTES: Final = 512 << 10
"""A longer piece of an operation whose lengths its two ends alone know comes by message, if it has to be copied: it is
cut then, so that one end copies in while the other copies out."""

DONE, LATER, ELSEWHERE, NOT_THERE = range(4)
"""What has become of a step: done; to be gone on with in a later turn; not for us to do any more, as its message, or
news that its operation was given up, will follow; or its item is not there yet."""


class Lane:
    """One member's memory of a lane, in parts: the order of operations, their items, their inline payloads.

    Nothing here waits or wakes anybody.
    """

    __slots__ = ("inline", "items", "turns")

    def __init__(self, rank: int, segments: Sequence[memoryview], borrow: Borrow | None = None) -> None:
        self.turns = Turns(rank, segments)
        self.items = Items(self.turns, borrow)
        self.inline = Inline(self.turns, self.items)
        self.items.inline = ref(self.inline)


class LaneRunner:
    """One member's side of a lane: `lane` is the memory, `ringers` wake the other members (None for ourselves).

    `on_fault(rank, error)` is called, once and from the loop, when a member's memory says what cannot be: nothing moves
    any more then. `on_different(number, rank)` is called, from anywhere, when a member was found to run something else
    in a place of the order that may have ended here.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lane: Lane,
        ranks: Sequence[int],
        ringers: Sequence[Ringer | None],
        on_fault: Callable[[int, Exception], None],
        expose: Expose = lambda octets, single_copy: None,
        on_different: Callable[[int, int], None] = lambda number, rank: None,
    ) -> None:
        self.lane = lane
        self.inline = InlineQueue(self, lane)
        self.expose = expose
        """Where all members can read a buffer, if anywhere; with `single_copy` also in this process's own memory."""
        self.moved = 0
        """Bytes copied and reduced in this turn of the loop, and what zcopy items count as."""
        self.zcopied = 0
        """What the zcopy items that were put out since the last `flush` count as."""
        self.changed = False
        self.pumping = False
        """Whether `flush` will follow: what is done outside of that has to ask for a turn of its own."""
        self.deserted: dict[int, PeerLostError] = {}
        """Members that have left."""
        self.ranks = ranks
        self.ringers = ringers
        self.others = [ringer for ringer in ringers if ringer is not None]
        self.unbegun: deque[SharedSteps | InlineOperation] = deque()
        self.steps: list[SharedSteps] = []
        self.again: asyncio.Handle | None = None
        self.closed = False
        self._on_fault = on_fault
        self._on_different = on_different
        self._loop = loop

    def add(self, fingerprint: int, program: Program | None = None, execution: Execution | None = None) -> SharedSteps:
        """Take the next place in the order, for an operation that runs here, or (without one) elsewhere or nowhere."""
        steps = SharedSteps(self, fingerprint, program, execution)
        self.unbegun.append(steps)
        self.moved = 0
        self.pumping = program is not None
        self._begin()
        if self.deserted:
            self.soon_fail_deserted()
        return steps

    def add_begun(self, operation: InlineOperation, program: Program, execution: Execution) -> SharedSteps:
        """Have the first of the inline operations go on in steps; what it gives is in its payload."""
        steps = SharedSteps(self, operation.recipe.fingerprint, program, execution, given=True)
        steps.operation = self.inline.go_on_in_steps(operation)
        self.steps.append(steps)
        return steps

    def skip(self, operation: InlineOperation) -> None:
        """An operation that has not begun, if it is here, takes its place all the same, with nothing to be found."""
        if operation in self.unbegun:
            self.unbegun[self.unbegun.index(operation)] = SharedSteps(self, SKIPPED, None, None)

    def not_begun(self, number: int) -> tuple[int, ...]:
        """Members that have not begun operation `number`, or not put out their results; of -1, those that keep us from
        beginning it.
        """
        if self.closed:
            return ()
        turns, inline = self.lane.turns, self.inline.queue
        try:
            if number < 0:
                return tuple(turns.least_finished())
            behind = turns.behind(number)
            if not behind and any(
                operation.number == number and operation.recipe.fold is not None for operation in inline
            ):
                behind = self.lane.inline.without_results(number)
            return tuple(behind)
        except LaneFault as error:
            return (error.member,)

    def poll(self) -> bool:
        """Look at what the members have done, and move on; whether anything was done."""
        turns, inline = self.lane.turns, self.inline
        if self.closed or not (inline.queue or self.steps or self.unbegun or self.changed or turns.open or turns.news):
            return False
        done = False
        self.moved = 0
        if inline.queue:
            done = inline.advance()
            # That these have ended is news only to who is far ahead: the loop's next turn tells it.
            if not (self.unbegun or self.steps or ((turns.open or turns.news) and not done)):
                return done
        self.pumping = True
        items = self.lane.items
        try:
            for _, peer in turns.others:
                if items.giving_up or not peer.settled:
                    items.retire()
                    break
            if turns.differences:
                self.tell_differences()
            if self.unbegun and self._begin():
                done = True
                self.soon()  # the others may have begun those before us, and will not ring again
            for steps in list(self.steps):
                done |= steps.poll()
        except LaneFault as error:
            self.fault(error)
            done = True
        self.flush()
        return done

    def soon(self) -> None:
        """Poll in the loop's next turn."""
        if self.again is None and not self.closed:
            self.again = self._loop.call_soon(self._go_on)

    def left(self, member: int, error: PeerLostError) -> None:
        """A member has said goodbye. What it has put out is there still; what it has not begun will never be."""
        self.deserted[member] = error
        self.lane.turns.left(member)
        self.soon_fail_deserted()

    def soon_fail_deserted(self) -> None:
        """Fail, from the loop, what a member that has left will never begin."""
        self._loop.call_soon(self._fail_deserted)

    def fault(self, error: LaneFault) -> None:
        """A member's memory says what cannot be. Its pair is broken off, which ends all it takes part in."""
        if not self.closed:
            self.close()
            self._loop.call_soon(self._on_fault, self.ranks[error.member], error)

    def tell(self) -> None:
        """Ring for what has changed, in the middle of a turn."""
        self.changed = False
        for ringer in self.others:
            ringer.ring()

    def flush(self) -> None:
        """Ring for what has changed since the last time; go on in the loop's next turn if this one was full."""
        self.pumping, self.zcopied = False, 0
        turns = self.lane.turns
        if self.changed:
            self.changed = turns.news = turns.late_news = False
            for ringer in self.others:
                ringer.ring()
        elif turns.news or (turns.late_news and self.moved < TURN_BYTES):
            turns.news = turns.late_news = False
            for member in turns.wanted_by():
                waiting = self.ringers[member]
                if waiting is not None:
                    waiting.ring()
        if self.moved >= TURN_BYTES:
            self.soon()

    def ended(self, steps: SharedSteps) -> None:
        """An operation is over."""
        if steps in self.steps:
            self.steps.remove(steps)
        if steps.operation is not None and not self.closed:
            self.retire(self.lane.items.end, steps.operation)
            if not self.pumping:
                self.soon()

    def different(self, member: int) -> CollectiveMismatchError:
        """A member runs another operation in this place of the order."""
        return different(self.ranks[member])

    def retire(self, end: Callable[[T], None], what: T) -> None:
        """End an operation in the memory of the lane."""
        try:
            end(what)
        except LaneFault as error:
            self.fault(error)
        if self.lane.turns.differences:
            self.tell_differences()

    def tell_differences(self) -> None:
        """Say which members were found to run something else."""
        turns = self.lane.turns
        differences, turns.differences = turns.differences, []
        for number, member in differences:
            self._on_different(number, self.ranks[member])

    def close(self) -> None:
        """Touch the memory no more, and have no member take what it may still read of ours. Idempotent."""
        if not self.closed:
            self.lane.items.revoke_all()
        self.closed = True
        if self.again is not None:
            self.again.cancel()
        self.steps.clear()
        self.unbegun.clear()
        self.inline.close()

    def _go_on(self) -> None:
        self.again = None
        self.poll()

    def _begin(self) -> bool:
        unbegun, lane, done = self.unbegun, self.lane, False
        while unbegun:
            steps = unbegun[0]
            if not isinstance(steps, SharedSteps):
                if not self.inline.begin(steps):
                    break
                unbegun.popleft()
                done = self.changed = True
                continue
            program = steps.program
            items, needs = (0, NO_NEEDS) if program is None else (program.items, program.needs)
            operation = lane.items.begin(steps.fingerprint, items, needs)
            if operation is None:
                break
            unbegun.popleft()
            done = lane.turns.news = True  # who waits for others to begin as well
            steps.operation = operation
            if steps.over:
                self.retire(lane.items.end, operation)
            else:
                self.steps.append(steps)
        return done

    def _fail_deserted(self) -> None:
        self.poll()  # what it has begun all others can begin as well; of that none is kept waiting here
        for operation in [*self.inline.queue, *self.steps, *self.unbegun]:
            if self.closed:
                return
            number, deserted = operation.number, self.deserted
            gone = [member for member in self.not_begun(number) if member in deserted] if number >= 0 else deserted
            for member in gone:
                operation.fail(deserted[member])
                break


class SharedSteps:
    """The steps of one operation that publish and fetch. Without an execution it only takes its place in the order.

    `given`: whether all that its steps publish is in its record's payload already.
    """

    __slots__ = (
        "_execution",
        "_exposed",
        "_fetches",
        "_given",
        "_holds",
        "_publishes",
        "_runner",
        "_staging",
        "_taken",
        "fingerprint",
        "operation",
        "over",
        "program",
    )

    def __init__(
        self,
        runner: LaneRunner,
        fingerprint: int,
        program: Program | None,
        execution: Execution | None,
        *,
        given: bool = False,
    ) -> None:
        self._runner = runner
        self.program = program
        self._execution = execution
        self._given = given
        self.fingerprint = fingerprint
        self.operation: LaneOperation | None = None
        self.over = execution is None
        self._exposed: dict[int, Exposed | None] = {}  # by buffer, from its first item that may be zcopy on
        self._holds = False  # whether members may still read our buffers
        self._publishes: deque[int] = deque()
        self._fetches: dict[int, list[tuple[int, int]]] = {}  # by member, a heap of (item, step)
        self._staging: Array | None = None  # for what is reduced of another process's memory
        self._taken: dict[int, int] = {}  # by step, the bytes taken of an item of which there is more

    def issue(self, index: int, step: Instruction) -> bool:
        """Try a step; True if it is done, else `step_done` follows."""
        runner = self._runner
        if not runner.pumping:
            runner.soon()
        operation = self.operation
        try:
            if step.kind == PUBLISH:
                if self._given:
                    return True
                found = LATER if operation is None or self._publishes else self._publish(operation, index, step)
                if found == LATER:
                    self._publishes.append(index)
                return found == DONE
            if operation is not None and runner.moved < TURN_BYTES:
                found = self._fetch(operation, index, step)
                if found in (DONE, ELSEWHERE):
                    return found == DONE
        except LaneFault as error:
            runner.fault(error)
            return False
        except Differs as error:
            raise runner.different(error.member) from None
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
            self.fail(self._runner.different(error.member))
        except Exception as error:  # a mismatch, or a reduction of the user's own
            self.fail(error)
        return True

    def fail(self, error: Exception) -> None:
        """The operation cannot go on because of what a member has written."""
        execution = self._execution
        if execution is not None and not self.over:
            execution.message_failed(None, error)

    def end(self) -> None:
        """The operation has ended, well or not: nothing of it is read or published any more. Idempotent."""
        if not self.over:
            self.over = True
            execution, self._execution = self._execution, None
            self._publishes.clear()
            self._fetches.clear()
            self._taken.clear()
            self._exposed.clear()
            if execution is not None and self._staging is not None:
                execution.pool.give(self._staging)
                self._staging = None
            self._runner.ended(self)

    def slow_readers(self) -> set[int]:
        """Members that keep us from publishing, or may still read our buffers."""
        lane = self._runner.lane
        if self.operation is None:
            return set(lane.turns.least_finished())
        return set(lane.items.slowest()) if self._publishes or self._holds else set()

    def _poll(self) -> bool:
        operation, program, execution = self.operation, self.program, self._execution
        if operation is None or self.over or program is None or execution is None:
            return False
        instructions, runner = program.instructions, self._runner
        done = False
        publishes = self._publishes
        while publishes and not self.over and runner.moved < TURN_BYTES:
            index = publishes[0]
            found = self._publish(operation, index, instructions[index])
            if found == LATER:
                break
            publishes.popleft()
            done = True
            if found == DONE:
                execution.step_done(index)
        for waiting in list(self._fetches.values()):
            while waiting and not self.over and runner.moved < TURN_BYTES:
                index = waiting[0][1]
                found = self._fetch(operation, index, instructions[index])
                if found == NOT_THERE:
                    break
                done = True
                if found == LATER:
                    continue
                if waiting:  # else the operation is over
                    heappop(waiting)
                if found == DONE:
                    if self._holds and not instructions[index].successors:  # as `step_done`: nothing follows
                        execution.waiting.discard(index)
                        execution.remaining -= 1
                    else:
                        execution.step_done(index)
        taken = self._holds and not self.over and not any(self._fetches.values())
        if taken and operation.published == operation.item_count and runner.lane.items.returned(operation):
            self._holds = False
            done = True
            execution.release()
        return done

    def _publish(self, operation: LaneOperation, index: int, step: Instruction) -> int:
        """Put out an item if it is its turn and there is room; says what has become of it."""
        execution, program, runner = self._execution, self.program, self._runner
        assert execution is not None
        assert program is not None
        buffer, items, found = execution.buffers[step.buffer], runner.lane.items, DONE
        whole = buffer.whole
        if whole is None:
            whole, begin, end = buffer.run(step.start, step.stop)
        else:
            begin, end = step.start * execution.itemsize, step.stop * execution.itemsize
        length = end - begin
        exposed = None
        if step.lendable and length >= ZCOPY_BYTES:
            try:
                exposed = self._exposed[id(whole)]
            except KeyError:
                exposed = self._exposed[id(whole)] = runner.expose(whole, program.single_copy)
        if exposed is not None and length >= exposed.least_bytes:
            # Also in a turn that is full otherwise, so that a part's result goes out in the turn that reduced it.
            if runner.zcopied >= TURN_BYTES or not items.zcopy(
                operation, exposed.segment, exposed.offset + begin, length
            ):
                return LATER
            runner.zcopied += ZCOPY_COST_BYTES
            runner.moved += ZCOPY_COST_BYTES
            runner.changed = True
            if operation.published % ZCOPY_NEWS == 1:
                runner.tell()
            if not self._holds:
                self._holds = True
                execution.hold()
        elif runner.moved >= TURN_BYTES:
            return LATER
        elif program.whole and length > PIECE_BYTES:
            if not items.by_message(operation, length):
                return LATER
            found = DONE if execution.send(index, step) else ELSEWHERE
            runner.changed = True
        elif items.bcopy(operation, whole[begin:end]):
            runner.moved += length
            runner.changed = True
        else:
            return LATER
        if self._holds and operation.published == operation.item_count:
            runner.soon()  # perhaps nothing else is to be waited for than that these items were read
        return found

    def _fetch(self, operation: LaneOperation, index: int, step: Instruction) -> int:
        """Take what this turn has room for of an item, if it is there; says what has become of it."""
        execution, program, runner = self._execution, self.program, self._runner
        assert execution is not None
        assert program is not None
        items = runner.lane.items
        if step.source >= items.available(operation, step.peer):
            return NOT_THERE
        item = items.item(operation, step.peer, step.source)
        if item is None:
            return ELSEWHERE
        if isinstance(item, ByMessage):
            return self._receive(operation, index, step, item)
        array, itemsize = execution.buffers[step.buffer].array, execution.itemsize
        if array is None:
            target = execution.buffers[step.buffer].elements(step.start, step.stop)
        else:
            target = array[step.start : step.stop]
        begin, nbytes, size = self._taken.pop(index, 0) if self._taken else 0, target.nbytes, item.nbytes
        offset = begin
        if program.whole:
            if size != nbytes:
                raise another_length(runner.ranks[step.peer], size, nbytes)
        else:
            offset += step.source_start * itemsize
            if size < step.source_stop * itemsize:
                raise runner.different(step.peer)
        end = nbytes
        if nbytes - begin > PART_BYTES:
            end = begin + max(1, PART_BYTES // itemsize) * itemsize
        if end - begin < nbytes:
            target = target[begin // itemsize : end // itemsize]
        fetches = step.kind == FETCH
        if not isinstance(item, RemoteBytes):
            source = np.frombuffer(item, target.dtype, target.size, offset)
            copy = (
                partial(np.copyto, target, source) if fetches else partial(execution.reduce, source, target, step.left)
            )
        elif fetches:
            copy = partial(item.read, offset, target)
        else:
            staging = self._staging
            if staging is None:
                staging = self._staging = execution.pool.take(max(1, READ_BYTES // itemsize) * itemsize)
            assert execution.kernel is not None, "a plan that reduces was given no reduction"
            copy = partial(item.reduce, offset, target, staging, execution.kernel, step.left)
        try:
            if not items.take(operation, step.peer, step.source, copy, last=end == nbytes):
                return ELSEWHERE  # given up, and its memory may have changed under our hands
        except Unreadable as error:
            raise DistError(f"of rank {runner.ranks[step.peer]}, {error}") from None
        runner.moved += end - begin
        if end < nbytes:
            self._taken[index] = end
            return LATER
        return DONE

    def _receive(self, operation: LaneOperation, index: int, step: Instruction, item: ByMessage) -> int:
        execution, program = self._execution, self.program
        assert execution is not None
        if program is None or not program.whole:
            raise LaneFault(step.peer, "an item comes by message, in an operation without messages")
        found = DONE if execution.receive(index, step, item.nbytes) else ELSEWHERE
        self._runner.lane.items.take(operation, step.peer, step.source)
        return found
