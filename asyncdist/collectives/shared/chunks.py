"""ItemLane: how the ranks of one host hand each other data in collectives, a core: it neither waits nor wakes anybody.

A lane belongs to one order of operations (a tag of a group). Each member owns one segment, which only it writes and all
others read. In its segment a member says which operations it has begun, puts out *items* (runs of bytes), and says
which items of the others it needs no more.

| in a segment | what |
| --- | --- |
| words, each on a cache line | issued: operations begun; published: items put out; finished: operations of which it
will look at nothing again; wanting: what it waits for; consumed[m]: items of member m that it needs no more |
| records, a ring of RECORDS | of an operation: its number, its fingerprint, its first item, how many items it has; of
one that needs no items its payload's length, whether results are there (see Lane), and that payload, if it is short |
| slots | longer payloads (see Lane) |
| descriptors, a ring of DESCRIPTORS | of an item: its number, where it lies, its length, and in which segment: 0 is
the pool, others are of arrays (see LendingLane), TRAVELS says that the item comes by message |
| the pool | the items' bytes, first in, first out |

Operations put their items out in the order in which they were begun, each in the order of its plan. So a number names
an item, one counter says which are there, and the pool is freed from its oldest end. An item is gone once every other
member has consumed it. Operations without items, or carried out otherwise, take their number all the same, with their
fingerprint: members whose operations of one number differ find out at once.

An operation that is given up, because a member was refused it, puts out the rest of its items as absent ones.

All of it is read from memory that the peers write, and is checked before it is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from asyncdist.collectives.shared.layout import (
    ABSENT,
    CONSUMED,
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    DESCRIPTORS,
    DESCRIPTORS_AT,
    ISSUED,
    LANE_HEAD_BYTES,
    MAX_LANE_ITEMS,
    PAYLOAD,
    PUBLISHED,
    RECORD,
    RECORD_STRIDE,
    RECORD_WORDS,
    RECORDS,
    RECORDS_AT,
    ROOM,
    TRAVELS,
    LaneFault,
    LaneOperation,
    Member,
    Needs,
    Travelling,
    wide_bytes,
)
from asyncdist.collectives.shared.pool import ItemPool
from asyncdist.collectives.shared.turns import LaneOrder
from asyncdist.transport.shared_memory.fence import fence, order
from asyncdist.transport.shared_memory.process_memory import RemoteBytes

__all__ = ["ItemLane"]


class ItemLane(LaneOrder):
    """One member's side; see LaneOrder for its arguments. Every method raises LaneFault when a peer's memory says what
    cannot be.
    """

    __slots__ = ("_consumed_seen", "_items", "_pool", "_published", "_queue")

    def __init__(self, rank: int, segments: Sequence[memoryview]) -> None:
        super().__init__(rank, segments)
        self._pool = self._own[LANE_HEAD_BYTES + wide_bytes(len(self._own)) :]
        self._published = 0
        self._items = ItemPool(len(self._pool), DESCRIPTORS)
        self._queue: deque[LaneOperation] = deque()  # begun, in order, not all items published
        self._consumed_seen = 0

    # -- operations

    def begin(self, fingerprint: int, item_count: int, needs: Needs) -> LaneOperation | None:
        """Begin the next operation; None if we are too far ahead of another member."""
        number = self.issued
        if number - self._finished_seen >= RECORDS and not self._catch_up(number):
            return None
        operation = LaneOperation(number, fingerprint, self._next_item, item_count, needs)
        RECORD.pack_into(
            self._own,
            RECORDS_AT + number % RECORDS * RECORD_STRIDE,
            number,
            fingerprint,
            self._next_item,
            item_count,
            0,
        )
        self._next_item += item_count
        self._add(operation)
        if item_count:
            self._queue.append(operation)
        order()  # the record before its count
        self.issued = self._own_words[ISSUED] = number + 1
        fence()  # our count before we look for records of the others, who knock only if they see that all have begun
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
        if self._wanting:
            self._content(ROOM)
        self._pool[at : at + length] = payload
        self._items.add(self._published, at, length)
        self._describe(operation, at, length)
        return True

    def available(self, operation: LaneOperation, member: int) -> int:
        """How many items of `member` in `operation` are there. Raises Differs if it runs something else."""
        peer = self._members[member]
        if peer is None:
            return operation.published
        known = operation.begun.get(member)
        if known is None:
            known = self._begun(peer, operation)
            if known is None:
                return 0
            if known[0] == known[1] and peer.record_words[operation.number % RECORDS * RECORD_WORDS + PAYLOAD]:
                operation.in_record.add(member)
        if member in operation.in_record:
            return MAX_LANE_ITEMS
        first, end = known
        if peer.published < end:
            published = peer.words[PUBLISHED]
            if published != peer.published:
                if not peer.published < published < 1 << 63:
                    raise LaneFault(member, f"{published} items were put out after {peer.published}")
                order()  # the count before what it counts
                peer.published = published
            if published < end:
                return published - first if published > first else 0
        return end - first

    def travels(self, operation: LaneOperation, length: int) -> bool:
        """Put out as the next item of `operation` that it comes by message; False as in `publish`."""
        if not self._may_describe(operation):
            return False
        self._describe(operation, 0, length, TRAVELS)
        return True

    def item(self, operation: LaneOperation, member: int, item: int) -> memoryview | RemoteBytes | Travelling | None:
        """Item number `item` of `member` in `operation`, which is available; None if that member has given it up.

        To be read before `consumed` is called.
        """
        peer = self._members[member]
        if member in operation.in_record:
            return self.piece(operation.number, member, item)
        if peer is None:
            first, segment, pool = operation.first, self._own, self._pool
        else:
            first, segment, pool = operation.begun[member][0], peer.segment, peer.pool
        number = first + item
        place = DESCRIPTORS_AT + number % DESCRIPTORS * DESCRIPTOR_BYTES
        found, at, size, lent = DESCRIPTOR.unpack_from(segment, place)
        if found != number:
            raise LaneFault(member, f"item {found} is described in place of {number}")
        if size == ABSENT:
            return None
        if lent == TRAVELS:
            return Travelling(size)
        if lent:
            return self._lent_item(member, lent, at, size)
        if size > len(pool) or at > len(pool) - size:
            raise LaneFault(member, f"an item has {size} bytes at {at}, outside of the pool")
        view: memoryview = pool[at : at + size]
        return view

    def consumed(self, operation: LaneOperation, member: int, item: int) -> None:
        """An item of `member` was read, for one of the times it is needed."""
        needs = operation.needs[member]
        left = needs[item] - 1
        if left:
            needs[item] = left
            return
        del needs[item]
        peer = self._members[member]
        if peer is not None and peer.retired == operation.number:
            first, end = operation.begun[member]
            upto = first + next(iter(needs)) if needs else end
            self._consume(peer, upto if upto < end else end)

    def end(self, operation: LaneOperation) -> None:
        """Everything that `operation` needed was read, or it was given up; items not put out yet never will be."""
        operation.ended = True
        for _, peer in self._others:
            peer.settled = False
        self._skip_given_up()
        self.retire()

    def _skip_given_up(self) -> None:
        queue = self._queue
        while queue and queue[0].ended:
            end = queue[0].first + queue[0].item_count
            self._free()
            if end - self._consumed_seen > DESCRIPTORS:
                self._want(ROOM)
                self._free()
            room = self._consumed_seen + DESCRIPTORS  # descriptors before it may be in use
            upto = min(end, room)
            for missing in range(max(self._published, self._consumed_seen), upto):
                at = DESCRIPTORS_AT + missing % DESCRIPTORS * DESCRIPTOR_BYTES
                DESCRIPTOR.pack_into(self._own, at, missing, 0, ABSENT, 0)
            order()
            self._published = self._own_words[PUBLISHED] = max(upto, self._published)
            if upto < end:
                return
            queue.popleft()

    def retire(self) -> None:
        """Tell the others what is needed no more; to be called whenever one of them has begun something."""
        if self._queue and self._queue[0].ended:
            self._skip_given_up()
        retired = False
        for index, peer in self._others:
            while not peer.settled and (operation := self.open.get(peer.retired)) is not None:
                found = self._look_up(peer, operation.number)
                if found is None:
                    break
                first, count = found
                if not operation.ended:
                    self._consume(peer, first + min(next(iter(operation.needs.get(index, ())), count), count))
                    peer.settled = True
                    break
                self._consume(peer, first + count)
                del peer.records[operation.number]
                peer.retired += 1
                retired = True
        if retired:
            self._finish()

    # -- inside

    def _may_describe(self, operation: LaneOperation) -> bool:
        """Whether it is the turn of `operation`, and there is room to describe an item that is not in the pool."""
        queue, number = self._queue, self._published
        if not queue or queue[0] is not operation:
            return False
        if number - self._consumed_seen >= DESCRIPTORS:
            self._want(ROOM)
            self._free()
            if number - self._consumed_seen >= DESCRIPTORS:
                return False
        self._content(ROOM)
        return True

    def _describe(self, operation: LaneOperation, at: int, length: int, segment: int = 0) -> None:
        """Put out the next item of `operation`, the first of the queue: it is there."""
        number = self._published
        place = DESCRIPTORS_AT + number % DESCRIPTORS * DESCRIPTOR_BYTES
        DESCRIPTOR.pack_into(self._own, place, number, at, length, segment)
        order()  # the bytes and where they are before their count
        self._published = self._own_words[PUBLISHED] = number + 1
        operation.published += 1
        if operation.published == operation.item_count:
            self._queue.popleft()
            self._skip_given_up()

    def piece(self, number: int, member: int, item: int) -> memoryview:
        """What `member` would have put out as that item of operation `number`, and has in its record's payload."""
        raise NotImplementedError

    def _lent_item(self, member: int, segment: int, offset: int, length: int) -> memoryview | RemoteBytes | None:
        raise NotImplementedError

    def _consume(self, peer: Member, upto: int) -> None:
        if upto > peer.consumed:
            peer.consumed = upto
            order()  # read before we say so
            self._own_words[CONSUMED + 8 * peer.index] = upto
            self.news = True

    def _place(self, length: int) -> int:
        """Where in the pool `length` bytes fit now; -1 if nowhere."""
        pool = self._items
        if length > pool.size:
            raise ValueError(f"an item of {length} bytes does not fit a pool of {pool.size}")
        number = self._published
        if pool.items:
            self._free()
        at = pool.place(length) if number - self._consumed_seen < DESCRIPTORS else -1
        if at >= 0:
            return at
        self._want(ROOM)
        self._free()
        return pool.place(length) if number - self._consumed_seen < DESCRIPTORS else -1

    def _free(self) -> None:
        """Free the items that every other member has consumed, or will not need."""
        place, seen, least = CONSUMED + 8 * self.rank, self._consumed_seen, self._next_item
        for index, peer in self._heeded:
            consumed = peer.words[place]
            if not seen <= consumed <= self._next_item:
                raise LaneFault(index, f"{consumed} items were consumed of {self._next_item}")
            if consumed < least:
                least = consumed
        self._consumed_seen = least
        for operation in self.open.values():  # in their order
            own = operation.needs.get(self.rank)
            if own and not operation.ended:  # an item of our own that we still have to read
                least = min(least, operation.first + next(iter(own)))
                break
        self._items.free(least)
