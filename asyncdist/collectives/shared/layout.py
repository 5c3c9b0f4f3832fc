"""Where things are in the segments of a lane, and what is known of its members.

A lane belongs to one order of operations (a tag of a group). Each member owns one segment, which only it writes and all
others read.

| in a segment | what |
| --- | --- |
| words, each on a cache line | issued: operations begun; published: items put out; finished: operations of which the
member will look at nothing again; wanting: what it waits for; consumed[m]: items of member m that it needs no more |
| records, a ring of RECORDS | of an operation: its number, its fingerprint, its first item, how many items it has; of
an inline one its payload's length, whether results are there, and that payload, if it is short |
| slots | longer inline payloads |
| descriptors, a ring of DESCRIPTORS | of an item: its number, where it lies, its length, and in which segment: 0 is
the pool; others are of arrays, PROCESS is the member's process, BY_MESSAGE says that the item comes by message |
| the pool | the bytes of bcopy items, first in, first out |

Operations without items, or carried out otherwise, take their number all the same, with their fingerprint: members
whose operations of one number differ find out at once.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, TypeAlias

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.shared_memory.process_memory import ProcessMemory

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
INLINE_BYTES: Final = 1 << 10
"""Payload that a record itself has room for: small operations need no item, no descriptor and no pool."""
DESCRIPTORS: Final = 1024
"""Items of a member that may be there at once."""

ISSUED, PUBLISHED, FINISHED, WANTING, CONSUMED = 0, 8, 16, 24, 32
WORDS_BYTES: Final = 64 * (4 + MAX_LANE_RANKS)
RECORD: Final = struct.Struct("<QQQQQ")
ITEMS, PAYLOAD, RESULTS = 3, 4, 5
"""Words of a record: of RECORD, how many items, and the payload's length; behind it, the operation's number + 1 once
results have taken the place of a part of the payload."""
PIECE: Final = struct.Struct("<II")
"""A word of a table of bounds and the next: where in a payload that begins with the table a piece begins and ends."""
DESCRIPTOR: Final = struct.Struct("<QQQQ")
DESCRIPTOR_BYTES: Final = DESCRIPTOR.size
LENGTH_WORD, SEGMENT_WORD = 2, 3
RECORDS_AT: Final = WORDS_BYTES
RECORD_STRIDE: Final = 64 + INLINE_BYTES
RECORD_WORDS: Final = RECORD_STRIDE // 8
INLINE_AT: Final = 64
"""Where a record's payload begins in it: on a cache line of its own."""
DESCRIPTORS_AT: Final = RECORDS_AT + RECORDS * RECORD_STRIDE
SKEW_BYTES: Final = 64
"""Where in a page the memory for payloads begins. Large numpy arrays begin 16 bytes into one, behind malloc's header:
copied to them from the beginning of a page, target - source is 16. Where that, modulo a page, is 1 to 31, `memcpy` of 2
to 512 KiB takes many times as long on AMD's Zen 3, as glibc uses `rep movsb` there (its bug 30994)."""
LANE_HEAD_BYTES: Final = -(-(DESCRIPTORS_AT + DESCRIPTORS * DESCRIPTOR_BYTES) // 4096) * 4096 + SKEW_BYTES
"""Bytes of a segment before its memory for payloads."""
SLOTS: Final = 8
"""Wide inline operations a member may be ahead of the slowest; of the longest, half as many."""
WIDE_SHARE: Final = 3
"""Of that memory, this part is for inline payloads that do not fit a record; the pool is the rest."""


def wide_bytes(segment_bytes: int) -> int:
    """Bytes in a segment, from LANE_HEAD_BYTES on, for wide inline payloads; the pool follows."""
    return max(0, segment_bytes - LANE_HEAD_BYTES) // WIDE_SHARE // 4096 * 4096


def pool_bytes(segment_bytes: int) -> int:
    """Bytes of the pool, the rest of a segment."""
    return max(0, segment_bytes - LANE_HEAD_BYTES) - wide_bytes(segment_bytes)


def item_bytes(segment_bytes: int) -> int:
    """Bytes of the pool that are reckoned with: its share, without what is left over as segments are whole pages."""
    return (WIDE_SHARE - 1) * wide_bytes(segment_bytes)


TURN_BYTES: Final = 1 << 20
"""Bytes copied and reduced in one turn of the loop after which nothing else is begun: some 0.2 ms, so that no callback
holds it for a millisecond."""

ROOM, TURN = 1, 2
"""Bits of `wanting`: for room in the pool, for the others to finish operations."""
ABSENT: Final = (1 << 64) - 1
"""Length of an item that will never be: its operation was given up, and why, the members hear otherwise."""


BY_MESSAGE: Final = 1 << 48
"""In place of a segment: the item comes by message. Segments have lower numbers."""


class ByMessage(NamedTuple):
    """An item that comes by message."""

    nbytes: int


class LaneFault(RemoteProtocolError):
    """A member's memory says what cannot be."""

    def __init__(self, member: int, text: str) -> None:
        super().__init__(f"in shared memory, {text}")
        self.member = member


class Differs(Exception):
    """A member runs another operation in this place of the order."""

    def __init__(self, member: int) -> None:
        super().__init__(member)
        self.member = member


class LaneOperation:
    """One operation on this member. `number` is its place in the order, `needs` (a copy) what it still has to read."""

    __slots__ = (
        "begun",
        "ended",
        "fingerprint",
        "first",
        "inline",
        "item_count",
        "needs",
        "number",
        "published",
        "zcopied",
    )

    def __init__(self, number: int, fingerprint: int, first: int, item_count: int, needs: Needs) -> None:
        self.number = number
        self.fingerprint = fingerprint
        self.first = first
        self.item_count = item_count
        self.needs = {member: items.copy() for member, items in needs.items()}
        self.begun: dict[int, tuple[int, int]] = {}  # by member that runs it too, where its items begin and end
        self.inline: set[int] = set()  # members whose pieces lie in their record's payload instead
        self.published = 0
        self.zcopied = 0  # items before this number are read where they lie, if any are
        self.ended = False


class Member:
    """Another member, as far as we have read what it says."""

    __slots__ = (
        "consumed",
        "index",
        "issued",
        "pool",
        "process",
        "published",
        "record_words",
        "records",
        "retired",
        "segment",
        "settled",
        "words",
    )

    def __init__(self, index: int, segment: memoryview) -> None:
        self.index = index
        self.segment = segment
        self.words = segment[:WORDS_BYTES].cast("Q")
        self.record_words = segment[RECORDS_AT:DESCRIPTORS_AT].cast("Q")
        self.pool = segment[LANE_HEAD_BYTES + wide_bytes(len(segment)) :]
        self.process: ProcessMemory | None = None  # the memory of its process, once an item of it lay there
        self.issued = 0
        self.published = 0
        self.retired = 0  # operations of which nothing of it is needed any more; kept up only while some are open
        self.settled = False  # whether the next of them has nothing to retire before it has ended here
        self.consumed = 0  # items of it that we need no more
        self.records: dict[int, tuple[int, int]] = {}  # by operation, once looked at: its first item and how many
