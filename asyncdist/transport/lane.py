"""Lane: how the ranks of one host hand each other data in collectives, as a core. Nothing here waits or wakes anybody.

A lane belongs to one order of operations (a tag of a group). Each member owns one segment, which only it writes and all
others read. In its segment a member says which operations it has begun, puts out *items* (runs of bytes), and says
which items of the others it needs no more.

| in a segment | what |
| --- | --- |
| words, each on a cache line | issued: operations begun; published: items put out; finished: operations of which it
will look at nothing again; wanting: 1 while it waits for room; consumed[m]: items of member m that it needs no more |
| records, a ring of RECORDS | of an operation: its number, its fingerprint, its first item, how many items it has |
| descriptors, a ring of DESCRIPTORS | of an item: where it lies in the pool, and its length |
| the pool | the items' bytes, first in, first out |

Operations put their items out in the order in which they were begun, each in the order of its plan. So a number names
an item, one counter says which are there, and the pool is freed from its oldest end. An item is gone once every other
member has consumed it. Operations without items, or carried out otherwise, take their number all the same, with their
fingerprint: members whose operations of one number differ find out at once.

All of it is read from memory that the peers write, and is checked before it is used.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.fence import fence
from asyncdist.transport.item_pool import ItemPool

__all__ = [
    "LANE_HEAD_BYTES",
    "MAX_LANE_ITEMS",
    "MAX_LANE_RANKS",
    "SKIPPED",
    "Differs",
    "Lane",
    "LaneOperation",
    "Needs",
]

Needs: TypeAlias = dict[int, dict[int, int]]
"""By member, the items of it that an operation reads, in order, and how many times it reads each."""

SKIPPED: Final = 1 << 63
"""Fingerprint of an operation that a member was refused: why, the members hear otherwise, and give it up."""

MAX_LANE_RANKS: Final = 104
"""Members of a lane. More ranks share no host in practice, and everyone reads everyone's words."""
MAX_LANE_ITEMS: Final = 1 << 20
"""Items one operation may have: chunks of a megabyte make that a terabyte."""
RECORDS: Final = 64
"""Operations a member may be ahead of the slowest."""
DESCRIPTORS: Final = 1024
"""Items of a member that may be there at once."""

