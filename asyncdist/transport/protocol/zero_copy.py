"""Zero copy: long messages between ranks of one host, which the receiver copies out of the sender's memory.

A sender exposes memory (XPMEM's word; UCX registers it): segments of shared arrays, and its process. A segment is
offered to the peer when a payload in it is first sent. The peer maps the segment and says MAPPED. From then on payloads
in the segment are exposed: the receiver copies them. Until then, and if the peer cannot map it, payloads travel in
frames. The same holds for the memory of this process, where the kernel lets the peer read it.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.concurrency import trace as events
from asyncdist.errors import ClosedError, RemoteProtocolError
from asyncdist.transport.protocol.frame import ZERO_COPY_BYTES, Kind, pack_header, pack_memory, unpack_token
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

__all__ = ["COPY_BYTES", "MAX_ADDRESS", "MAX_ATTACHED", "READ_BYTES", "PendingCopy", "ZeroCopy", "place_of"]

MAX_ATTACHED: Final = 4096
"""Segments of arrays that one peer may have us map. Beyond some sixty the peer makes its segments ever larger."""

READ_BYTES: Final = 4 << 20
"""Shortest payload that the peer reads in our process: of a shorter one it copies parts out while we copy others in."""

MAX_ADDRESS: Final = (1 << 63) - 1
"""Nothing of a process lies beyond, on any system; sums of an address and a length below it never wrap."""

BULK_BYTES: Final = 256 << 10
"""And of one that moves much, as its ranks compute or wait for a network meanwhile: what counts is processor time."""

COPY_BYTES: Final = 2 << 20
"""Bytes copied in one turn of the loop: some 0.2 ms."""

FOLD_BYTES: Final = 512 << 10
"""Bytes read of another process at a time to be reduced: they are still in this core's cache then."""


class SegmentPasser(Protocol):
    """The connection of a `ZeroCopy`."""

    def offer(self, number: int) -> None:
        """Pass a segment of arrays. Raises OSError, ClosedError."""

    def tell(self, frame: bytes) -> None:
        """Send a frame in line with messages."""

    def detach(self, number: int) -> None:
        """The peer has no segment of that number any more, and may have passed it for something else than arrays."""

    @property
    def peer_process(self) -> int:
        """The process of the peer, as the kernel numbers it for us. Raises OSError."""


class PendingCopy:
    """An exposed message on its way from `source` into the place of `stream`, or to what its receive has to fold it.

    `done(copied)` is called with the last byte, or as soon as the source turns out to be unreadable.
    """

    def __init__(self, stream: Stream, source: memoryview | RemoteBytes, done: Callable[[bool], None]) -> None:
        assert stream.view is not None
        self.stream = stream
        self._source = source if isinstance(source, RemoteBytes) else np.frombuffer(source, np.uint8)
        self._target: Array = np.frombuffer(stream.view, np.uint8)
        self._copied = 0
        self._done = done

    def advance(self, nbytes: int) -> int:
        """Copy up to `nbytes` more; returns how many. 0: the copy is over."""
        start = self._copied
        stop = min(start + nbytes, self.stream.total)
        if self.stream.view is None or start == stop:
            return 0
        fold = None if self.stream.receive is None else self.stream.receive.fold
        try:
            if fold is None:
                self._take(start, self._target[start:stop])
            else:
                for first in range(start, stop, FOLD_BYTES):
                    fold(self._octets(first, min(FOLD_BYTES, stop - first)), first)
                    if self.stream.receive is None:  # its operation has failed
                        return 0
        except Unreadable as error:
            events.info("a message exposed by a peer travels after all: %s", error)
            self._done(False)
            return 0
        self._copied = stop
        if stop == self.stream.total:
            self._done(True)
        return stop - start

    def _octets(self, start: int, length: int) -> Array:
        """Octets where they lie, or, of another process, in the first part of the target, which stays in the cache."""
        if not isinstance(self._source, RemoteBytes):
            return self._source[start : start + length]
        self._take(start, self._target[:length])
        return self._target[:length]

    def _take(self, start: int, target: Array) -> None:
        source = self._source
        if isinstance(source, RemoteBytes):
            source.read(start, target)
        else:
            target[:] = source[start : start + target.size]


