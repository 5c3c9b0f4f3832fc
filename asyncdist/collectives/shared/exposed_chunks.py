"""LendingLane: an ItemLane whose items may also lie in other segments of a member than its lane's, where they are lent.

The descriptor of a lent item names that segment. Its memory must not change until every member has consumed it: an
operation with lent items has not ended before (`returned`). If it is given up all the same, its lent items are revoked:
their descriptors change before their memory may, so that whoever has copied from one looks once more (`intact`), and
takes what was copied for nothing if the descriptor is another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from asyncdist.collectives.shared.chunks import ItemLane
from asyncdist.collectives.shared.layout import (
    ABSENT,
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    DESCRIPTORS,
    DESCRIPTORS_AT,
    LENGTH_WORD,
    ROOM,
    SEGMENT_WORD,
    LaneFault,
    LaneOperation,
)
from asyncdist.transport.shared_memory.fence import order
from asyncdist.transport.shared_memory.process_memory import RemoteBytes

__all__ = ["Borrow", "LendingLane"]

Borrow: TypeAlias = Callable[[int, int, int, int], memoryview | RemoteBytes | None]
"""borrow(member, segment, offset, length): memory of a member; None if it is gone. Raises LaneFault."""


class LendingLane(ItemLane):
    """See the module. Without `borrow` nobody may lend."""

    __slots__ = ("_awaited", "_borrow", "borrowed")

    def __init__(self, rank: int, segments: Sequence[memoryview], borrow: Borrow | None = None) -> None:
        super().__init__(rank, segments)
        self._borrow = borrow
        self._awaited = 0
        self.borrowed = False
        """Whether the last `item` was a lent one; to be reset by the caller."""

    def lend(self, operation: LaneOperation, segment: int, offset: int, length: int) -> bool:
        """Put out the next item of `operation` where it is; False if there is no room yet, or it is not its turn."""
        if not self._may_describe(operation):
            return False
        operation.lent = self._published + 1
        self._describe(operation, offset, length, segment)
        return True

    def returned(self, operation: LaneOperation) -> bool:
        """Whether all lent items of `operation` were consumed; if not, the others say when they consume more."""
        self._free()
        if self._consumed_seen < operation.lent:
            self._awaited = max(self._awaited, operation.lent)
            self._want(ROOM)
            self._free()
        return bool(self._consumed_seen >= operation.lent)

    def intact(self, operation: LaneOperation, member: int, item: int) -> bool:
        """Whether a lent item that was read is still lent: else what was read may be anything."""
        peer = self._members[member]
        assert peer is not None
        number = operation.begun[member][0] + item
        order()  # its bytes before this look
        at = DESCRIPTORS_AT + number % DESCRIPTORS * DESCRIPTOR_BYTES
        found, _offset, size, _segment = DESCRIPTOR.unpack_from(peer.segment, at)
        still: bool = found == number and size != ABSENT
        return still

    def end(self, operation: LaneOperation) -> None:
        """See ItemLane; what is still lent is revoked."""
        if operation.lent:
            self._revoke(operation)
        super().end(operation)

    def revoke_all(self) -> None:
        """Take back what is lent, before the lane is closed."""
        for operation in self.open.values():
            if operation.lent and not operation.ended:
                self._revoke(operation)

    def _revoke(self, operation: LaneOperation) -> None:
        with suppress(LaneFault):  # what one member says of itself is no reason to leave the others what is lent
            self._free()
        for number in range(max(operation.first, self._consumed_seen), operation.lent):
            at = DESCRIPTORS_AT + number % DESCRIPTORS * DESCRIPTOR_BYTES
            words = self._own[at : at + DESCRIPTOR_BYTES].cast("Q")
            if words[SEGMENT_WORD]:  # or comes by message, for which nobody need ask any more
                # This word alone, as others may be looking: with no segment, it would be an item of the pool.
                words[LENGTH_WORD] = ABSENT
        order()  # before anything is written to what was lent

    def _lent_item(self, member: int, segment: int, offset: int, length: int) -> memoryview | RemoteBytes | None:
        if self._borrow is None:
            raise LaneFault(member, f"an item lies in segment {segment}")
        self.borrowed = True
        return self._borrow(member, segment, offset, length)

    def _content(self, what: int) -> None:
        if what != ROOM or self._consumed_seen >= self._awaited:
            super()._content(what)
