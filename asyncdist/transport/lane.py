"""Lane: a LendingLane, and beside it the express way for operations so small that their payload fits their record.

Nothing here waits or wakes anybody.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.transport.fence import fence, order
from asyncdist.transport.lane_layout import (
    CONSUMED,
    EXPRESS_AT,
    EXPRESS_BYTES,
    FINISHED,
    ISSUED,
    LANE_HEAD_BYTES,
    MAX_LANE_RANKS,
    RECORD,
    RECORD_STRIDE,
    RECORD_WORDS,
    RECORDS,
    RECORDS_AT,
    SKIPPED,
    SLOTS,
    TURN,
    Differs,
    LaneFault,
    LaneOperation,
    Needs,
    wide_bytes,
)
from asyncdist.transport.lending_lane import Borrow, LendingLane

__all__ = ["LANE_HEAD_BYTES", "MAX_LANE_RANKS", "SKIPPED", "Differs", "Lane", "LaneFault", "LaneOperation", "Needs"]


class Lane(LendingLane):
    """See ItemLane. Express operations share its order: every member begins all of them, and ends them in turn.

    A payload of EXPRESS_BYTES lies in the record itself. A wide one lies in one of SLOTS slots beside the records, one
    that is too long for that in one of half as many, twice as long, in the same memory; the operation's number says in
    which. It stays there until all members have finished the operation.
    """

    __slots__ = ("_slots", "_wide_bytes", "_wide_number")

    def __init__(self, rank: int, segments: Sequence[memoryview], borrow: Borrow | None = None) -> None:
        super().__init__(rank, segments, borrow)
        self._wide_bytes = min(wide_bytes(len(segment)) for segment in segments)
        self._slots = 0  # of the last wide operation, whose number is
        self._wide_number = -1

    def express(self, fingerprint: int, payload: Sequence[memoryview], length: int) -> int:
        """Begin the next operation with its only item: `payload`, one piece after another, or nothing.

        `length` is that of the payload of every member that has one. Returns the operation's number; -1 if we are too
        far ahead of another member, or of ourselves. Ends with `express_done`.
        """
        number = self._issued
        if length <= EXPRESS_BYTES:
            slots, ahead = 0, RECORDS
        else:
            slots = self._slots_for(length)
            ahead = slots if slots == self._slots else min(slots, number - self._wide_number)
        if number - self.finished >= ahead:  # we have to read our own payload, or others to begin what we have ended
            self._want(TURN)
            return -1
        if number - self._finished_seen >= ahead and not self._catch_up(number, ahead):
            return -1
        own = self._own
        RECORD.pack_into(own, RECORDS_AT + number % RECORDS * RECORD_STRIDE, number, fingerprint, self._next_item, 0)
        at = self._express_place(number, length)
        for piece in payload:
            own[at : at + len(piece)] = piece
            at += len(piece)
        if self._wanting:
            self._content(TURN)
        if slots:
            self._slots, self._wide_number = slots, number
        if self._open:
            self._open[number] = LaneOperation(number, fingerprint, self._next_item, 0, {})
        order()  # the record before its count
        self._issued = self._own_words[ISSUED] = number + 1
        return number

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
        others = self._others if needed is None else [one for one in self._others if one[0] in needed]
        for _, peer in others:
            if peer.issued <= number and not self._look_for(peer, number):
                return False
        order()  # the counts before the records
        at = number % RECORDS * RECORD_WORDS
        for _, peer in others:
            words = peer.record_words
            other = words[at + 1]
            if other != fingerprint or words[at] != number:
                if other == SKIPPED:
                    return False
                raise Differs(peer.index)
        return True

    def express_payload(self, number: int, member: int, length: int) -> memoryview:
        """The payload of `member` in operation `number`, which is ready."""
        peer = self._members[member]
        at = self._express_place(number, length)
        return (self._own if peer is None else peer.segment)[at : at + length]

    def express_done(self, number: int) -> None:
        """Operation `number` was read, or given up. Express operations end in their order."""
        operation = self._open.get(number)
        if operation is not None or number != self.finished:
            if operation is None:  # given up out of turn, and nothing was open when it began
                operation = self._open[number] = LaneOperation(number, 0, self._next_item, 0, {})
            self.end(operation)
            return
        for _, peer in self._others:
            if peer.issued <= number:  # given up before that member has begun it
                self._open[number] = LaneOperation(number, 0, self._next_item, 0, {})
                self.end(self._open[number])
                return
        for _, peer in self._others:
            peer.retired = number + 1
        order()  # read before we say so
        self.finished = self._own_words[FINISHED] = number + 1
        self.news = True
        if self._open:
            self.retire()

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
