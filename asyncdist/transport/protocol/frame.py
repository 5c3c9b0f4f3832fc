"""The bytes between two ranks: one fixed header, its kinds, the match key, and every limit of the wire.

A connection is a sequence of frames, each a header of 48 bytes, then `meta_bytes` of meta, then the payload. All
integers are little-endian.

| offset | size | field | meaning |
| --- | --- | --- | --- |
| 0 | 1 | kind | one of `Kind` |
| 1 | 1 | flags | `Flag` |
| 2 | 2 | meta_bytes | bytes of meta after the header (DATA and OFFER), at most MAX_META_BYTES |
| 4 | 4 | fingerprint | what the sender believes this message is part of (DATA, OFFER, FRAGMENT) |
| 8 | 24 | key | the match key, or zero, or a fragment's offset (u64) and 16 zero bytes |
| 32 | 8 | length | payload bytes of the message (FRAGMENT, CONTROL: of this frame) |
| 40 | 4 | credit | bytes of credit given back, of the traffic class `Flag.CREDIT_COLLECTIVE` names |
| 44 | 4 | message_id | see below |

The match key is the 24 bytes as they travel: they are a dict key at both ends and are unpacked only for errors.

| offset in key | size | field |
| --- | --- | --- |
| 0 | 8 | group |
| 8 | 4 | tag |
| 12 | 4 | sequence |
| 16 | 4 | slot |
| 20 | 1 | traffic class: 0 point-to-point, 1 collective |
| 21 | 3 | zero |

| kind | from | fields used | payload |
| --- | --- | --- | --- |
| DATA | sender | key, length, meta, fingerprint; flag ASKED | the message, at most EAGER_BYTES |
| OFFER | sender | as DATA, message_id chosen by the sender (< EARLY_ID) | none |
| PULL | receiver | message_id of an OFFER; or, >= EARLY_ID and chosen by the receiver, with key and length | none |
| DISCARD | receiver | message_id: send no more of this message; flag ABORT: its group has ended here | none |
| FRAGMENT | sender | message_id as in the PULL, offset; flag ABORT: this was the last, incomplete | <= FRAGMENT_BYTES |
| CREDIT | receiver | credit | none |
| STALLED | sender | length: 1 messages are held back, 0 none; traffic class in key; message_id: stall number | none |
| ASK | receiver | key: send one message of it though stalled; message_id: stall number; flag END: stall anew | none |
| CONTROL | either | length | opaque, at most MAX_CONTROL_BYTES |
| GOODBYE | either | | none; nothing follows |
| EXPOSED | sender | message_id as in the PULL, length, key: segment (u64), offset in it (u64) and 8 zero bytes | none |
| RELEASED | receiver | message_id: the exposed message is copied; FRAGMENT with flag END follows | none |
| MAPPED | receiver | length: number of a segment that the sender may expose from now on | none |
| UNMAP | sender | length: number of a segment of which nothing will be exposed any more | none |
| MEMORY | sender | once; key: address (u64) of a token in its process, and the token (16 bytes) | none |
| WITHDRAW | sender | message_id of an OFFER: it is none any more | none |

EXPOSED to MEMORY only where memory is shared: a payload that its receiver can read where it lies need not travel. The
payload lies in a segment, or in the sender's process (see `process_memory`), for which PROCESS stands in EXPOSED and
MAPPED. RELEASED with flag ABORT: the payload could not be read, travels after all, and is not exposed again.

ABORT has LATE where only the time of that send was over, not its group.

Every PULL is answered by exactly one end of stream: the fragment that completes the message, or one with ABORT or END.
Every OFFER is answered by a PULL or a DISCARD, a withdrawn one too; a PULL that crosses its WITHDRAW has its end in
that. So both ends know which ids are in use whichever side gives up, and when. Of an exposed message the sender says
when it is complete: should the sender have used its memory for something else meanwhile, the receiver drops what it
copied.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

HEADER: Final = struct.Struct("<BBHI24sQII")
HEADER_BYTES: Final = HEADER.size
KEY_BYTES: Final = 24
ZERO_KEY: Final = bytes(KEY_BYTES)

POINT_TO_POINT: Final = 0
COLLECTIVE: Final = 1
TRAFFIC_CLASSES: Final = 2

FRAGMENT_BYTES: Final = 256 << 10
"""Largest fragment of a message: what an urgent frame may have to wait behind."""

EAGER_BYTES: Final = FRAGMENT_BYTES
"""Largest message sent without asking: copying it once more, should it come too early, costs less than a round trip."""

EARLY_PULL_BYTES: Final = 64 << 10
"""Largest message sent without asking by operations that move much, whose receivers pull what is longer when they post
it. What comes too early is copied once more, and there credit would soon be used up."""

MAX_READ_BYTES: Final = 64 << 10
"""Memory for one read of a message of one fragment: what it acknowledges early lets the sender copy meanwhile. Of
longer messages a fragment is read at once: there is always more to send, and what costs is the number of calls."""

MAX_CALL_BYTES: Final = 1 << 20
"""Bytes handled in one callback in either direction, so that a loop with bulk traffic still turns each millisecond."""

MAX_BUFFERS: Final = 128
"""Buffers handed to one write; well under IOV_MAX (1,024) and enough to batch every small frame of a burst."""

JOIN_BYTES: Final = 4 << 10
"""Up to here a payload is joined to its header: copying it is cheaper than a second element of sendmsg."""

ZERO_COPY_BYTES: Final = 512 << 10
"""Shortest payload that is exposed instead of sent: below it the two frames more cost what copying once less saves."""

CREDIT_BYTES: Final = 1 << 20
"""Eager bytes per peer and traffic class that may be on their way or in the unexpected queue, at the receiver."""

MESSAGE_OVERHEAD_BYTES: Final = 512
"""Charged to the credit for each eager message: roughly what the objects of an unexpected one occupy."""

MAX_OFFERS: Final = 1024
"""Offers per peer and traffic class not yet answered; beyond, the sender keeps its queue to itself and says STALLED."""

MAX_ASKS: Final = 65_536
"""Keys a receiver may have asked for and not got during one stall; each costs the sender a dictionary entry. Beyond,
the receiver has the stall begin anew if it waits for few of them any more, else it waits for answers."""

MAX_EARLY_PULLS: Final = 1024
"""Pulls per peer of messages not yet offered; each costs the sender a dictionary entry. Beyond, offers are awaited."""

MAX_REPLIES: Final = 8192
"""Unsent answers to a peer that asks but does not read. An honest one cannot cause more than its offers and pulls."""

MAX_META_BYTES: Final = 1 << 10
"""Meta holds a dtype and a shape; a kilobyte is 60 dimensions and to spare."""

MAX_CONTROL_BYTES: Final = 64 << 10
"""Largest CONTROL payload: with its header it fits the reader's scratch, so it is never assembled from parts."""

