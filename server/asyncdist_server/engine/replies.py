"""Replies that wait for their client to read: encoded in pieces, and bounded together.

A stored value is there once for all clients. What a thousand clients do not read must not make a thousand copies of it,
and no client is to wait while a large one is copied. A value is immutable, so a reply refers to it, and one small piece
after the other is made of it when there is room for that in the client's socket.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

from asyncdist_server.engine.clients import only_bytes, value_bytes
from asyncdist_server.wire.messages import LENGTH_BYTES, Names

PIECE_BYTES: Final = 32 * 1024
"""What a socket is given at a time, a few microseconds' work. What it does not take at once is all that is held for a
client besides `SMALL_BYTES`, so that all clients together, reading nothing, hold less than the store may."""
SMALL_BYTES: Final = 16 * 1024
"""A client with more than this unread is given nothing before it reads."""

_HEAD_BYTES: Final = 64
"""As much of msgpack's own bytes goes with the first piece of what follows them."""
_HEAD_16: Final = struct.Struct(">BH").pack
_HEAD_32: Final = struct.Struct(">BI").pack
_ONE_BYTE, _TWO_BYTES = 0xFF, 0xFFFF


class LargeReply:
    """The frame of one reply, in pieces."""

    __slots__ = ("_pieces", "left", "reply")

    def __init__(self, reply: tuple[int, int, Any], pack: Callable[[Any], bytes]) -> None:
        self.reply = reply
        size = encoded_bytes((reply,), pack)
        self.left = LENGTH_BYTES + size
        """Bytes that are still to come."""
        self._pieces = _joined(itertools.chain((size.to_bytes(LENGTH_BYTES, "big"),), _parts((reply,), pack)))

    def take(self) -> bytes:
        """Return the next piece."""
        piece = next(self._pieces)
        self.left -= len(piece)
        return piece


def encoded_bytes(value: Any, pack: Callable[[Any], bytes]) -> int:
    """Return how many bytes `value` has in msgpack."""
    if type(value) is bytes:
        return len(value) + (2 if len(value) <= _ONE_BYTE else 3 if len(value) <= _TWO_BYTES else 5)
    if type(value) is Names:
        return len(value.encoded)
    if type(value) is not list and type(value) is not tuple:
        return len(pack(value))
    head = len(_array_head(len(value)))
    if not only_bytes(value):
        return head + sum([encoded_bytes(each, pack) for each in value])
    sizes = list(map(len, value))
    longer, longest = (sum(map(most.__lt__, sizes)) for most in (_ONE_BYTE, _TWO_BYTES))
    return head + sum(sizes) + 2 * len(sizes) + longer + 2 * longest


def _array_head(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 + count,))
    return _HEAD_16(0xDC, count) if count <= _TWO_BYTES else _HEAD_32(0xDD, count)


def _parts(value: Any, pack: Callable[[Any], bytes]) -> Iterator[bytes]:
    """Give `value` in msgpack, none of it longer than `PIECE_BYTES` but for the bytes of msgpack itself."""
    if type(value) is bytes:
        yield _HEAD_32(0xC6, len(value)) if len(value) > _TWO_BYTES else _HEAD_16(0xC5, len(value))
        yield from _cut(value)
    elif type(value) is Names:
        yield from _cut(value.encoded)
    elif type(value) is list or type(value) is tuple:
        yield _array_head(len(value))
        together: list[Any] = []
        size = 0
        for each in value:
            each_bytes = value_bytes(each)
            if together and size + each_bytes > PIECE_BYTES:
                yield _elements(together, pack)
                together, size = [], 0
            if each_bytes > PIECE_BYTES:
                yield from _parts(each, pack)
            else:
                together.append(each)
                size += each_bytes
        yield _elements(together, pack)
    else:
        yield pack(value)


def _cut(data: bytes) -> Iterator[bytes]:
    return (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))


def _elements(values: list[Any], pack: Callable[[Any], bytes]) -> bytes:
    """Return what follows the head of an array of these."""
    return pack(values)[len(_array_head(len(values))) :]


