"""Lane: a LendingLane, and beside it the express way for operations so small that their payload fits their record.

Nothing here waits or wakes anybody.
"""

from __future__ import annotations

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
    RECORDS,
    RECORDS_AT,
    SKIPPED,
    WIDE,
    WIDE_AT,
    WIDE_BYTES,
    Differs,
    LaneFault,
    LaneOperation,
    Needs,
)
from asyncdist.transport.lending_lane import LendingLane

__all__ = ["LANE_HEAD_BYTES", "MAX_LANE_RANKS", "SKIPPED", "Differs", "Lane", "LaneFault", "LaneOperation", "Needs"]


class Lane(LendingLane):
    """See ItemLane. Express operations share its order: every member begins all of them, and ends them in turn."""

    __slots__ = ()

    def express(self, fingerprint: int, payload: memoryview) -> int:
        """Begin the next operation with its only item, WIDE_BYTES at most, in a place that its number gives it.

        Returns its number; -1 if we are too far ahead of another member, or of ourselves. Ends with `express_done`.
        """
        number, length = self._issued, len(payload)
        ahead = RECORDS if length <= EXPRESS_BYTES else WIDE
        if number - self.finished >= ahead:  # we still have to read our own payload
            return -1
        if number - self._finished_seen >= ahead and not self._catch_up(number, ahead):
            return -1
        own = self._own
        RECORD.pack_into(own, RECORDS_AT + number % RECORDS * RECORD_STRIDE, number, fingerprint, self._next_item, 0)
        if length:
            at = _express_place(number, length)
            own[at : at + length] = payload
        if self._open:
            self._open[number] = LaneOperation(number, fingerprint, self._next_item, 0, {})
        order()  # the record before its count
        self._issued = self._own_words[ISSUED] = number + 1
        return number

    def express_begun(self, number: int) -> bool:
        """Whether all members have begun operation `number`, which we have begun before this call. Fences."""
        fence()  # our count before the others': of all who look, the last sees everyone
        for _, peer in self._others:  # noqa: SIM110 - a generator would cost as much as all of this
            if peer.issued <= number and not self._look_for(peer, number):
                return False
        return True

    def express_ready(self, number: int, fingerprint: int) -> bool:
        """Whether all members have begun operation `number`. Raises Differs if one runs something else there."""
        for _, peer in self._others:
            if peer.issued <= number and not self._look_for(peer, number):
                return False
        order()  # the counts before the records
        at = RECORDS_AT + number % RECORDS * RECORD_STRIDE
        for _, peer in self._others:
            theirs, other, _first, _count = RECORD.unpack_from(peer.segment, at)
            if other != fingerprint or theirs != number:
                if other == SKIPPED:
                    return False
                raise Differs(peer.index)
        return True

    def express_payload(self, number: int, member: int, length: int) -> memoryview:
        """The payload of `member` in operation `number`, which is ready."""
        peer = self._members[member]
        at = _express_place(number, length)
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


def _express_place(number: int, length: int) -> int:
    """Where the payload of an express operation is in every segment."""
    if length <= EXPRESS_BYTES:
        return RECORDS_AT + number % RECORDS * RECORD_STRIDE + EXPRESS_AT
    return WIDE_AT + number % WIDE * WIDE_BYTES
