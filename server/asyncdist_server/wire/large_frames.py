"""A large frame as it arrives: its long byte strings are taken out at once, so that none is copied when it is whole.

To decode 64 MiB takes a tenth of a second, most of it for memory that is touched for the first time. Here that is
spread over the reads that bring the frame. What is left of it, with a mark in the place of each byte string, is small.
"""

from __future__ import annotations

import io
from typing import Any, Final

from asyncdist_server.wire.messages import (
    BIN_LENGTHS,
    HEADS,
    LENGTH_BYTES,
    MAX_ELEMENTS,
    FrameReader,
    ProtocolError,
    decode_requests,
)

LARGE_FRAME_BYTES: Final = 512 * 1024
"""A frame that is no larger is decoded in less than a millisecond."""
TAKEN_OUT_BYTES: Final = 16 * 1024
"""A byte string that is no longer stays: to copy it takes no longer than to take it out."""
_MARK: Final = b"\xd4\x00\x00"
"""An extension, which clients may not use."""
_EXTENSIONS: Final = frozenset((0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)))


class LargeFrame:
    """One frame of `size` bytes."""

    __slots__ = ("_at", "_count", "_value", "error", "left", "rest", "size", "values")

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = size
        """Bytes that are still to come."""
        self.rest = bytearray()
        """The frame without what was taken out."""
        self.values: list[bytes] = []
        """What was taken out, in order."""
        self.error = ""
        """Why the frame is refused, as soon as that is known."""
        self._at = 0  # where in `rest` the next element begins
        self._count = 0  # elements before that
        self._value: LongBytes | None = None  # what is being taken out

    def __len__(self) -> int:
        return self.size

    def feed(self, data: memoryview) -> None:
        """Take the next bytes, no more than are left."""
        self.left -= len(data)
        while data and not self.error:
            if self._value is None:
                self.rest += data
                data = self._scan()
            else:
                data = self._value.feed(data)
                if not self._value.left:
                    self.values.append(self._value.value())
                    self._value = None

    def _scan(self) -> memoryview:
        """Look at further elements up to one that is to be taken out, and return what there is behind its head."""
        rest, at, count = self.rest, self._at, self._count
        end = len(rest)
        while at < end:
            first = rest[at]
            if count == MAX_ELEMENTS:
                self.error = f"more than {MAX_ELEMENTS} elements in a frame"
                break
            if first in _EXTENSIONS:
                self.error = "not a valid msgpack message: it has an extension"
                break
            head = HEADS[first]
            if head:
                at += head
            else:
                behind = at + 1 + BIN_LENGTHS[first]
                if behind > end:
                    break
                length = int.from_bytes(rest[at + 1 : behind], "big")
                if length > end - behind + self.left:
                    self.error = "not a valid msgpack message: a byte string is longer than its frame"
                    break
                if length > TAKEN_OUT_BYTES:
                    data = memoryview(bytes(rest[behind:]))
                    rest[at:] = _MARK
                    self._value = LongBytes(length)
                    self._at, self._count = len(rest), count + 1
                    return data
                at = behind + length
            count += 1
        self._at, self._count = at, count
        return memoryview(b"")

    def decode(self, max_items: int) -> tuple[Any, ...]:
        """Return what `decode_requests` does."""
        return decode_requests(self.rest, max_items, self.values)


class RequestReader:
    """A `FrameReader` that gives a large frame as a `LargeFrame`."""

    __slots__ = ("_large", "_reader", "error")

    def __init__(self, max_frame_bytes: int) -> None:
        self._reader = FrameReader(max_frame_bytes)
        self._large: LargeFrame | None = None
        self.error: ProtocolError | None = None
        """Why nothing more can be read, once all that came before it has been returned."""

    @property
    def buffered(self) -> int:
        """Bytes of the unfinished frame held now."""
        return self._reader.buffered if self._large is None else self._large.size - self._large.left

    def feed(self, data: bytes | memoryview) -> list[memoryview | LargeFrame]:
        """Take the next bytes of the stream and return the frames they complete, up to what is wrong."""
        found: list[memoryview | LargeFrame] = []
        large = self._large
        if large is not None:
            view = memoryview(data)
            data = view[large.left :]
            self._go_on(large, view[: large.left])
            if large.left or self.error is not None:
                return found
            self._large = None
            found.append(large)
        reader = self._reader
        try:  # noqa: SIM105 - suppress() takes time, with each read
            found += reader.feed(data)
        except ProtocolError:
            pass  # it is told when all that came before it has been run, in this turn or a later one
        self.error = reader.error
        if reader.needed > LARGE_FRAME_BYTES + LENGTH_BYTES:
            size, begun = reader.take_unfinished()
            self._large = LargeFrame(size)
            self._go_on(self._large, memoryview(begun))
        return found

    def _go_on(self, large: LargeFrame, data: memoryview) -> None:
        large.feed(data)
        if large.error:
            self.error = ProtocolError(large.error)
            self._large = None


KERNEL_BYTES: Final = 32 * 1024 * 1024
"""A block of this size comes from the kernel, which gives its pages as they are filled: it need not grow, and so
is never moved. glibc may take smaller ones from what it has, and would clear all of it at once."""


class LongBytes:
    """A byte string of `length` bytes, whose memory is there as far as they have come."""

    __slots__ = ("_buffer", "left", "received")

    def __init__(self, length: int) -> None:
        self._buffer = io.BytesIO(bytes(length) if length >= KERNEL_BYTES else b"")  # becomes bytes without a copy
        self.left = length
        """Bytes that are still to come."""
        self.received = 0
        """Bytes that are here."""

    def feed(self, data: memoryview) -> memoryview:
        """Take what belongs to it, and return what follows."""
        part = data[: self.left]
        self._buffer.write(part)
        self.left -= len(part)
        self.received += len(part)
        return data[len(part) :]

    def value(self) -> bytes:
        """Return it, once nothing is left."""
        return self._buffer.getvalue()
