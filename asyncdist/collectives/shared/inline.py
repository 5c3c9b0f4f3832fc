"""Inline operations: collectives so small that what ranks give each other lies in the records of a lane.

UCX calls this way *short*. A rank publishes with one store. It takes what it is to have at the first look that finds
there all that it needs. That takes neither plan steps nor memory of its own: it is what the plans of `shared_reduce`
and `shared_move` in `plan.algorithms` say, by a shorter way. `plan.records` says which collectives go so.

`Inline` is the memory: publishing and looking, without objects of upper layers. `InlineQueue` moves operations on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias
from weakref import ref

import numpy as np

from asyncdist.arrays import reduction
from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.arrays.reduction import Kernel
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork, OnEnd
from asyncdist.collectives.shared.items import BY_ITEMS, READY, Items
from asyncdist.collectives.shared.layout import (
    FINISHED,
    INLINE_AT,
    INLINE_BYTES,
    ISSUED,
    ITEMS,
    LANE_HEAD_BYTES,
    RECORD,
    RECORD_STRIDE,
    RECORD_WORDS,
    RECORDS,
    RECORDS_AT,
    RESULTS,
    SKIPPED,
    SLOTS,
    TURN,
    TURN_BYTES,
    Differs,
    LaneFault,
    LaneOperation,
    Needs,
    wide_bytes,
)
from asyncdist.collectives.shared.turns import Turns
from asyncdist.inspect.recorder import NOTE
from asyncdist.transport.shared_memory.doorbell import ASLEEP
from asyncdist.transport.shared_memory.fence import ORDERED, PAIR, fence, order

if TYPE_CHECKING:
    from asyncdist.collectives.shared.recipes import Pieces
    from asyncdist.collectives.shared.runner import Lane, LaneRunner

__all__ = ["NO_NEEDS", "Inline", "InlineOperation", "InlineQueue", "InlineRecipe", "Take"]

NO_NEEDS: Final[Needs] = {}

NEWS_EVERY: Final = 16
"""Inline operations after which waiting members are looked after: a fourth of how far a member can be ahead."""
RECIPES_KEPT: Final = 32
"""Recipes whose payloads are kept as arrays."""


class Inline:
    """Payloads of inline operations. Every member begins all operations, and ends the inline ones in turn.

    A payload of INLINE_BYTES lies in the record itself. A wide one lies in one of SLOTS slots beside the records, one
    that is too long for that in one of half as many, twice as long, in the same memory; the operation's number says in
    which. It stays there until all members have finished the operation. Results that the others are to take as well
    come to lie where no member takes the payload any more.

    A record says how long the payload is, so readers see of each member whether it has put out items instead.
    """

    __slots__ = ("__weakref__", "_items", "_slots", "_turns", "_wide_bytes", "_wide_number", "most_bytes")

    def __init__(self, turns: Turns, items: Items) -> None:
        self._turns = turns
        self._items = items
        segments = [turns.own, *(peer.segment for _, peer in turns.others)]
        self._wide_bytes = min(wide_bytes(len(segment)) for segment in segments)
        self.most_bytes = max(INLINE_BYTES, self._wide_bytes // (SLOTS // 2))
        """The longest payload."""
        self._slots = 0  # of the last wide operation, whose number is
        self._wide_number = -1

    # Publishing

    def turn(self, length: int) -> int:
        """The number of the next operation, if this rank may publish its payload of `length` bytes; else -1.

        It may not while it is too far ahead of another member, or of its own reading.
        """
        turns = self._turns
        number = turns.issued
        if length <= INLINE_BYTES:
            ahead = RECORDS
        else:
            slots = self._slots_for(length)
            ahead = slots if slots == self._slots else min(slots, number - self._wide_number)
        if number - turns.finished >= ahead:  # we have to read our own payload, or others to begin what we have ended
            turns.want(TURN)
            return -1
        if number - turns.finished_seen >= ahead and not turns.catch_up(number, ahead):
            return -1
        return number

    def payload(self, number: int, member: int, length: int) -> memoryview:
        """The payload of `member` in operation `number`: ready to read if another's, ours to write if our own."""
        peer = self._turns.members[member]
        at = self.place(number, length)
        return (self._turns.own if peer is None else peer.segment)[at : at + length]

    def publish(self, number: int, fingerprint: int, length: int, needs: Needs = NO_NEEDS) -> None:
        """Begin operation `number`, whose turn it is and whose payload is in place. Ends with `done`.

        `needs`: what it reads of members that put out items instead (`Items.in_steps`).
        """
        turns = self._turns
        at = RECORDS_AT + number % RECORDS * RECORD_STRIDE
        RECORD.pack_into(turns.own, at, number, fingerprint, turns.next_item, 0, length)
        if turns.wanting:
            turns.content(TURN)
        if length > INLINE_BYTES:
            self._slots, self._wide_number = self._slots_for(length), number
        if turns.open:
            turns.open[number] = LaneOperation(number, fingerprint, turns.next_item, 0, needs)
        if not ORDERED:
            order()  # the record before its count
        turns.issued = turns.own_words[ISSUED] = number + 1

    def publish_results(self, number: int) -> bool:
        """Say that our results of operation `number` are in place of our payload; True if all members' are. Fences."""
        if not ORDERED:
            order()  # the results before we say so
        self._turns.own_records[number % RECORDS * RECORD_WORDS + RESULTS] = number + 1
        fence()  # our word before the others': of all who look, the last sees everyone
        return not self.without_results(number)

    # Looking

    def all_begun(self, number: int) -> bool:
        """Whether all members have begun operation `number`, which we have begun before this call. Fences."""
        # Our count before the others': of all who look, the last sees everyone. A fence, without its call.
        with PAIR:
            pass
        if not ORDERED:
            with PAIR:
                pass
        turns = self._turns
        for _, peer in turns.others:
            if peer.issued <= number:
                issued = peer.words[ISSUED]
                if issued == number + 1:
                    peer.issued = issued
                elif issued == peer.issued or not turns.look_for(peer, number):
                    return False
        return True

    def ready(self, number: int, fingerprint: int, needed: Sequence[int] | None = None) -> bool:
        """Whether the members that are `needed`, or all, have begun operation `number`.

        Raises Differs if one of them runs something else there.
        """
        turns = self._turns
        at = number % RECORDS * RECORD_WORDS
        for index, peer in turns.others:
            if needed is not None and index not in needed:
                continue
            if peer.issued <= number:
                issued = peer.words[ISSUED]
                if issued == number + 1:
                    peer.issued = issued
                elif issued == peer.issued or not turns.look_for(peer, number):
                    return False
            if not ORDERED:
                order()  # the count before the record
            words = peer.record_words
            other = words[at + 1]
            if other != fingerprint or words[at] != number:
                if other == SKIPPED:
                    return False
                raise Differs(index)
        return True

    def without_results(self, number: int) -> list[int]:
        """Members whose results of operation `number` are not there yet. The other members' can be read then."""
        at = number % RECORDS * RECORD_WORDS + RESULTS
        missing = [index for index, peer in self._turns.others if peer.record_words[at] != number + 1]
        if not ORDERED:
            order()  # the words before the results
        return missing

    # Ending

    def done(self, number: int, *, begun: bool = False) -> None:
        """Operation `number` was read, or given up. Inline operations end in their order.

        `begun`: whether it is known that all members have begun it, none with items.
        """
        turns = self._turns
        if turns.open or number != turns.finished or not (begun or self._in_records(number)):
            self._end(number)
            return
        if not ORDERED:
            order()  # read before we say so
        turns.finished = turns.own_words[FINISHED] = number + 1
        turns.news = True

    def _end(self, number: int) -> None:
        """End one of several that are open, or one that some member has not begun, or has items in."""
        turns = self._turns
        operation = turns.open.get(number)
        if operation is None and number == turns.finished and self._in_records(number):
            for _, peer in turns.others:
                peer.retired = number + 1
            turns.finish()
            self._items.retire()
            return
        if operation is None:  # nothing was open when it began
            operation = LaneOperation(number, 0, turns.next_item, 0, {})
            turns.add(operation)
        self._items.end(operation)

    def _in_records(self, number: int) -> bool:
        """Whether all members have begun operation `number`, and none has items in it."""
        turns = self._turns
        for _, peer in turns.others:
            if peer.issued <= number:
                return False
        if not ORDERED:
            order()  # the counts before the records
        at = number % RECORDS * RECORD_WORDS
        fingerprint = turns.own_records[at + 1]
        for index, peer in turns.others:
            words = peer.record_words
            if words[at + 1] != fingerprint:
                turns.note(number, index, words[at + 1])
            if words[at + ITEMS]:
                return False
        return True

    def _slots_for(self, length: int) -> int:
        slots = SLOTS if length <= self._wide_bytes // SLOTS else SLOTS // 2
        if length > self._wide_bytes // slots:
            raise ValueError(f"a payload of {length} bytes does not fit {slots} slots in {self._wide_bytes}")
        return slots

    def place(self, number: int, length: int) -> int:
        """Where the payload of an operation is in every segment."""
        if length <= INLINE_BYTES:
            return RECORDS_AT + number % RECORDS * RECORD_STRIDE + INLINE_AT
        slots = self._slots_for(length)
        return LANE_HEAD_BYTES + number % slots * (self._wide_bytes // slots)


class Payloads(NamedTuple):
    """Payloads of one place in the lane, as arrays over its memory."""

    own: Array
    operands: list[Array]
    """Of the members whose we take, in that order."""


NO_PAYLOADS: Final = Payloads(np.empty(0, np.uint8), [])
"""Of operations that have not begun, and of barriers."""

Take: TypeAlias = "Callable[[InlineOperation], None]"
"""Puts into the outputs of an operation what this rank has of all ranks' payloads."""


@dataclass(slots=True, eq=False)
class InlineRecipe:
    """What all inline calls of one shape share."""

    fingerprint: int
    dtype: np.dtype[Any]
    nbytes: int
    """What each rank that gives puts out: its vector, its block, or its blocks for all; 0 of `pieces`."""
    rank: int
    take: Take | None
    """None if there is nothing to take."""
    kernel: Kernel
    gives: bool
    """Whether this rank does."""
    needed: tuple[int, ...] | None
    """Whose payload this rank takes; None: everybody's, as everybody takes its own."""
    fold: Take | None = None
    """Reduces this rank's part of all vectors and puts out the result, for the others to take, where ranks do so."""
    own_part: slice | None = None
    """The elements that `fold` reduces: as no other rank takes our operand of them, they are not put out."""
    averages: bool = False
    spares: tuple[Array, Array] | None = None
    """For one element: numpy needs three times as long to reduce it in place as from one array into another."""
    readers: tuple[int, ...] = ()
    """Who takes from this rank, if not all do: everyone from it alone, or one from everyone."""
    pieces: Pieces | None = None
    """How payloads are laid out whose lengths only two ends know: then a member may put out items instead."""
    needs: Needs = field(default_factory=dict)
    """Of `pieces`, which items this rank takes then."""


class Owner(Protocol):
    """The backend whose operations these are."""

    running: dict[tuple[int, int], Any]

    def drop(self, tag: int, sequence: int) -> None:
        """Forget an operation, and stop it."""

    def go_on_in_steps(self, operation: InlineOperation) -> None:
        """A member puts out items in place of its pieces: go on with the steps of the plan."""


class InlineOperation:
    """One call under way. `on_end(work, error)` is called once, unless the backend forgets the operation first."""

    __slots__ = (
        "backend",
        "bounds",
        "call",
        "folded",
        "nbytes",
        "number",
        "on_end",
        "payloads",
        "queue",
        "recipe",
        "work",
    )

    bounds: list[int]
    """Of pieces, where each that we give begins in our payload, and where the last one ends."""

    def __init__(
        self, backend: Owner, queue: InlineQueue, recipe: InlineRecipe, call: Call, work: CollectiveWork, on_end: OnEnd
    ) -> None:
        self.backend = backend
        self.queue = queue
        self.call = call
        self.work = work
        self.on_end = on_end
        self.recipe = recipe
        self.nbytes = recipe.nbytes
        self.folded = False
        """Whether our result is out."""
        self.number = -1
        self.payloads = NO_PAYLOADS

    def wakes(self, *, last: bool) -> tuple[int, ...]:
        """Members that may go on now that we have begun, where not all take from all."""
        readers = self.recipe.readers
        return readers if last or len(readers) > 1 else ()

    def put(self, target: Array) -> None:
        """Put out what this rank gives."""
        call = self.call
        blocks = call.inputs or call.outputs
        if len(blocks) == 1:
            elements, own_part = blocks[0].elements, self.recipe.own_part
            if own_part is None:
                target[...] = elements
            else:
                target[: own_part.start] = elements[: own_part.start]
                target[own_part.stop :] = elements[own_part.stop :]
            return
        start = 0
        for block in blocks:
            elements = block.elements
            target[start : start + elements.size] = elements
            start += elements.size

    def fail(self, error: BaseException) -> None:
        """The operation cannot go on."""
        self.backend.drop(self.work.tag, self.work.number)
        self.on_end(self.work, error)

    def stop(self) -> None:
        """Read and write no array any more, and report nothing."""
        self.queue.drop(self)

    def waiting_for(self) -> tuple[int, ...]:
        """Group ranks that have not begun the operation, of those whose payload this rank takes."""
        missing = runner.not_begun(self.number) if (runner := self.queue.runner()) else ()
        needed = self.recipe.needed
        return missing if needed is None else tuple(rank for rank in missing if rank in needed)


class InlineQueue:
    """The inline operations of one lane that this rank has begun, in their order."""

    __slots__ = ("_items", "_memory", "_payloads", "_turns", "queue", "runner")

    def __init__(self, runner: LaneRunner, lane: Lane) -> None:
        self.runner: Callable[[], LaneRunner] = ref(runner)  # type: ignore[assignment]  # None once it is gone
        """The runner that has this queue. This is no cycle, so that the lane's memory goes with the group."""
        self._memory = lane.inline
        self._items = lane.items
        self._turns = lane.turns
        self.queue: deque[InlineOperation] = deque()
        self._payloads: dict[InlineRecipe, dict[int, Payloads]] = {}

    def add(self, operation: InlineOperation) -> None:
        """Take the next place in the order; the operation ends in this call if the others are there already."""
        runner = self.runner()
        if runner.deserted:
            runner.soon_fail_deserted()
        runner.moved = 0
        if runner.unbegun or not self.begin(operation):
            runner.unbegun.append(operation)
            runner.soon()
            return
        # A rank that is not the last would wake the others in vain. Each looks after it has said that it is here, so at
        # least the last one sees all.
        try:
            last = self._memory.all_begun(operation.number)
        except LaneFault as error:
            runner.fault(error)
            return
        if operation.recipe.needed is not None:
            for member in operation.wakes(last=last):
                ringer = runner.ringers[member]
                if ringer is not None and ringer.words[ASLEEP]:
                    ringer.knock()
        elif last:
            for ringer in runner.others:
                if ringer.words[ASLEEP]:
                    ringer.knock()
        else:
            return
        if self.queue[0] is operation:
            self.advance()

    def begin(self, operation: InlineOperation) -> bool:
        """Publish the payload of `operation`; False if it is not its turn."""
        recipe, memory, nbytes = operation.recipe, self._memory, operation.nbytes
        number = memory.turn(nbytes)
        if number < 0:
            return False
        if nbytes:
            if recipe.pieces is not None:
                recipe.pieces.put(operation, memory.payload(number, recipe.rank, nbytes))
            else:
                try:
                    payloads = self._payloads[recipe][number % RECORDS]
                except KeyError:
                    payloads = self._payloads_of(recipe, number)
                operation.payloads = payloads
                if recipe.gives:
                    operation.put(payloads.own)
        memory.publish(number, recipe.fingerprint, nbytes, recipe.needs)
        operation.number = number
        self.queue.append(operation)
        return True

    def look(self) -> bool:
        """As `LaneRunner.poll`, for a spinning waiter: members that are not close behind hear of no end yet."""
        runner = self.runner()
        if not self.queue or runner.unbegun or runner.steps or self._turns.open or runner.closed:
            return runner.poll()
        runner.moved = 0
        return self.advance()

    def advance(self) -> bool:
        """End operations, in their order, as far as all members have begun them; whether any has ended."""
        queue, memory, runner, turns = self.queue, self._memory, self.runner(), self._turns
        done = False
        while queue:
            operation = queue[0]
            number, recipe = operation.number, operation.recipe
            try:
                if recipe.pieces is not None:
                    if not self._pieces_ready(operation, runner):
                        break
                elif recipe.fold is not None:
                    if not self._results_ready(operation, runner):
                        break
                elif not memory.ready(number, recipe.fingerprint, recipe.needed):
                    break
                if recipe.take is not None:
                    recipe.take(operation)
                    outputs = operation.call.outputs
                    if recipe.averages:
                        world = len(operation.payloads.operands) * operation.call.shares
                        reduction.finish(ReduceOp.AVG, outputs[0].elements, world)
                    for flat in outputs:
                        if flat.is_copy:
                            flat.write_back()
            except LaneFault as error:
                runner.fault(error)
                return True
            except Exception as error:
                operation.fail(runner.different(error.member) if isinstance(error, Differs) else error)
                return True
            queue.popleft()
            memory.done(number, begun=recipe.needed is None)
            if turns.differences:  # in this one, or in one before it: it does not end well any more
                runner.tell_differences()
                return True
            done = True
            if recipe.nbytes > INLINE_BYTES or not number % NEWS_EVERY:  # one may wait for the next slot already
                runner.flush()
            elif runner.again is None:  # nor may one who is far ahead wait for us while we sleep
                runner.soon()
            runner.moved += recipe.nbytes * len(runner.ranks)
            work = operation.work
            if work.entry is not None:
                work.entry[NOTE] = turns.awaited
            turns.awaited = turns.rank
            del operation.backend.running[work.key]
            operation.on_end(work, None)
            if runner.moved >= TURN_BYTES:
                runner.soon()
                break
        return done

    def go_on_in_steps(self, operation: InlineOperation) -> LaneOperation:
        """Take the first operation out, which goes on in steps; what it gives is in its payload."""
        self.queue.remove(operation)
        recipe = operation.recipe
        return self._items.in_steps(operation.number, recipe.fingerprint, recipe.needs)

    def drop(self, operation: InlineOperation) -> None:
        runner = self.runner()
        if operation in self.queue:
            self.queue.remove(operation)
            if runner and not runner.closed:
                runner.retire(self._memory.done, operation.number)
                runner.soon()
        elif runner:
            runner.skip(operation)

    def close(self) -> None:
        self.queue.clear()
        self._payloads.clear()

    def _payloads_of(self, recipe: InlineRecipe, number: int) -> Payloads:
        """Arrays over the payloads of operation `number`, kept for all that come to lie in its place."""
        if recipe not in self._payloads:
            if len(self._payloads) >= RECIPES_KEPT:
                self._payloads.clear()
            self._payloads[recipe] = {}
        needed, rank, turns = recipe.needed, recipe.rank, self._turns
        at, count = self._memory.place(number, recipe.nbytes), recipe.nbytes // recipe.dtype.itemsize
        arrays: dict[int, Array] = {}
        for member, peer in enumerate(turns.members):
            if needed is None or member == rank or member in needed:
                segment = turns.own if peer is None else peer.segment
                arrays[member] = np.frombuffer(segment, recipe.dtype, count, at)
        operands = list(arrays.values()) if needed is None else [arrays[member] for member in needed]
        found = self._payloads[recipe][number % RECORDS] = Payloads(arrays[rank], operands)
        return found

    def _pieces_ready(self, operation: InlineOperation, runner: LaneRunner) -> bool:
        recipe = operation.recipe
        found = self._items.pieces_ready(operation.number, recipe.fingerprint, recipe.needs)
        if found == BY_ITEMS:
            operation.backend.go_on_in_steps(operation)
            runner.soon()
        return found == READY

    def _results_ready(self, operation: InlineOperation, runner: LaneRunner) -> bool:
        """Whether all results are there. Puts ours out once all payloads are."""
        memory, number, recipe = self._memory, operation.number, operation.recipe
        if operation.folded:
            return not memory.without_results(number)
        if not memory.ready(number, recipe.fingerprint, recipe.needed):
            return False
        assert recipe.fold is not None
        recipe.fold(operation)
        operation.folded = True
        if not memory.publish_results(number):
            return False
        for ringer in runner.others:  # as who begins last does
            if ringer.words[ASLEEP]:
                ringer.knock()
        return True
