"""Lane: a LendingLane, and beside it the express way for operations so small that their payload fits their record.

Nothing here waits or wakes anybody.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.transport.fence import fence, order
from asyncdist.transport.item_pool import ItemPool
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

    A payload of EXPRESS_BYTES lies in the record itself. A wide one lies where the record says, in memory for those: it
    stays there until all members have finished the operation.
    """

    __slots__ = ("_wide", "_wide_pool")

    def __init__(self, rank: int, segments: Sequence[memoryview], borrow: Borrow | None = None) -> None:
        super().__init__(rank, segments, borrow)
        self._wide = self._own[LANE_HEAD_BYTES : LANE_HEAD_BYTES + wide_bytes(len(self._own))]
        self._wide_pool = ItemPool(len(self._wide), RECORDS, narrow=True)

    def express(self, fingerprint: int, payload: Sequence[memoryview], length: int) -> int:
        """Begin the next operation with its only item: the `length` bytes of `payload`, one piece after another.

        Returns its number; -1 if we are too far ahead of another member, or of ourselves. Ends with `express_done`.
        """
        number = self._issued
        if number - self.finished >= RECORDS:  # we still have to read our own payload
            return -1
        if number - self._finished_seen >= RECORDS and not self._catch_up(number):
            return -1
        record = RECORDS_AT + number % RECORDS * RECORD_STRIDE
        if length <= EXPRESS_BYTES:
            memory, at = self._own, record + EXPRESS_AT
        else:
            memory, at = self._wide, self._wide_place(number, length)
            if at < 0:
                return -1
        RECORD.pack_into(self._own, record, number, fingerprint, self._next_item, 0, at)
        for piece in payload:
            end = at + len(piece)
            memory[at:end] = piece
            at = end
        if self._open:
            self._open[number] = LaneOperation(number, fingerprint, self._next_item, 0, {})
        order()  # the record before its count
        self._issued = self._own_words[ISSUED] = number + 1
        return number

    def _wide_place(self, number: int, length: int) -> int:
        """Where a wide payload fits now; -1 if nowhere, until others have finished more."""
        pool = self._wide_pool
        if length > pool.size:
            raise ValueError(f"a payload of {length} bytes does not fit memory of {pool.size}")
        for _ in range(2):
            if pool.items:
                self._look_who_finished(number)
                pool.free(min(self._finished_seen, self.finished))
            at = pool.place(length)
            if at >= 0:
                self._content(TURN)
                pool.add(number, at, length)
                return at
            self._want(TURN)
        return -1

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
            theirs, other, _first, _count, _place = RECORD.unpack_from(peer.segment, at)
            if other != fingerprint or theirs != number:
                if other == SKIPPED:
                    return False
                raise Differs(peer.index)
        return True

    def express_payload(self, number: int, member: int, length: int) -> memoryview:
        """The payload of `member` in operation `number`, which is ready."""
        peer = self._members[member]
        segment, wide = (self._own, self._wide) if peer is None else (peer.segment, peer.wide)
        record = RECORDS_AT + number % RECORDS * RECORD_STRIDE
        if length <= EXPRESS_BYTES:
            return segment[record + EXPRESS_AT : record + EXPRESS_AT + length]
        at = RECORD.unpack_from(segment, record)[4]
        if at + length > len(wide):
            raise LaneFault(member, f"a payload of {length} bytes lies at {at} of {len(wide)}")
        return wide[at : at + length]

    def express_places(self, number: int) -> tuple[int, ...]:
        """Where each member's payload in operation `number`, which is ready, is said to lie."""
        record = RECORDS_AT + number % RECORDS * RECORD_STRIDE
        own, unpack = self._own, RECORD.unpack_from
        return tuple([unpack(own if peer is None else peer.segment, record)[4] for peer in self._members])

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