MAX_LENGTH: Final = 1 << 48
"""Largest message. Far beyond any memory, and sums of a few lengths stay far below 64 bits."""

EARLY_ID: Final = 1 << 31
"""Message ids from here on are chosen by the receiver (early pulls), those below by the sender (offers)."""


class Flag:
    """Flags of frames, as plain integers."""

    CREDIT_COLLECTIVE: Final = 1
    ASKED: Final = 2
    ABORT: Final = 4
    END: Final = 8
    LATE: Final = 16


class Kind:
    """Frame kinds. Plain integers, as enum members are slow to compare on the hot path."""

    DATA: Final = 1
    OFFER: Final = 2
    PULL: Final = 3
    DISCARD: Final = 4
    FRAGMENT: Final = 5
    CREDIT: Final = 6
    STALLED: Final = 7
    ASK: Final = 8
    CONTROL: Final = 9
    GOODBYE: Final = 10
    EXPOSED: Final = 11
    RELEASED: Final = 12
    MAPPED: Final = 13
    UNMAP: Final = 14
    MEMORY: Final = 15
    WITHDRAW: Final = 16


class Header(NamedTuple):
    """The fields of a frame's header."""

    kind: int
    flags: int
    meta_bytes: int
    fingerprint: int
    key: bytes
    length: int
    credit: int
    message_id: int