def _joined(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Give the same bytes in as few pieces as may be."""
    together: list[bytes] = []
    size = 0
    for part in parts:
        if together and size + len(part) > PIECE_BYTES + _HEAD_BYTES:
            yield b"".join(together)
            together, size = [], 0
        together.append(part)
        size += len(part)
    yield b"".join(together)


# ---- how much may wait

UNSAID_FRAMES: Final = 2
"""Replies of a client may have the values of this many frames of the largest kind: one is being said, one waits."""
FREED_PART: Final = 8
"""Making room frees one in this many bytes, as it takes long to count how much there is."""


class Replies(Protocol):
    """What a session has to say."""

    @property
    def reply_bytes(self) -> int:
        """The bytes of the values in it, each counted as often as it is there."""

    def waiting_values(self) -> Iterable[Any]:
        """Return the values in it, which may be tuples and lists of values."""


class Speaker(Protocol):
    """A connection whose replies wait."""

    def drop(self, reason: str) -> None:
        """Cut the connection; `reason` is for the log."""


class Unsaid:
    """The values in waiting replies, each counted once: at most `each_bytes` of a connection, `limit_bytes` of all.

    A reply refers to values that the store may replace or give away while the reply waits. A thousand clients that read
    nothing could so have the daemon hold a thousand times what one of them may. Where the waiting values take more than
    the store itself may hold, the connections with most of them are cut off.
    """

    __slots__ = ("_at_most", "_each_bytes", "_limit_bytes", "_waiting")

    def __init__(self, each_bytes: int, limit_bytes: int) -> None:
        self._each_bytes = each_bytes
        self._limit_bytes = limit_bytes
        self._at_most = 0  # since it was counted last, what grew is added and nothing is taken away
        self._waiting: dict[Speaker, tuple[int, Replies]] = {}

    @property
    def waiting_count(self) -> int:
        """Connections whose replies wait."""
        return len(self._waiting)

    def note(self, speaker: Speaker, replies: Replies) -> None:
        """Note how much waits at one connection now; may cut this one or others off."""
        size = replies.reply_bytes
        before, _ = self._waiting.get(speaker, (0, None))
        if size == before:
            return
        self._at_most += max(0, size - before)
        self._waiting[speaker] = size, replies
        if size > self._each_bytes and distinct_bytes([replies]) > self._each_bytes:
            self._cut_off(speaker, "it alone")
        elif self._at_most > self._limit_bytes and self.count() > self._limit_bytes:
            self._make_room()

    def _make_room(self) -> None:
        enough = self._limit_bytes - self._limit_bytes // FREED_PART
        most = self._at_most
        for worst in sorted(self._waiting, key=lambda speaker: self._waiting[speaker][0], reverse=True):
            most -= self._waiting[worst][0]  # at least so much is left: others may wait for the same values
            self._cut_off(worst, "all clients together")
            if most <= enough:
                most = self.count()
                if most <= enough:
                    return

    def _cut_off(self, speaker: Speaker, who: str) -> None:
        self.forget(speaker)
        speaker.drop(f"reads too slowly: {who} had too much to read")

    def forget(self, speaker: Speaker) -> None:
        """Note that a connection is gone, or its replies wait no longer."""
        self._waiting.pop(speaker, None)

    def count(self) -> int:
        """Return how many bytes the values have, each counted once."""
        self._at_most = distinct_bytes([replies for _, replies in self._waiting.values()])
        return self._at_most


def distinct_bytes(waiting: list[Replies]) -> int:
    """Return how many bytes the values in replies have, each counted once."""
    found: dict[int, int] = {}
    left: list[Any] = [value for replies in waiting for value in replies.waiting_values()]
    while left:
        value = left.pop()
        if type(value) is bytes:
            found[id(value)] = len(value)
        elif type(value) is Names:
            found[id(value)] = len(value.encoded)
        elif type(value) is tuple or type(value) is list:
            left += value
    return sum(found.values())
