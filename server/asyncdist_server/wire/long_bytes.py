"""A long byte string as it arrives: its memory is touched a read at a time, and nothing is copied when it is whole."""

from __future__ import annotations

import io
from typing import Final

__all__ = ["KERNEL_BYTES", "LongBytes"]

KERNEL_BYTES: Final = 32 * 1024 * 1024
"""A block of so many bytes comes from the kernel, which gives its pages as they are filled: it need not grow, and so
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
