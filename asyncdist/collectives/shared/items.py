"""Items: runs of bytes that the members of a lane hand each other, copied into the pool or read where they lie.

The sender chooses the way for each item:

| way | what the descriptor says |
| --- | --- |
| bcopy | the item was copied into the pool of the sender's segment, which is freed from its oldest end |
| zcopy | the item lies in another segment of the sender, or in its process, and is read there |
| by message | the item comes by message, as it is long and cannot be read where it lies |

Operations put their items out in the order in which they were begun, each in the order of its plan. So a number names
an item, and one counter says which are there. An item is gone once every other member has consumed it. An operation
that is given up, because a member was refused it, puts out the rest of its items as absent ones.

The memory of a zcopy item must not change until every member has consumed it: its operation has not ended before
(`returned`). If the operation is given up all the same, the descriptor changes before the memory may. A member that has
read from it looks at the descriptor once more (`take`), and takes what was read for nothing if it has changed.

Where only the two ends of a piece know its length, each sender alone decides whether all that it gives lies in its
inline payload, behind a table of bounds, or is items. Readers find a piece either way.

All of it is read from memory that the peers write, and is checked before it is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias
from weakref import ref

from asyncdist.collectives.shared.layout import (
    ABSENT,
    BY_MESSAGE,
    CONSUMED,
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    DESCRIPTORS,
    DESCRIPTORS_AT,
    ISSUED,
    ITEMS,
    LANE_HEAD_BYTES,
    LENGTH_WORD,
    MAX_LANE_ITEMS,
    PAYLOAD,
    PIECE,
    PUBLISHED,
    RECORD,
    RECORD_STRIDE,
    RECORD_WORDS,
    RECORDS,
    RECORDS_AT,
    ROOM,
    SEGMENT_WORD,
    SKIPPED,
    ByMessage,
    Differs,
    LaneFault,
    LaneOperation,
    Member,
    Needs,
    wide_bytes,
)
from asyncdist.transport.protocol.zero_copy import MAX_ADDRESS
from asyncdist.transport.shared_memory.fence import ORDERED, fence, order
from asyncdist.transport.shared_memory.process_memory import PROCESS, RemoteBytes, Unreadable

if TYPE_CHECKING:
    from asyncdist.collectives.shared.inline import Inline
    from asyncdist.collectives.shared.turns import Turns

NOT_READY, READY, BY_ITEMS = range(3)

ZCOPY_NEWS: Final = 16
"""Zcopy items that are put out, or were read, after which the others are told: so many go out in one turn."""

ALIGNMENT: Final = 64
"""Items begin at cache lines, which suits every dtype."""

Borrow: TypeAlias = Callable[[int, int, int, int], "memoryview | RemoteBytes | None"]
"""borrow(member, segment, offset, length): memory of a member; None if it is gone. Raises LaneFault."""


class Pool:
    """Places for items of up to `size` bytes in all, at most `most` at a time, first in, first out."""

    __slots__ = ("_most", "_tail", "items", "size")

    def __init__(self, size: int, most: int) -> None:
        self.size = size
        self._most = most
        self.items: deque[tuple[int, int]] = deque()
        """Number and place of the items that are there."""
        self._tail = 0

    def place(self, length: int) -> int:
        """Where `length` bytes fit now; -1 if nowhere. An empty pool begins anew, so that few pages stay in use."""
        items = self.items
        if not items:
            self._tail = 0
            return 0 if length <= self.size else -1
        if len(items) >= self._most:
            return -1
        tail, oldest = self._tail, items[0][1]
        taken = length or 1  # so that two items never lie at one place
        if tail > oldest:  # free: from the tail to the end, and from the beginning to the oldest
            if tail + taken <= self.size:
                return tail
            return 0 if taken <= oldest else -1
        return tail if tail + taken <= oldest else -1

    def add(self, number: int, at: int, length: int) -> None:
        """Item `number` lies at `at`, which `place` has said."""
        self.items.append((number, at))
        self._tail = -(-(at + max(length, 1)) // ALIGNMENT) * ALIGNMENT

    def free(self, number: int) -> None:
        """Items before `number` are needed no more."""
        items = self.items
        while items and items[0][0] < number:
            items.popleft()


class Items:
    """One member's side. Without `borrow` no item may lie outside of the pools.

    Every method raises LaneFault when a peer's memory says what cannot be.
    """

    __slots__ = (
        "_awaited",
        "_borrow",
        "_consumed_seen",
        "_memory",
        "_pool",
        "_published",
        "_queue",
        "_turns",
        "_zcopied",
        "giving_up",
        "inline",
    )

    inline: ref[Inline]
    """Payloads in records, of members that have put their pieces there. They refer to us: this is no cycle, so that the
    memory goes with the lane."""

    def __init__(self, turns: Turns, borrow: Borrow | None = None) -> None:
        self._turns = turns
        self._borrow = borrow
        self._memory = turns.own[LANE_HEAD_BYTES + wide_bytes(len(turns.own)) :]
        self._pool = Pool(len(self._memory), DESCRIPTORS)
        self._published = 0
        self._queue: deque[LaneOperation] = deque()  # begun, in order, not all items published
        self._consumed_seen = 0
        self._awaited = 0
        self._zcopied = False
        """Whether what the last `item` has found, and was not taken yet, is a zcopy item."""
        self.giving_up = False
        """Whether absent items wait for room."""

    # Operations

    def begin(self, fingerprint: int, item_count: int, needs: Needs) -> LaneOperation | None:
        """Begin the next operation; None if we are too far ahead of another member."""
        turns = self._turns
        number = turns.issued
        if number - turns.finished_seen >= RECORDS and not turns.catch_up(number):
            return None
        first = turns.next_item
        operation = LaneOperation(number, fingerprint, first, item_count, needs)
        RECORD.pack_into(
            turns.own, RECORDS_AT + number % RECORDS * RECORD_STRIDE, number, fingerprint, first, item_count, 0
        )
        turns.next_item += item_count
        turns.add(operation)
        if item_count:
            self._queue.append(operation)
        order()  # the record before its count
        turns.issued = turns.own_words[ISSUED] = number + 1
        fence()  # our count before we look for records of the others, who knock only if they see that all have begun
        return operation

    def end(self, operation: LaneOperation) -> None:
        """Everything that `operation` needed was read, or it was given up; items not put out yet never will be."""
        if operation.zcopied:
            self._revoke(operation)
        operation.ended = True
        for _, peer in self._turns.others:
            peer.settled = False
        self._skip_given_up()
        self.retire()

    def retire(self) -> None:
        """Tell the others which items are needed no more; to be called when a member has begun an operation."""
        if self.giving_up:
            self._skip_given_up()
        retired = False
        turns = self._turns
        for index, peer in turns.others:
            while not peer.settled and (operation := turns.open.get(peer.retired)) is not None:
                found = turns.look_up(peer, operation.number)
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
            turns.finish()

    def revoke_all(self) -> None:
        """Take back all zcopy items, before the lane is closed."""
        for operation in self._turns.open.values():
            if operation.zcopied and not operation.ended:
                self._revoke(operation)

    def slowest(self) -> list[int]:
        """Members that have consumed the least of our items, if any are left."""
        turns = self._turns
        consumed = {index: peer.words[CONSUMED + 8 * turns.rank] for index, peer in turns.others}
        least = min(consumed.values())
        return [index for index, count in consumed.items() if count == least < self._published]

    # Publishing

    def bcopy(self, operation: LaneOperation, payload: memoryview) -> bool:
        """Copy the next item of `operation` into the pool; False if there is no room yet, or it is not its turn."""
        queue = self._queue
        if not queue or queue[0] is not operation:
            return False
        length = len(payload)
        at = self._place(length)
        if at < 0:
            return False
        if self._turns.wanting:
            self._content()
        self._memory[at : at + length] = payload
        self._pool.add(self._published, at, length)
        self._describe(operation, at, length, 0)
        return True

    def zcopy(self, operation: LaneOperation, segment: int, offset: int, length: int) -> bool:
        """Put out the next item of `operation` where it lies; False as in `bcopy`."""
        queue, number = self._queue, self._published
        if not queue or queue[0] is not operation:
            return False
        if number - self._consumed_seen >= DESCRIPTORS and not self._descriptor_free():
            return False
        if self._turns.wanting:
            self._content()
        operation.zcopied = number + 1
        self._describe(operation, offset, length, segment)
        return True

    def by_message(self, operation: LaneOperation, length: int) -> bool:
        """Say that the next item of `operation` comes by message; False as in `bcopy`."""
        queue = self._queue
        if not queue or queue[0] is not operation:
            return False
        if self._published - self._consumed_seen >= DESCRIPTORS and not self._descriptor_free():
            return False
        if self._turns.wanting:
            self._content()
        self._describe(operation, 0, length, BY_MESSAGE)
        return True

    def returned(self, operation: LaneOperation) -> bool:
        """Whether all zcopy items of `operation` were consumed; if not, the others say when they consume more."""
        self._free()
        if self._consumed_seen < operation.zcopied:
            self._awaited = max(self._awaited, operation.zcopied)
            self._turns.want(ROOM)
            self._free()
        return bool(self._consumed_seen >= operation.zcopied)

    # Looking

    def available(self, operation: LaneOperation, member: int) -> int:
        """How many items of `member` in `operation` are there. Raises Differs if it runs something else."""
        turns = self._turns
        peer = turns.members[member]
        if peer is None:
            return operation.published
        known = operation.begun.get(member)
        if known is None:
            known = turns.look_up_items(peer, operation)
            if known is None:
                return 0
            if known[0] == known[1] and peer.record_words[operation.number % RECORDS * RECORD_WORDS + PAYLOAD]:
                operation.inline.add(member)
        if member in operation.inline:
            return MAX_LANE_ITEMS
        first, end = known
        if peer.published < end:
            published = peer.words[PUBLISHED]
            if published != peer.published:
                if not peer.published < published < 1 << 63:
                    raise LaneFault(member, f"{published} items were put out after {peer.published}")
                if not ORDERED:
                    order()  # the count before what it counts
                peer.published = published
            if published < end:
                return published - first if published > first else 0
        return end - first

    def item(self, operation: LaneOperation, member: int, item: int) -> memoryview | RemoteBytes | ByMessage | None:
        """Item number `item` of `member` in `operation`, which is available; None if that member has given it up.

        To be read within `take`.
        """
        turns, self._zcopied = self._turns, False
        peer = turns.members[member]
        if member in operation.inline:
            return self.piece(operation.number, member, item)
        if peer is None:
            first, segment, pool = operation.first, turns.own, self._memory
        else:
            first, segment, pool = operation.begun[member][0], peer.segment, peer.pool
        number = first + item
        place = DESCRIPTORS_AT + number % DESCRIPTORS * DESCRIPTOR_BYTES
        found, at, size, where = DESCRIPTOR.unpack_from(segment, place)
        if found != number:
            raise LaneFault(member, f"item {found} is described in place of {number}")
        if size == ABSENT:
            return None
        if where == PROCESS and peer is not None and peer.process is not None:
            if at + size > MAX_ADDRESS:
                raise LaneFault(member, f"a peer lent {size} bytes at {at:#x} of its process")
            self._zcopied = True
            return RemoteBytes(peer.process, at, size)
        if where == BY_MESSAGE:
            return ByMessage(size)
        if where:
            return self._elsewhere(member, where, at, size)
        if size > len(pool) or at > len(pool) - size:
            raise LaneFault(member, f"an item has {size} bytes at {at}, outside of the pool")
        view: memoryview = pool[at : at + size]
        return view

    def take(
        self,
        operation: LaneOperation,
        member: int,
        item: int,
        copy: Callable[[], object] | None = None,
        *,
        last: bool = True,
    ) -> bool:
        """Take what `item` has found by calling `copy`; False if the member has given it up meanwhile.

        With its `last` part the item was read, for one of the times it is needed. Raises what `copy` raises. Large
        collectives come here by the hundred, so nothing is called behind `copy`.
        """
        turns, failure = self._turns, None
        peer = turns.members[member]
        zcopied = self._zcopied and peer is not None
        self._zcopied = False
        try:
            if copy is not None:
                copy()
        except Unreadable as error:
            if error.gone:
                return False
            failure = error
        if zcopied and peer is not None:
            if not ORDERED:
                order()  # its bytes before this look
            number = operation.begun[member][0] + item
            at = DESCRIPTORS_AT + number % DESCRIPTORS * DESCRIPTOR_BYTES
            found, _offset, size, _segment = DESCRIPTOR.unpack_from(peer.segment, at)
            if found != number or size == ABSENT:
                return False
        if failure is not None:
            raise failure
        if not last:
            return True
        needs = operation.needs[member]
        needs[item] -= 1
        if needs[item]:
            return True
        del needs[item]
        if peer is not None and peer.retired == operation.number:
            first, end = operation.begun[member]
            upto = min(first + next(iter(needs)), end) if needs else end
            if upto > peer.consumed:
                peer.consumed = upto
                if not ORDERED:
                    order()  # read before we say so
                turns.own_words[CONSUMED + 8 * member] = upto
                if zcopied and needs and item % ZCOPY_NEWS:
                    turns.late_news = True
                else:
                    turns.news = True
        return True

    # Pieces, which their sender may have put inline instead

    def pieces_ready(self, number: int, fingerprint: int, givers: Iterable[int]) -> int:
        """Whether the pieces of all `givers` are in their payloads (READY), or one has items instead (BY_ITEMS).

        Raises Differs if one of them runs something else there.
        """
        turns = self._turns
        at, found = number % RECORDS * RECORD_WORDS, READY
        for member in givers:
            peer = turns.members[member]
            assert peer is not None
            if peer.issued <= number and not turns.look_for(peer, number):
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

    def piece(self, number: int, member: int, item: int) -> memoryview:
        """What `member`, which has begun operation `number`, would have put out there as that item."""
        peer = self._turns.members[member]
        assert peer is not None
        inline = self.inline()
        assert inline is not None
        length = peer.record_words[number % RECORDS * RECORD_WORDS + PAYLOAD]
        table = item * 4 + PIECE.size
        if not table <= length <= inline.most_bytes:
            raise LaneFault(member, f"{length} bytes are in place of {item + 1} pieces or more")
        at, segment = inline.place(number, length), peer.segment
        begin, end = PIECE.unpack_from(segment, at + table - PIECE.size)
        if not begin <= end <= length:
            raise LaneFault(member, f"a piece lies from {begin} to {end} of {length} bytes")
        return segment[at + begin : at + end]

    def in_steps(self, number: int, fingerprint: int, needs: Needs) -> LaneOperation:
        """Operation `number`, begun by `publish`, from now on as one that needs items. Ends with `Items.end`."""
        turns = self._turns
        operation = turns.open.get(number)
        if operation is None:  # nothing was open when it began
            operation = LaneOperation(number, fingerprint, turns.next_item, 0, needs)
            turns.add(operation)
        return operation

    # Inside

    def _elsewhere(self, member: int, segment: int, offset: int, length: int) -> memoryview | RemoteBytes | None:
        """What lies in another segment of a member than its lane's, or in its process."""
        if self._borrow is None:
            raise LaneFault(member, f"an item lies in segment {segment}")
        self._zcopied = True
        found = self._borrow(member, segment, offset, length)
        peer = self._turns.members[member]
        if isinstance(found, RemoteBytes) and peer is not None:
            peer.process = found.memory
        return found

    def _descriptor_free(self) -> bool:
        """Whether an item can be described, once it is looked what was consumed; if not, others say when they do."""
        self._turns.want(ROOM)
        self._free()
        return self._published - self._consumed_seen < DESCRIPTORS

    def _content(self) -> None:
        """There is room: no member need say more, unless one still reads what an operation waits to have back."""
        if self._consumed_seen >= self._awaited:
            self._turns.content(ROOM)

    def _describe(self, operation: LaneOperation, at: int, length: int, segment: int) -> None:
        """Put out the next item of `operation`, the first of the queue: it is there."""
        number, turns = self._published, self._turns
        place = DESCRIPTORS_AT + number % DESCRIPTORS * DESCRIPTOR_BYTES
        DESCRIPTOR.pack_into(turns.own, place, number, at, length, segment)
        if not ORDERED:
            order()  # the bytes and where they are before their count
        self._published = turns.own_words[PUBLISHED] = number + 1
        operation.published += 1
        if operation.published == operation.item_count:
            self._queue.popleft()
            self._skip_given_up()

    def _skip_given_up(self) -> None:
        queue, turns = self._queue, self._turns
        self.giving_up = bool(queue and queue[0].ended)
        while queue and queue[0].ended:
            end = queue[0].first + queue[0].item_count
            self._free()
            if end - self._consumed_seen > DESCRIPTORS:
                turns.want(ROOM)
                self._free()
            room = self._consumed_seen + DESCRIPTORS  # descriptors before it may be in use
            upto = min(end, room)
            for missing in range(max(self._published, self._consumed_seen), upto):
                at = DESCRIPTORS_AT + missing % DESCRIPTORS * DESCRIPTOR_BYTES
                DESCRIPTOR.pack_into(turns.own, at, missing, 0, ABSENT, 0)
            order()
            self._published = turns.own_words[PUBLISHED] = max(upto, self._published)
            if upto < end:
                return
            queue.popleft()
        self.giving_up = False

    def _revoke(self, operation: LaneOperation) -> None:
        with suppress(LaneFault):  # what one member says of itself is no reason to leave the others what they may read
            self._free()
        for number in range(max(operation.first, self._consumed_seen), operation.zcopied):
            at = DESCRIPTORS_AT + number % DESCRIPTORS * DESCRIPTOR_BYTES
            words = self._turns.own[at : at + DESCRIPTOR_BYTES].cast("Q")
            if words[SEGMENT_WORD]:  # or comes by message, for which nobody need ask any more
                # This word alone, as others may be looking: with no segment, it would be an item of the pool.
                words[LENGTH_WORD] = ABSENT
        if not ORDERED:
            order()  # before anything is written to what the others could read

    def _consume(self, peer: Member, upto: int) -> None:
        if upto > peer.consumed:
            peer.consumed = upto
            if not ORDERED:
                order()  # read before we say so
            self._turns.own_words[CONSUMED + 8 * peer.index] = upto
            self._turns.news = True

    def _place(self, length: int) -> int:
        """Where in the pool `length` bytes fit now; -1 if nowhere."""
        pool = self._pool
        if length > pool.size:
            raise ValueError(f"an item of {length} bytes does not fit a pool of {pool.size}")
        number = self._published
        if pool.items:
            self._free()
        at = pool.place(length) if number - self._consumed_seen < DESCRIPTORS else -1
        if at >= 0:
            return at
        self._turns.want(ROOM)
        self._free()
        return pool.place(length) if number - self._consumed_seen < DESCRIPTORS else -1

    def _free(self) -> None:
        """Free the items that every other member has consumed, or will not need."""
        turns = self._turns
        place, seen, least = CONSUMED + 8 * turns.rank, self._consumed_seen, turns.next_item
        for index, peer in turns.heeded:
            consumed = peer.words[place]
            if not seen <= consumed <= turns.next_item:
                raise LaneFault(index, f"{consumed} items were consumed of {turns.next_item}")
            if consumed < least:
                least = consumed
        self._consumed_seen = least
        for operation in turns.open.values():  # in their order
            own = operation.needs.get(turns.rank)
            if own and not operation.ended:  # an item of our own that we still have to read
                least = min(least, operation.first + next(iter(own)))
                break
        self._pool.free(least)