class ZeroCopy:
    """One connection's side: what this rank exposes, and what it reads of the peer. Without `own` only of segments."""

    def __init__(self, connection: SegmentPasser, arrays: SharedArrays, own: OwnMemory | None = None) -> None:
        self._connection = connection
        self._arrays = arrays
        self._own = own
        self._exposed: dict[int, bool] = {}  # by segment offered, whether the peer has mapped it
        self._attached: dict[int, AttachedSegment] = {}
        self._memory_told = False  # the peer's MEMORY has come
        self._process: ProcessMemory | None = None
        self.copies: deque[PendingCopy] = deque()  # for `advance`

    # Exposing

    def expose(self, payload: memoryview, *, bulk: bool = False) -> tuple[int, int] | None:
        """Segment and offset of a payload that the peer can read in our memory, else None. `bulk`: as `SendOp.bulk`."""
        if len(payload) < (BULK_BYTES if bulk else ZERO_COPY_BYTES):
            return None
        return place_of(payload, self._arrays, self._own if bulk or len(payload) >= READ_BYTES else None, (self,))

    def open(self) -> None:
        """Let the peer read our memory. Called as the connection opens: messages posted from then on come behind."""
        if self._own is not None:
            self._exposed[PROCESS] = False
            self._connection.tell(pack_memory(*self._own.token))

    def exposed(self, number: int) -> bool:
        """Whether the peer has mapped our segment `number`, or reads our process; a new segment is offered to it."""
        mapped = self._exposed.get(number)
        if mapped is None:
            self._exposed[number] = False
            try:
                self._connection.offer(number)
            except (OSError, ClosedError):
                del self._exposed[number]
        return mapped is True

    def on_mapped(self, number: int) -> None:
        """MAPPED: the peer can read this segment, which may be gone meanwhile."""
        if number in self._exposed:
            self._exposed[number] = True

    def stop_exposing_process(self) -> None:
        """The peer could not read what was exposed to it."""
        self._exposed[PROCESS] = False

    def release(self, number: int) -> None:
        """We have no segment of that number any more."""
        if self._exposed.pop(number, None) is not None:
            self._connection.tell(pack_header(Kind.UNMAP, length=number))

    # Reading

    @property
    def reads(self) -> bool:
        """Whether we can read the peer's process, and could whenever we did.

        Known once a message is here that found the connection open.
        """
        return self._process is not None and not self._process.failed

    def attach(self, parcel: Parcel) -> None:
        """The peer has offered a segment: map it, or leave it. Raises RemoteProtocolError."""
        number = parcel.number
        if number in self._attached or len(self._attached) >= MAX_ATTACHED:
            close_all(parcel.fds)
            raise RemoteProtocolError(f"a peer offered segment {number} again, or more than {MAX_ATTACHED}")
        try:
            if not parcel.fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._attached[number] = AttachedSegment(parcel.fds[0], parcel.size)
        except OSError as error:
            events.info("%d bytes of a peer's arrays cannot be mapped and will be copied: %s", parcel.size, error)
            return
        self._connection.tell(pack_header(Kind.MAPPED, length=number))

    def on_memory(self, key: bytes) -> None:
        """MEMORY: the peer lets us read its process. Try that, and say MAPPED. Raises RemoteProtocolError."""
        if self._memory_told:
            raise RemoteProtocolError("a peer let us read its memory twice")
        self._memory_told = True
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
        if number not in self._attached:
            self._connection.detach(number)
        self._attached.pop(number, None)

    def remote(self, number: int, offset: int, length: int) -> memoryview | RemoteBytes:
        """Memory of the peer. Raises RemoteProtocolError if the peer has not exposed that."""
        if number == PROCESS and self._process is not None:
            if offset + length > MAX_ADDRESS:
                raise RemoteProtocolError(f"a peer exposed {length} bytes at {offset:#x} of its process")
            return RemoteBytes(self._process, offset, length)
        segment = self._attached.get(number)
        if segment is None:
            raise RemoteProtocolError(f"a peer exposed a part of segment {number}, which is not mapped here")
        if offset > segment.size or length > segment.size - offset:
            raise RemoteProtocolError(f"a peer exposed {length} bytes at {offset} of a segment of {segment.size}")
        return segment.view[offset : offset + length]

    def copy(self, stream: Stream, source: memoryview | RemoteBytes, done: Callable[[bool], None]) -> None:
        """Have an exposed message copied by and by; `done(copied)` follows unless the stream is abandoned first."""
        self.copies.append(PendingCopy(stream, source, done))

    def advance(self) -> None:
        """Copy COPY_BYTES of exposed messages, in turns."""
        left = COPY_BYTES
        copies = self.copies
        while copies and left > 0:
            pending = copies.popleft()
            copied = pending.advance(min(left, COPY_BYTES // 2))
            if copied:
                left -= copied
                copies.append(pending)

    def close(self) -> None:
        """The connection has ended."""
        self.copies.clear()
        self._attached.clear()
        self._exposed.clear()
        self._process = None


def place_of(
    payload: memoryview, arrays: SharedArrays, own: OwnMemory | None, peers: Sequence[ZeroCopy]
) -> tuple[int, int] | None:
    """Segment and offset of a payload that all `peers` can read, else None. The segment is offered to those without."""
    address = address_of(payload)
    found = arrays.find(address, len(payload))
    if found is not None and _all_read(peers, found[0]):
        return found
    if own is not None and _all_read(peers, PROCESS) and own.readable(address, len(payload)):
        own.use(address, len(payload))
        return PROCESS, address
    return None


def _all_read(peers: Sequence[ZeroCopy], number: int) -> bool:
    """Whether all `peers` can read a segment. Each is asked, also behind one that cannot."""
    return not [peer for peer in peers if not peer.exposed(number)]
