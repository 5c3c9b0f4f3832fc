"""Zero copy: long messages between ranks of one host, which the receiver copies out of the sender's memory.

A segment of arrays is offered to the peer once, when something in it could first be lent (UCX registers memory then).
The sender lends from it once the peer has said that it has mapped it. Until then, and if the peer cannot, payloads
travel. The same holds for the memory of this process, where the kernel lets the peer read it.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.concurrency import trace as events
from asyncdist.errors import ClosedError, RemoteProtocolError
from asyncdist.transport.protocol.frame import LEND_BYTES, Kind, pack_header, pack_memory, unpack_token
from asyncdist.transport.protocol.operations import Stream
from asyncdist.transport.shared_memory.arrays import SharedArrays, address_of
from asyncdist.transport.shared_memory.process_memory import (
    PROCESS,
    OwnMemory,
    ProcessMemory,
    RemoteBytes,
    Token,
    Unreadable,
)
from asyncdist.transport.shared_memory.segment import AttachedSegment, Parcel, close_all

__all__ = ["COPY_BYTES", "MAX_ADDRESS", "MAX_BORROWED", "READ_BYTES", "Borrowing", "Loans", "place_of"]

MAX_BORROWED: Final = 4096
"""Segments one peer may have us map for its arrays. Beyond some sixty it takes them ever larger."""

READ_BYTES: Final = 4 << 20
"""Shortest payload that the peer reads in our process: of a shorter one it copies parts out while we copy others in."""

MAX_ADDRESS: Final = (1 << 63) - 1
"""Nothing of a process lies beyond, on any system; sums of an address and a length below it never wrap."""

COPY_BYTES: Final = 2 << 20
"""Bytes copied in one turn of the loop: some 0.2 ms."""


class Segmented(Protocol):
    """The connection, as its loans see it."""

    def offer(self, number: int) -> None:
        """Pass a segment of arrays. Raises OSError, ClosedError."""

    def tell(self, frame: bytes) -> None:
        """Send a frame in line with messages."""

    def forsake(self, number: int) -> None:
        """The peer has no segment of that number any more, and may have passed it for something else than arrays."""

    @property
    def peer_process(self) -> int:
        """The process of the peer, as the kernel numbers it for us. Raises OSError."""


class Borrowing:
    """A lent message on its way from `source` into the place of `stream`.

    `done(copied)` is called with the last byte, or as soon as it turns out that it cannot be read.
    """

    def __init__(self, stream: Stream, source: memoryview | RemoteBytes, done: Callable[[bool], None]) -> None:
        assert stream.view is not None
        self.stream = stream
        self._source: Array | RemoteBytes
        self._source = source if isinstance(source, RemoteBytes) else np.frombuffer(source, np.uint8)
        self._target: Array = np.frombuffer(stream.view, np.uint8)
        self._copied = 0
        self._done = done

    def advance(self, nbytes: int) -> int:
        """Copy up to `nbytes` more; returns how many. 0: it is over."""
        start = self._copied
        stop = min(start + nbytes, self.stream.total)
        if self.stream.view is None or start == stop:
            return 0
        target, source = self._target[start:stop], self._source
        if isinstance(source, RemoteBytes):
            try:
                source.read(start, target)
            except Unreadable as error:
                events.info("a message lent by a peer travels after all: %s", error)
                self._done(False)
                return 0
        else:
            target[:] = source[start:stop]
        self._copied = stop
        if stop == self.stream.total:
            self._done(True)
        return stop - start


class Loans:
    """One connection's side: what we lend and what we borrow; without `own` only of segments."""

    def __init__(self, connection: Segmented, arrays: SharedArrays, own: OwnMemory | None = None) -> None:
        self._connection = connection
        self._arrays = arrays
        self._own = own
        self._lent: dict[int, bool] = {}  # by segment offered, whether the peer has mapped it
        self._borrowed: dict[int, AttachedSegment] = {}
        self._told = False  # where the memory of its process is
        self._process: ProcessMemory | None = None
        self.copies: deque[Borrowing] = deque()  # for `advance`

    # Lending

    def lend(self, payload: memoryview) -> tuple[int, int] | None:
        """Segment and offset of a payload that the peer can read in our memory, else None."""
        if len(payload) < LEND_BYTES:
            return None
        return place_of(payload, self._arrays, self._own if len(payload) >= READ_BYTES else None, self.maps)

    def open(self) -> None:
        """Let the peer read our memory. Called as the connection opens: messages posted from then on come behind."""
        if self._own is not None:
            self._lent[PROCESS] = False
            self._connection.tell(pack_memory(*self._own.token))

    def maps(self, number: int) -> bool:
        """Whether the peer has mapped our segment `number`, or reads our process's memory; if not, it is asked to."""
        mapped = self._lent.get(number)
        if mapped is None:
            self._lent[number] = False
            try:
                self._connection.offer(number)
            except (OSError, ClosedError):
                del self._lent[number]
        return mapped is True

    def on_mapped(self, number: int) -> None:
        """MAPPED: the peer can read this one."""
        if number in self._lent:  # else it is gone meanwhile
            self._lent[number] = True

    def refused(self) -> None:
        """The peer could not read what is lent to it, so our process's memory is lent to it no more."""
        self._lent[PROCESS] = False

    def gone(self, number: int) -> None:
        """We have no segment of that number any more."""
        if self._lent.pop(number, None) is not None:
            self._connection.tell(pack_header(Kind.UNMAP, length=number))

    # Borrowing

    @property
    def reads(self) -> bool:
        """Whether we can read its process's memory, and could whenever we did.

        Known once a message is here that found the connection open.
        """
        return self._process is not None and not self._process.failed

    def attach(self, parcel: Parcel) -> None:
        """The peer has offered a segment: map it, or leave it. Raises RemoteProtocolError."""
        number = parcel.number
        if number in self._borrowed or len(self._borrowed) >= MAX_BORROWED:
            close_all(parcel.fds)
            raise RemoteProtocolError(f"a peer offered segment {number} again, or more than {MAX_BORROWED}")
        try:
            if not parcel.fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._borrowed[number] = AttachedSegment(parcel.fds[0], parcel.size)
        except OSError as error:
            events.info("%d bytes of a peer's arrays cannot be mapped and will be copied: %s", parcel.size, error)
            return
        self._connection.tell(pack_header(Kind.MAPPED, length=number))

    def on_memory(self, key: bytes) -> None:
        """MEMORY: the peer lets us read its process's memory. So we do, if we can. Raises RemoteProtocolError."""
        if self._told:
            raise RemoteProtocolError("a peer let us read its memory twice")
        self._told = True
        if self._own is None:
            return
        try:
            self._process = ProcessMemory(self._connection.peer_process, Token(*unpack_token(key)))
        except OSError as error:
            events.info("large messages of a peer are copied twice, as its memory cannot be read: %s", error)
            return
        self._connection.tell(pack_header(Kind.MAPPED, length=PROCESS))

    def on_unmap(self, number: int) -> None:
        """UNMAP: the segment goes with the last view of it. It may never have been mapped, or not be read yet."""
        if number not in self._borrowed:
            self._connection.forsake(number)
        self._borrowed.pop(number, None)

    def borrow(self, number: int, offset: int, length: int) -> memoryview | RemoteBytes:
        """Memory of the peer. Raises RemoteProtocolError if it has not offered that."""
        if number == PROCESS and self._process is not None:
            if offset + length > MAX_ADDRESS:
                raise RemoteProtocolError(f"a peer lent {length} bytes at {offset:#x} of its process")
            return RemoteBytes(self._process, offset, length)
        segment = self._borrowed.get(number)
        if segment is None:
            raise RemoteProtocolError(f"a peer lent of segment {number}, which is not mapped here")
        if offset > segment.size or length > segment.size - offset:
            raise RemoteProtocolError(f"a peer lent {length} bytes at {offset} of a segment of {segment.size}")
        return segment.view[offset : offset + length]

    def copy(self, stream: Stream, source: memoryview | RemoteBytes, done: Callable[[bool], None]) -> None:
        """Have a lent message copied by and by; `done(copied)` is called then, unless nobody wants it by then."""
        self.copies.append(Borrowing(stream, source, done))

    def advance(self) -> None:
        """Copy COPY_BYTES of what was lent, in turns."""
        left = COPY_BYTES
        copies = self.copies
        while copies and left > 0:
            borrowing = copies.popleft()
            copied = borrowing.advance(min(left, COPY_BYTES // 2))
            if copied:
                left -= copied
                copies.append(borrowing)

    def close(self) -> None:
        """The connection has ended."""
        self.copies.clear()
        self._borrowed.clear()
        self._lent.clear()
        self._process = None


def place_of(
    payload: memoryview, arrays: SharedArrays, own: OwnMemory | None, maps: Callable[[int], bool]
) -> tuple[int, int] | None:
    """Segment and offset of a payload that others can read, else None; `maps(segment)`: whether they have it."""
    address = address_of(payload)
    found = arrays.find(address, len(payload))
    if found is not None and maps(found[0]):
        return found
    if own is not None and maps(PROCESS) and own.lendable(address, len(payload)):
        return PROCESS, address
    return None
