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
from typing import Final

from asyncdist.errors import CollectiveMismatchError, RemoteProtocolError
from asyncdist.transport.fence import fence

__all__ = ["LANE_HEAD_BYTES", "MAX_LANE_ITEMS", "MAX_LANE_RANKS", "Lane", "LaneOperation"]

MAX_LANE_RANKS: Final = 104
"""Members of a lane. More ranks share no host in practice, and everyone reads everyone's words."""
MAX_LANE_ITEMS: Final = 1 << 20
"""Items one operation may have: chunks of a megabyte make that a terabyte."""
RECORDS: Final = 64
"""Operations a member may be ahead of the slowest."""
DESCRIPTORS: Final = 1024
"""Items of a member that may be there at once."""
ALIGNMENT: Final = 64
"""Items begin at cache lines, which suits every dtype."""

_ISSUED, _PUBLISHED, _FINISHED, _WANTING, _CONSUMED = 0, 8, 16, 24, 32
_WORDS_BYTES: Final = 64 * (4 + MAX_LANE_RANKS)
_RECORD: Final = struct.Struct("<QQQQ")
_DESCRIPTOR: Final = struct.Struct("<QQ")
_RECORDS_AT: Final = _WORDS_BYTES
_DESCRIPTORS_AT: Final = _RECORDS_AT + RECORDS * _RECORD.size
LANE_HEAD_BYTES: Final = -(-(_DESCRIPTORS_AT + DESCRIPTORS * _DESCRIPTOR.size) // 4096) * 4096
"""Bytes of a segment before its pool."""


class LaneOperation:
    """One operation on this member. `number` is its place in the order, `needs[m]` the items of member m to be read."""

    __slots__ = ("ended", "fingerprint", "first", "item_count", "needs", "number", "published")

    def __init__(
        self, number: int, fingerprint: int, first: int, item_count: int, needs: dict[int, deque[int]]
    ) -> None:
        self.number = number
        self.fingerprint = fingerprint
        self.first = first
        self.item_count = item_count
        self.needs = needs
        self.published = 0
        self.ended = False


class _Member:
    """Another member, as far as we have read what it says."""

    __slots__ = ("consumed", "index", "issued", "pool", "published", "records", "retired", "segment", "words")

    def __init__(self, index: int, segment: memoryview) -> None:
        self.index = index
        self.segment = segment
        self.words = segment[:_WORDS_BYTES].cast("Q")
        self.pool = segment[LANE_HEAD_BYTES:]
        self.issued = 0
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
        "_tail",
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
        self._items: deque[tuple[int, int]] = deque()  # number and end in the pool of items that are still there
        self._tail = 0
        self._queue: deque[LaneOperation] = deque()  # begun, in order, not all items published
        self._open: dict[int, LaneOperation] = {}  # begun, and somebody's part in it not retired
        self._wanting = False
        self._consumed_seen = 0
        self.finished = 0

    # -- operations

    def begin(self, fingerprint: int, item_count: int, needs: dict[int, deque[int]]) -> LaneOperation | None:
        """Begin the next operation; None if we are too far ahead of another member."""
        if self._issued - min(member.words[_FINISHED] for _, member in self._others) >= RECORDS:
            self._want()
            if self._issued - min(member.words[_FINISHED] for _, member in self._others) >= RECORDS:
                return None
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
        at = self._room(length)
        if at < 0:
            return False
        end = at + length
        self._pool[at:end] = payload
        number = self._published
        _DESCRIPTOR.pack_into(self._own, _DESCRIPTORS_AT + number % DESCRIPTORS * _DESCRIPTOR.size, at, length)
        self._items.append((number, end))
        self._tail = -(-end // ALIGNMENT) * ALIGNMENT
        fence()  # the bytes and where they are before their count
        self._published = self._own_words[_PUBLISHED] = number + 1
        operation.published += 1
        if operation.published == operation.item_count:
            queue.popleft()
        return True

    def item(self, operation: LaneOperation, member: int, item: int) -> memoryview | None:
        """Item number `item` of `member` in `operation`; None if it is not there yet.

        Raises CollectiveMismatchError if that member runs something else in this place. The view is to be read before
        `consumed` says that it was.
        """
        peer = self._members[member]
        if peer is None:
            first, count = operation.first, operation.item_count
            if item >= operation.published:
                return None
            segment, pool = self._own, self._pool
        else:
            found = self._record(peer, operation, member)
            if found is None:
                return None
            first, count = found
            number = first + item
            if number >= peer.published:
                published = peer.words[_PUBLISHED]
                if not peer.published <= published <= first + MAX_LANE_ITEMS + DESCRIPTORS:
                    raise RemoteProtocolError(f"member {member} of a lane has published {published} items")
                peer.published = published
                if number >= published:
                    return None
                fence()  # the count before what it counts
            segment, pool = peer.segment, peer.pool
        if item >= count:
            raise RemoteProtocolError(f"member {member} of a lane has {count} items in this operation, not {item + 1}")
        at, size = _DESCRIPTOR.unpack_from(segment, _DESCRIPTORS_AT + (first + item) % DESCRIPTORS * _DESCRIPTOR.size)
        if size > len(pool) or at > len(pool) - size:
            raise RemoteProtocolError(f"member {member} of a lane has {size} bytes at {at}, outside of its pool")
        view: memoryview = pool[at : at + size]
        return view

    def consumed(self, operation: LaneOperation, member: int) -> None:
        """The item of `member` that was needed next has been read, for the last time."""
        needs = operation.needs[member]
        needs.popleft()
        peer = self._members[member]
        if peer is not None and peer.retired == operation.number:
            first, count = peer.records[operation.number]
            self._consume(peer, first + (needs[0] if needs else count))

    def check(self, operation: LaneOperation) -> None:
        """Raise CollectiveMismatchError if a member is known to run something else in this place."""
        for index, peer in self._others:
            self._record(peer, operation, index)

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
                found = self._record(peer, operation, index, check=False)
                if found is None:
                    break
                first, count = found
                if not operation.ended:
                    needs = operation.needs.get(index)
                    self._consume(peer, first + (needs[0] if needs else count))
                    break
                self._consume(peer, first + count)
                peer.records.pop(operation.number, None)
                peer.retired += 1
        oldest = min(peer.retired for _, peer in self._others)
        if oldest > self.finished:
            for number in range(self.finished, oldest):
                del self._open[number]
            fence()  # read before we say so
            self.finished = self._own_words[_FINISHED] = oldest

    def wanted_by(self) -> list[int]:
        """Members that wait for room, or for us to catch up."""
        fence()
        return [index for index, peer in self._others if peer.words[_WANTING]]

    # -- inside

    def _record(
        self, peer: _Member, operation: LaneOperation, member: int, *, check: bool = True
    ) -> tuple[int, int] | None:
        """First item and number of items of `peer` in `operation`; None if it has not begun it."""
        number = operation.number
        found = peer.records.get(number)
        if found is not None:
            return found
        if number >= peer.issued:
            issued = peer.words[_ISSUED]
            if not peer.issued <= issued <= self._issued + RECORDS:
                raise RemoteProtocolError(f"member {member} of a lane has begun {issued} operations, we {self._issued}")
            peer.issued = issued
            if number >= issued:
                return None
            fence()  # the count before the record
        at = _RECORDS_AT + number % RECORDS * _RECORD.size
        theirs, fingerprint, first, count = _RECORD.unpack_from(peer.segment, at)
        if theirs != number or count > MAX_LANE_ITEMS or first >= 1 << 63:
            raise RemoteProtocolError(f"member {member} of a lane describes operation {theirs} in place of {number}")
        if check and fingerprint != operation.fingerprint:
            raise CollectiveMismatchError(
                f"member {member} runs something else in this place of the order: another collective, reduction, "
                "dtype, root, size or algorithm"
            )
        peer.records[number] = first, count
        return first, count

    def _consume(self, peer: _Member, upto: int) -> None:
        if upto > peer.consumed:
            peer.consumed = upto
            fence()  # read before we say so
            self._own_words[_CONSUMED + 8 * peer.index] = upto

    def _room(self, length: int) -> int:
        """Where in the pool `length` bytes fit now; -1 if nowhere."""
        size = len(self._pool)
        if length > size:
            raise ValueError(f"an item of {length} bytes does not fit a pool of {size}")
        at = self._fit(length, size)
        if at >= 0:
            return at
        self._free()
        at = self._fit(length, size)
        if at >= 0:
            return at
        self._want()
        self._free()
        return self._fit(length, size)

    def _fit(self, length: int, size: int) -> int:
        items = self._items
        if not items:
            self._tail = 0
            return 0
        if len(items) >= DESCRIPTORS:
            return -1
        oldest = self._start_of_oldest()
        tail = self._tail
        if tail > oldest:  # free: from the tail to the end, and from the beginning to the oldest
            if tail + length <= size:
                return tail
            return 0 if length < oldest else -1
        return tail if tail + length < oldest else -1

    def _start_of_oldest(self) -> int:
        number = self._items[0][0]
        at: int = _DESCRIPTOR.unpack_from(self._own, _DESCRIPTORS_AT + number % DESCRIPTORS * _DESCRIPTOR.size)[0]
        return at

    def _free(self) -> None:
        """Drop the items that every other member has consumed, or will not need."""
        consumed = min(peer.words[_CONSUMED + 8 * self.rank] for _, peer in self._others)
        if not self._consumed_seen <= consumed <= self._next_item:
            raise RemoteProtocolError(f"a member of a lane consumed {consumed} items of {self._next_item}")
        self._consumed_seen = consumed
        items = self._items
        while items and items[0][0] < consumed:
            items.popleft()

    def _want(self) -> None:
        """From now on the others say when they have consumed or finished something."""
        if not self._wanting:
            self._wanting = True
            self._own_words[_WANTING] = 1
        fence()  # before looking once more

    def content(self) -> None:
        """What we waited for has come: nobody need say more."""
        if self._wanting:
            self._wanting = False
            self._own_words[_WANTING] = 0
