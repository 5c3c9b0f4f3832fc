"""Lane: a LendingLane, and beside it the express way for operations so small that their payload fits their record.

Nothing here waits or wakes anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from asyncdist.collectives.shared.exposed_chunks import Borrow, LendingLane
from asyncdist.collectives.shared.layout import (
    CONSUMED,
    EXPRESS_AT,
    EXPRESS_BYTES,
    FINISHED,
    ISSUED,
    ITEMS,
    LANE_HEAD_BYTES,
    MAX_LANE_RANKS,
    PAYLOAD,
    PIECE,
    RECORD,
    RECORD_STRIDE,
    RECORD_WORDS,
    RECORDS,
    RECORDS_AT,
    RESULTS,
    SKIPPED,
    SLOTS,
    TURN,
    Differs,
    LaneFault,
    LaneOperation,
    Needs,
    wide_bytes,
)
from asyncdist.transport.shared_memory.fence import ORDERED, fence, order

__all__ = [
    "BY_ITEMS",
    "LANE_HEAD_BYTES",
    "MAX_LANE_RANKS",
    "NO_NEEDS",
    "READY",
    "SKIPPED",
    "Differs",
    "Lane",
    "LaneFault",
    "LaneOperation",
    "Needs",
]

NO_NEEDS: Final[Needs] = {}

NOT_READY, READY, BY_ITEMS = range(3)


class Lane(LendingLane):
    """See ItemLane. Express operations share its order: every member begins all of them, and ends them in turn.

    A payload of EXPRESS_BYTES lies in the record itself. A wide one lies in one of SLOTS slots beside the records, one
    that is too long for that in one of half as many, twice as long, in the same memory; the operation's number says in
    which. It stays there until all members have finished the operation; results that the others are to take as well
    come to lie where nobody takes the payload any more.

    Where only the two ends of a piece know its length, each member alone decides whether all that it gives lies in its
    payload, behind a table of bounds, or is items: its record says which it is, and how long the payload.
    """

    __slots__ = ("_slots", "_wide_bytes", "_wide_number")

    def __init__(self, rank: int, segments: Sequence[memoryview], borrow: Borrow | None = None) -> None:
        super().__init__(rank, segments, borrow)
        self._wide_bytes = min(wide_bytes(len(segment)) for segment in segments)
        self._slots = 0  # of the last wide operation, whose number is
        self._wide_number = -1

    def express_turn(self, length: int) -> int:
        """The number of the next operation, whose payload (`length` bytes of every member that has one) we may put out.

        -1 if we are too far ahead of another member, or of ourselves.
        """
        number = self.issued
        if length <= EXPRESS_BYTES:
            ahead = RECORDS
        else:
            slots = self._slots_for(length)
            ahead = slots if slots == self._slots else min(slots, number - self._wide_number)
        if number - self.finished >= ahead:  # we have to read our own payload, or others to begin what we have ended
            self._want(TURN)
            return -1
        if number - self._finished_seen >= ahead and not self._catch_up(number, ahead):
            return -1
        return number

    def express(self, number: int, fingerprint: int, length: int, needs: Needs = NO_NEEDS) -> None:
        """Begin operation `number`, whose turn it is and whose payload is in place. Ends with `express_done`.

        `needs`: what it reads of members that put out items instead (`by_items`).
        """
        at = RECORDS_AT + number % RECORDS * RECORD_STRIDE
        RECORD.pack_into(self._own, at, number, fingerprint, self._next_item, 0, length)
        if self._wanting:
            self._content(TURN)
        if length > EXPRESS_BYTES:
            self._slots, self._wide_number = self._slots_for(length), number
        if self.open:
            self.open[number] = LaneOperation(number, fingerprint, self._next_item, 0, needs)
        if not ORDERED:
            order()  # the record before its count
        self.issued = self._own_words[ISSUED] = number + 1

    def _slots_for(self, length: int) -> int:
        slots = SLOTS if length <= self._wide_bytes // SLOTS else SLOTS // 2
        if length > self._wide_bytes // slots:
            raise ValueError(f"a payload of {length} bytes does not fit {slots} slots in {self._wide_bytes}")
        return slots

    def _express_place(self, number: int, length: int) -> int:
        """Where the payload of an express operation is in every segment."""
        if length <= EXPRESS_BYTES:
            return RECORDS_AT + number % RECORDS * RECORD_STRIDE + EXPRESS_AT
        slots = self._slots_for(length)
        return LANE_HEAD_BYTES + number % slots * (self._wide_bytes // slots)

    def express_begun(self, number: int) -> bool:
        """Whether all members have begun operation `number`, which we have begun before this call. Fences."""
        fence()  # our count before the others': of all who look, the last sees everyone
        for _, peer in self._others:  # noqa: SIM110 - a generator would cost as much as all of this
            if peer.issued <= number and not self._look_for(peer, number):
                return False
        return True

    def express_ready(self, number: int, fingerprint: int, needed: Sequence[int] | None = None) -> bool:
        """Whether the members that are `needed`, or all, have begun operation `number`.

        Raises Differs if one of them runs something else there.
        """
        at = number % RECORDS * RECORD_WORDS
        for index, peer in self._others:
            if needed is not None and index not in needed:
                continue
            if peer.issued <= number and not self._look_for(peer, number):
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

    def express_pieces(self, number: int, fingerprint: int, givers: Iterable[int]) -> int:
        """Whether the pieces of all `givers` are in their payloads (READY), or one has items instead (BY_ITEMS).

        Raises Differs if one of them runs something else there.
        """
        at, found = number % RECORDS * RECORD_WORDS, READY
        for member in givers:
            peer = self._members[member]
            assert peer is not None
            if peer.issued <= number and not self._look_for(peer, number):
                found = NOT_READY
                continue
            if not ORDERED:
                order()  # the count before the record
            words = peer.record_words
            if words[at + 1] != fingerprint or words[at] != number:
                if words[at + 1] != SKIPPED:
                    raise Differs(member)
                found = NOT_READY
            elif words[at + ITEMS]:
                return BY_ITEMS
            elif not words[at + PAYLOAD]:
                found = NOT_READY
        return found

    def by_items(self, number: int, fingerprint: int, needs: Needs) -> LaneOperation:
        """Operation `number`, begun by `express`, from now on as one that needs items. Ends with `end`."""
        operation = self.open.get(number)
        if operation is None:  # nothing was open when it began
            operation = LaneOperation(number, fingerprint, self._next_item, 0, needs)
            self._add(operation)
        return operation

    def piece(self, number: int, member: int, item: int) -> memoryview:
        """See ItemLane; `member` has begun it."""
        peer = self._members[member]
        assert peer is not None
        length = peer.record_words[number % RECORDS * RECORD_WORDS + PAYLOAD]
        table = item * 4 + PIECE.size
        if not table <= length <= max(EXPRESS_BYTES, self._wide_bytes // (SLOTS // 2)):
            raise LaneFault(member, f"{length} bytes are in place of {item + 1} pieces or more")
        at, segment = self._express_place(number, length), peer.segment
        begin, end = PIECE.unpack_from(segment, at + table - PIECE.size)
        if not begin <= end <= length:
            raise LaneFault(member, f"a piece lies from {begin} to {end} of {length} bytes")
        return segment[at + begin : at + end]

    def express_results(self, number: int) -> bool:
        """Our results of operation `number` are in place of our payload; whether those of all members are. Fences."""
        if not ORDERED:
            order()  # the results before we say so
        self._own_records[number % RECORDS * RECORD_WORDS + RESULTS] = number + 1
        fence()  # our word before the others': of all who look, the last sees everyone
        return not self.without_results(number)

    def without_results(self, number: int) -> list[int]:
        """Members whose results of operation `number` are not there; those of the others can be read then."""
        at = number % RECORDS * RECORD_WORDS + RESULTS
        missing = [index for index, peer in self._others if peer.record_words[at] != number + 1]
        if not ORDERED:
            order()  # the words before the results
        return missing

    def express_payload(self, number: int, member: int, length: int) -> memoryview:
        """The payload of `member` in operation `number`, which is ready."""
        peer = self._members[member]
        at = self._express_place(number, length)
        return (self._own if peer is None else peer.segment)[at : at + length]

    def express_done(self, number: int, *, begun: bool = False) -> None:
        """Operation `number` was read, or given up. Express operations end in their order.

        `begun`: whether it is known that all members have begun it, none with items.
        """
        if self.open or number != self.finished or not (begun or self._in_records(number)):
            self._end_express(number)
            return
        if not ORDERED:
            order()  # read before we say so
        self.finished = self._own_words[FINISHED] = number + 1
        self.news = True

    def _in_records(self, number: int) -> bool:
        """Whether all members have begun operation `number`, and none has items in it."""
        for _, peer in self._others:
            if peer.issued <= number:
                return False
        if not ORDERED:
            order()  # the counts before the records
        at = number % RECORDS * RECORD_WORDS
        fingerprint = self._own_records[at + 1]
        for index, peer in self._others:
            words = peer.record_words
            if words[at + 1] != fingerprint:
                self._note(number, index, words[at + 1])
            if words[at + ITEMS]:
                return False
        return True

    def _end_express(self, number: int) -> None:
        """End one of several that are open, or one that some member has not begun, or has items in."""
        operation = self.open.get(number)
        if operation is None and number == self.finished and self._in_records(number):
            for _, peer in self._others:
                peer.retired = number + 1
            self._finish()
            self.retire()
            return
        if operation is None:  # nothing was open when it began
            operation = LaneOperation(number, 0, self._next_item, 0, {})
            self._add(operation)
        self.end(operation)

    def slowest(self) -> list[int]:
        """Members that have consumed the least of our items, if any are left."""
        consumed = {index: peer.words[CONSUMED + 8 * self.rank] for index, peer in self._others}
        least = min(consumed.values())
        return [index for index, count in consumed.items() if count == least < self._published]

    def least_finished(self) -> list[int]:
        """Members that have finished the fewest operations."""
        finished = {index: peer.words[FINISHED] for index, peer in self._others}
        least = min(finished.values())
        return [index for index, count in finished.items() if count == least]
