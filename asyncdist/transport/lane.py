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

from collections import deque
from collections.abc import Sequence

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.fence import fence
from asyncdist.transport.item_pool import ItemPool
from asyncdist.transport.lane_layout import (
    CONSUMED,
    DESCRIPTOR,
    DESCRIPTORS,
    DESCRIPTORS_AT,
    EXPRESS_AT,
    FINISHED,
    ISSUED,
    LANE_HEAD_BYTES,
    MAX_LANE_ITEMS,
    MAX_LANE_RANKS,
    PUBLISHED,
    RECORD,
    RECORD_STRIDE,
    RECORDS,
    RECORDS_AT,
    SKIPPED,
    WANTING,
    WORDS_BYTES,
    Differs,
    LaneOperation,
    Member,
    Needs,
)

__all__ = ["LANE_HEAD_BYTES", "MAX_LANE_RANKS", "SKIPPED", "Differs", "Lane", "LaneOperation", "Needs"]


class Lane:
    """One member's side. `segments` are all members' in the order of the group, our own writable, each LANE_HEAD_BYTES
    and a pool long. Every method raises RemoteProtocolError when a peer's memory says what cannot be.
    """

    __slots__ = (
        "_consumed_seen",
        "_finished_seen",
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
        self._own_words = self._own[:WORDS_BYTES].cast("Q")
        self._pool = self._own[LANE_HEAD_BYTES:]
        self._members = [None if index == rank else Member(index, segment) for index, segment in enumerate(segments)]
        self._others = [(index, member) for index, member in enumerate(self._members) if member is not None]
        self._issued = 0
        self._published = 0
        self._next_item = 0
        self._items = ItemPool(len(self._pool), DESCRIPTORS)
        self._queue: deque[LaneOperation] = deque()  # begun, in order, not all items published
        self._open: dict[int, LaneOperation] = {}  # begun, and somebody's part in it not retired
        self._wanting = False
        self._consumed_seen = 0
        self._finished_seen = 0
        self.finished = 0

    # -- operations

    def begin(self, fingerprint: int, item_count: int, needs: Needs) -> LaneOperation | None:
        """Begin the next operation; None if we are too far ahead of another member."""
        number = self._issued
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
        )
        self._next_item += item_count
        self._open[number] = operation
        if item_count:
            self._queue.append(operation)
        fence()  # the record before its count
        self._issued = self._own_words[ISSUED] = number + 1
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
        DESCRIPTOR.pack_into(self._own, DESCRIPTORS_AT + number % DESCRIPTORS * DESCRIPTOR.size, at, length)
        self._items.add(number, at, length)
        fence()  # the bytes and where they are before their count
        self._published = self._own_words[PUBLISHED] = number + 1
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
            published = peer.words[PUBLISHED]
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
        at, size = DESCRIPTOR.unpack_from(segment, DESCRIPTORS_AT + (first + item) % DESCRIPTORS * DESCRIPTOR.size)
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
                DESCRIPTOR.pack_into(self._own, DESCRIPTORS_AT + missing % DESCRIPTORS * DESCRIPTOR.size, 0, 0)
            fence()
            self._published = self._own_words[PUBLISHED] = number

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
                self._open.pop(number, None)
            fence()  # read before we say so
            self.finished = self._own_words[FINISHED] = oldest

    def slowest(self) -> list[int]:
        """Members that have consumed the least of our items, if any are left."""
        consumed = {index: peer.words[CONSUMED + 8 * self.rank] for index, peer in self._others}
        least = min(consumed.values())
        return [index for index, count in consumed.items() if count == least < self._published]

    def wanted_by(self) -> list[int]:
        """Members that wait for room, or for us to catch up."""
        fence()
        return [index for index, peer in self._others if peer.words[WANTING]]

    # -- express: operations whose payload fits their record

    def express(self, fingerprint: int, payload: memoryview) -> int:
        """Begin the next operation with its only item, EXPRESS_BYTES at most, in its record.

        Returns its number; -1 if we are too far ahead of another member. Ends with `express_done`.
        """
        number = self._issued
        if number - self._finished_seen >= RECORDS and not self._catch_up(number):
            return -1
        own = self._own
        at = RECORDS_AT + number % RECORDS * RECORD_STRIDE
        RECORD.pack_into(own, at, number, fingerprint, self._next_item, 0)
        if payload:
            at += EXPRESS_AT
            own[at : at + len(payload)] = payload
        if self._open:
            self._open[number] = LaneOperation(number, fingerprint, self._next_item, 0, {})
        fence()  # the record before its count
        self._issued = self._own_words[ISSUED] = number + 1
        return number

    def express_ready(self, number: int, fingerprint: int) -> bool:
        """Whether all members have begun operation `number`. Raises Differs if one runs something else there."""
        for _, peer in self._others:
            if peer.issued <= number and not self._look_for(peer, number):
                return False
        fence()  # the counts before the records
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
        at = RECORDS_AT + number % RECORDS * RECORD_STRIDE + EXPRESS_AT
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
        fence()  # read before we say so
        self.finished = self._own_words[FINISHED] = number + 1
        if self._open:
            self.retire()

    def _look_for(self, peer: Member, number: int) -> bool:
        """Whether `peer` has begun operation `number`, by what it says now."""
        issued = peer.words[ISSUED]
        if issued != peer.issued:
            if not peer.issued < issued <= self._issued + RECORDS:
                raise RemoteProtocolError(f"member {peer.index} of a lane has begun {issued} operations")
            peer.issued = issued
        return issued > number

    def _catch_up(self, number: int) -> bool:
        """Whether every member has finished enough for us to begin operation `number`."""
        for _ in range(2):
            self._finished_seen = min(member.words[FINISHED] for _, member in self._others)
            if number - self._finished_seen < RECORDS:
                self._content()
                return True
            self._want()
        return False

    # -- inside

    def _record(self, peer: Member, operation: LaneOperation) -> tuple[int, int] | None:
        """First item and number of items of `peer` in `operation`; None if it has not begun it, or skips it."""
        known = peer.records.get(operation.number)
        if known is not None and peer.checked > operation.number:
            return known
        found = self._look_up(peer, operation.number)
        if found is None:
            return None
        at = RECORDS_AT + operation.number % RECORDS * RECORD_STRIDE
        fingerprint = RECORD.unpack_from(peer.segment, at)[1]
        if fingerprint == SKIPPED:
            return None
        if fingerprint != operation.fingerprint:
            raise Differs(peer.index)
        peer.checked = operation.number + 1
        return found

    def _look_up(self, peer: Member, number: int) -> tuple[int, int] | None:
        """First item and number of items of `peer` in operation `number`; None if it has not begun it."""
        found = peer.records.get(number)
        if found is not None:
            return found
        if number >= peer.issued:
            if not self._look_for(peer, number):
                return None
            fence()  # the count before the record
        at = RECORDS_AT + number % RECORDS * RECORD_STRIDE
        theirs, _fingerprint, first, count = RECORD.unpack_from(peer.segment, at)
        if theirs != number or count > MAX_LANE_ITEMS or first >= 1 << 62:
            raise RemoteProtocolError(
                f"member {peer.index} of a lane describes operation {theirs} in place of {number}"
            )
        peer.records[number] = first, count
        return first, count

    def _consume(self, peer: Member, upto: int) -> None:
        if upto > peer.consumed:
            peer.consumed = upto
            fence()  # read before we say so
            self._own_words[CONSUMED + 8 * peer.index] = upto

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
        consumed = min(peer.words[CONSUMED + 8 * self.rank] for _, peer in self._others)
        if not self._consumed_seen <= consumed <= self._next_item:
            raise RemoteProtocolError(f"a member of a lane consumed {consumed} items of {self._next_item}")
        self._consumed_seen = consumed
        self._items.free(consumed)

    def _want(self) -> None:
        """From now on the others say when they have consumed or finished something."""
        if not self._wanting:
            self._wanting = True
            self._own_words[WANTING] = 1
        fence()  # before looking once more

    def _content(self) -> None:
        """What we waited for has come: nobody need say more."""
        if self._wanting:
            self._wanting = False
            self._own_words[WANTING] = 0