_ISSUED, _PUBLISHED, _FINISHED, _WANTING, _CONSUMED = 0, 8, 16, 24, 32
_WORDS_BYTES: Final = 64 * (4 + MAX_LANE_RANKS)
_RECORD: Final = struct.Struct("<QQQQ")
_DESCRIPTOR: Final = struct.Struct("<QQ")
_RECORDS_AT: Final = _WORDS_BYTES
_DESCRIPTORS_AT: Final = _RECORDS_AT + RECORDS * _RECORD.size
LANE_HEAD_BYTES: Final = -(-(_DESCRIPTORS_AT + DESCRIPTORS * _DESCRIPTOR.size) // 4096) * 4096
"""Bytes of a segment before its pool."""


class Differs(Exception):
    """A member runs another operation in this place of the order."""

    def __init__(self, member: int) -> None:
        super().__init__(member)
        self.member = member


class LaneOperation:
    """One operation on this member. `number` is its place in the order, `needs` what it still has to read."""

    __slots__ = ("ended", "fingerprint", "first", "item_count", "needs", "number", "published")

    def __init__(self, number: int, fingerprint: int, first: int, item_count: int, needs: Needs) -> None:
        self.number = number
        self.fingerprint = fingerprint
        self.first = first
        self.item_count = item_count
        self.needs = needs
        self.published = 0
        self.ended = False


class _Member:
    """Another member, as far as we have read what it says."""

    __slots__ = (
        "checked",
        "consumed",
        "index",
        "issued",
        "pool",
        "published",
        "records",
        "retired",
        "segment",
        "words",
    )

    def __init__(self, index: int, segment: memoryview) -> None:
        self.index = index
        self.segment = segment
        self.words = segment[:_WORDS_BYTES].cast("Q")
        self.pool = segment[LANE_HEAD_BYTES:]
        self.issued = 0
        self.checked = 0  # operations before this one run what we run
        self.published = 0
        self.retired = 0  # operations of which nothing of it is needed any more
        self.consumed = 0  # items of it that we need no more
        self.records: dict[int, tuple[int, int]] = {}  # by operation, once looked at: its first item and how many


class Lane:
    """One member's side. `segments` are all members' in the order of the group, our own writable, each LANE_HEAD_BYTES
    and a pool long. Every method raises RemoteProtocolError when a peer's memory says what cannot be.
    """

    __slots__ = (
        "_consumed_seen",
        "_issued",
        "_items",
        "_members",
        "_next_item",
        "_open",
        "_others",
        "_own",
        "_own_words",
        "_pool",
        "_published",
        "_queue",
        "_wanting",
        "finished",
        "rank",
    )

    def __init__(self, rank: int, segments: Sequence[memoryview]) -> None:
        if not 2 <= len(segments) <= MAX_LANE_RANKS:
            raise ValueError(f"a lane has 2 to {MAX_LANE_RANKS} members, not {len(segments)}")
        self.rank = rank
        self._own = segments[rank]
        self._own_words = self._own[:_WORDS_BYTES].cast("Q")
        self._pool = self._own[LANE_HEAD_BYTES:]
        self._members = [None if index == rank else _Member(index, segment) for index, segment in enumerate(segments)]
        self._others = [(index, member) for index, member in enumerate(self._members) if member is not None]
        self._issued = 0
        self._published = 0
        self._next_item = 0
        self._items = ItemPool(len(self._pool), DESCRIPTORS)
        self._queue: deque[LaneOperation] = deque()  # begun, in order, not all items published
        self._open: dict[int, LaneOperation] = {}  # begun, and somebody's part in it not retired
        self._wanting = False
        self._consumed_seen = 0
        self.finished = 0

    # -- operations

    def begin(self, fingerprint: int, item_count: int, needs: Needs) -> LaneOperation | None:
        """Begin the next operation; None if we are too far ahead of another member."""
        if self._issued - min(member.words[_FINISHED] for _, member in self._others) >= RECORDS:
            self._want()
            if self._issued - min(member.words[_FINISHED] for _, member in self._others) >= RECORDS:
                return None
        self._content()
        number = self._issued
        operation = LaneOperation(number, fingerprint, self._next_item, item_count, needs)
        _RECORD.pack_into(
            self._own,
            _RECORDS_AT + number % RECORDS * _RECORD.size,
            number,
            fingerprint,
            self._next_item,
            item_count,
        )
        self._next_item += item_count
        self._open[number] = operation
        if item_count:
            self._queue.append(operation)
        fence()  # the record before its count
        self._issued = self._own_words[_ISSUED] = number + 1
        return operation

    def publish(self, operation: LaneOperation, payload: memoryview) -> bool:
        """Put out the next item of `operation`; False if there is no room yet, or it is not its turn."""
        queue = self._queue
        if not queue or queue[0] is not operation:
            return False
        length = len(payload)
        at = self._place(length)
        if at < 0:
            return False
        self._content()
        self._pool[at : at + length] = payload
        number = self._published
        _DESCRIPTOR.pack_into(self._own, _DESCRIPTORS_AT + number % DESCRIPTORS * _DESCRIPTOR.size, at, length)
        self._items.add(number, at, length)
        fence()  # the bytes and where they are before their count
        self._published = self._own_words[_PUBLISHED] = number + 1
        operation.published += 1
        if operation.published == operation.item_count:
            queue.popleft()
        return True

    def available(self, operation: LaneOperation, member: int) -> int:
        """How many items of `member` in `operation` are there. Raises Differs if it runs something else."""
        peer = self._members[member]
        if peer is None:
            return operation.published
        found = self._record(peer, operation)
        if found is None:
            return 0
        first, count = found
        if peer.published < first + count:
            published = peer.words[_PUBLISHED]
            if published != peer.published:
                if not peer.published < published < 1 << 63:
                    raise RemoteProtocolError(f"member {member} of a lane put out {published} items")
                fence()  # the count before what it counts
                peer.published = published
        return min(max(peer.published - first, 0), count)

    def item(self, operation: LaneOperation, member: int, item: int) -> memoryview:
        """Item number `item` of `member` in `operation`, which is available. To be read before `consumed` is called."""
        peer = self._members[member]
        if peer is None:
            first, segment, pool = operation.first, self._own, self._pool
        else:
            first, segment, pool = peer.records[operation.number][0], peer.segment, peer.pool
        at, size = _DESCRIPTOR.unpack_from(segment, _DESCRIPTORS_AT + (first + item) % DESCRIPTORS * _DESCRIPTOR.size)
        if size > len(pool) or at > len(pool) - size:
            raise RemoteProtocolError(f"member {member} of a lane has {size} bytes at {at}, outside of its pool")
        view: memoryview = pool[at : at + size]
        return view

    def consumed(self, operation: LaneOperation, member: int, item: int) -> None:
        """An item of `member` was read, for one of the times it is needed."""
        peer = self._members[member]
        if peer is None:
            return
        needs = operation.needs[member]
        left = needs[item] - 1
        if left:
            needs[item] = left
            return
        del needs[item]
        if peer.retired == operation.number:
            first, count = peer.records[operation.number]
            self._consume(peer, first + next(iter(needs), count))

    def end(self, operation: LaneOperation) -> None:
        """Everything that `operation` needed was read, or it was given up; items not put out yet never will be."""
        operation.ended = True
        self._skip_given_up()
        self.retire()

    def _skip_given_up(self) -> None:
        queue = self._queue
        while queue and queue[0].ended:
            operation = queue.popleft()
            number, end = operation.first + operation.item_count, self._published
            for missing in range(max(end, number - DESCRIPTORS), number):
                _DESCRIPTOR.pack_into(self._own, _DESCRIPTORS_AT + missing % DESCRIPTORS * _DESCRIPTOR.size, 0, 0)
            fence()
            self._published = self._own_words[_PUBLISHED] = number

    def retire(self) -> None:
        """Tell the others what is needed no more; to be called whenever one of them has begun something."""
        for index, peer in self._others:
            while (operation := self._open.get(peer.retired)) is not None:
                found = self._look_up(peer, operation.number)
                if found is None:
                    break
                first, count = found
                if not operation.ended:
                    self._consume(peer, first + next(iter(operation.needs.get(index, ())), count))
                    break
                self._consume(peer, first + count)
                del peer.records[operation.number]
                peer.retired += 1
        oldest = min(peer.retired for _, peer in self._others)
        if oldest > self.finished:
            for number in range(self.finished, oldest):
                del self._open[number]
            fence()  # read before we say so
            self.finished = self._own_words[_FINISHED] = oldest

    def slowest(self) -> list[int]:
        """Members that have consumed the least of our items, if any are left."""
        consumed = {index: peer.words[_CONSUMED + 8 * self.rank] for index, peer in self._others}
        least = min(consumed.values())
        return [index for index, count in consumed.items() if count == least < self._published]

    def wanted_by(self) -> list[int]:
        """Members that wait for room, or for us to catch up."""
        fence()
        return [index for index, peer in self._others if peer.words[_WANTING]]

    # -- inside

    def _record(self, peer: _Member, operation: LaneOperation) -> tuple[int, int] | None:
        """First item and number of items of `peer` in `operation`; None if it has not begun it, or skips it."""
        known = peer.records.get(operation.number)
        if known is not None and peer.checked > operation.number:
            return known
        found = self._look_up(peer, operation.number)
        if found is None:
            return None
        at = _RECORDS_AT + operation.number % RECORDS * _RECORD.size
        fingerprint = _RECORD.unpack_from(peer.segment, at)[1]
        if fingerprint == SKIPPED:
            return None
        if fingerprint != operation.fingerprint:
            raise Differs(peer.index)
        peer.checked = operation.number + 1
        return found

    def _look_up(self, peer: _Member, number: int) -> tuple[int, int] | None:
        """First item and number of items of `peer` in operation `number`; None if it has not begun it."""
        found = peer.records.get(number)
        if found is not None:
            return found
        if number >= peer.issued:
            issued = peer.words[_ISSUED]
            if issued == peer.issued:
                return None
            if not peer.issued < issued <= self._issued + RECORDS:
                raise RemoteProtocolError(f"member {peer.index} of a lane has begun {issued} operations")
            fence()  # the count before the record
            peer.issued = issued
            if number >= issued:
                return None
        at = _RECORDS_AT + number % RECORDS * _RECORD.size
        theirs, _fingerprint, first, count = _RECORD.unpack_from(peer.segment, at)
        if theirs != number or count > MAX_LANE_ITEMS or first >= 1 << 62:
            raise RemoteProtocolError(
                f"member {peer.index} of a lane describes operation {theirs} in place of {number}"
            )
        peer.records[number] = first, count
        return first, count

    def _consume(self, peer: _Member, upto: int) -> None:
        if upto > peer.consumed:
            peer.consumed = upto
            fence()  # read before we say so
            self._own_words[_CONSUMED + 8 * peer.index] = upto

    def _place(self, length: int) -> int:
        """Where in the pool `length` bytes fit now; -1 if nowhere."""
        pool = self._items
        if length > pool.size:
            raise ValueError(f"an item of {length} bytes does not fit a pool of {pool.size}")
        if len(pool):
            self._free()
        at = pool.place(length)
        if at >= 0:
            return at
        self._want()
        self._free()
        return pool.place(length)

    def _free(self) -> None:
        """Free the items that every other member has consumed, or will not need."""
        consumed = min(peer.words[_CONSUMED + 8 * self.rank] for _, peer in self._others)
        if not self._consumed_seen <= consumed <= self._next_item:
            raise RemoteProtocolError(f"a member of a lane consumed {consumed} items of {self._next_item}")
        self._consumed_seen = consumed
        self._items.free(consumed)

    def _want(self) -> None:
        """From now on the others say when they have consumed or finished something."""
        if not self._wanting:
            self._wanting = True
            self._own_words[_WANTING] = 1
        fence()  # before looking once more

    def _content(self) -> None:
        """What we waited for has come: nobody need say more."""
        if self._wanting:
            self._wanting = False
            self._own_words[_WANTING] = 0