class Key(NamedTuple):
    """A match key's fields."""

    group: int
    tag: int
    sequence: int
    slot: int
    traffic: int


_KEY: Final = struct.Struct("<QIIIB3x")
_PREFIX: Final = struct.Struct("<QII")
_SUFFIX: Final = struct.Struct("<IB3x")
_FRAGMENT: Final = struct.Struct("<BBHIQ16xQII")
_PLACE: Final = struct.Struct("<QQ8x")
_TOKEN: Final = struct.Struct("<Q16s")


def pack_key(group: int, tag: int, sequence: int, slot: int, traffic: int) -> bytes:
    """Return the 24 bytes by which a message and its receive find each other."""
    return _KEY.pack(group, tag, sequence, slot, traffic)


def unpack_key(key: bytes) -> Key:
    """Return the fields of a match key."""
    return Key(*_KEY.unpack(key))


def key_prefix(group: int, tag: int, sequence: int) -> bytes:
    """Return the first 16 bytes of a key: what all messages of one operation share.

    Operations are counted without end. Their numbers travel as 32 bits, as no two so far apart are under way.
    """
    return _PREFIX.pack(group, tag, sequence & 0xFFFFFFFF)


def key_suffix(slot: int, traffic: int) -> bytes:
    """Return the last 8 bytes of a key, so that `key_prefix(...) + key_suffix(...)` is the key."""
    return _SUFFIX.pack(slot, traffic)


def describe_key(key: bytes) -> str:
    """Return a key as it should stand in an error message."""
    group, tag, sequence, slot, traffic = unpack_key(key)
    kind = "collective" if traffic else "point-to-point"
    return f"{kind} group={group:#x} tag={tag} sequence={sequence} slot={slot}"


def pack_header(
    kind: int,
    *,
    flags: int = 0,
    meta_bytes: int = 0,
    fingerprint: int = 0,
    key: bytes = ZERO_KEY,
    length: int = 0,
    credit: int = 0,
    message_id: int = 0,
) -> bytes:
    """Return a header, for frames that are not worth a faster way."""
    return HEADER.pack(kind, flags, meta_bytes, fingerprint, key, length, credit, message_id)


def pack_fragment(message_id: int, offset: int, length: int, fingerprint: int = 0, flags: int = 0) -> bytes:
    """Return the header of `length` payload bytes that belong at `offset` of the message pulled as `message_id`."""
    return _FRAGMENT.pack(Kind.FRAGMENT, flags, 0, fingerprint, offset, length, 0, message_id)


def pack_exposed(message_id: int, segment: int, offset: int, length: int, fingerprint: int = 0) -> bytes:
    """Return the frame that exposes the message pulled as `message_id`: where its bytes are."""
    place = _PLACE.pack(segment, offset)
    return pack_header(Kind.EXPOSED, fingerprint=fingerprint, key=place, length=length, message_id=message_id)


def unpack_place(key: bytes) -> tuple[int, int]:
    """Return the segment and the offset that an EXPOSED names."""
    segment, offset = _PLACE.unpack(key)
    return segment, offset


def pack_memory(address: int, token: bytes) -> bytes:
    """Return the frame that lets the peer read our memory, in which `token` lies at `address`."""
    return pack_header(Kind.MEMORY, key=_TOKEN.pack(address, token))


def unpack_token(key: bytes) -> tuple[int, bytes]:
    """Return what a MEMORY names."""
    address, token = _TOKEN.unpack(key)
    return address, token
