"""Segments: memory one rank writes and the ranks beside it read. Linux only.

A segment is a memfd: it has no name, so nothing is left behind however its processes end, and no file system limits
it. Only its owner maps it writable; before the descriptor is given away the size and the mapping are sealed, so that a
reader can neither be killed by a shrunken file (SIGBUS) nor write into the owner's memory. A reader checks the seals
before it maps, because the owner is not to be trusted either.

Descriptors of segments are passed in parcels, beside a stream between two ranks of one host. A parcel has a fixed size:

    kind u32 | number u32 | size u64        little-endian, with the kind's descriptors attached to its first byte

| kind | descriptors | meaning |
| --- | --- | --- |
| SETUP | half of a pair, doorbell page, eventfd | let us share memory; `size`: of the half, `number`: of our process |
| READY | | your SETUP is in place here |
| REFUSAL | | let us not; nothing but the stream follows |
| SEGMENT | segment | from now on `number` names a segment of `size` bytes in what the sender refers to |
| ARENA | segment | the same, of arrays: what lies in it may be exposed once the peer says MAPPED |
| LENT | segment | as SEGMENT, but the peer keeps the descriptor, with which it may lend the segment to others |

Both sides open with SETUP or REFUSAL. A side that has said SETUP and hears SETUP answers READY, or REFUSAL if the
descriptors did not arrive or cannot be mapped. Memory is shared if both said READY.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.fork import SocketSet

PAGE_BYTES: Final = mmap.PAGESIZE
MAX_SEGMENT_BYTES: Final = 1 << 40
"""Largest segment a peer may ask us to map. Only address space is spent; a terabyte is far beyond any array."""

_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEAL_SEAL: Final = 0x1
_SEAL_SHRINK: Final = 0x2
_SEAL_GROW: Final = 0x4
_SEAL_FUTURE_WRITE: Final = 0x10
_MAPPING: Final[dict[str, Any]] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Older versions keep a descriptor of their own open per mapping, which has no use here."""
_SEALS: Final = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE

SETUP: Final = 1
REFUSAL: Final = 2
SEGMENT: Final = 3
READY: Final = 4
ARENA: Final = 5
LENT: Final = 6
_PARCEL: Final = struct.Struct("<IIQ")
_DESCRIPTORS: Final = {SETUP: 3, REFUSAL: 0, SEGMENT: 1, READY: 0, ARENA: 1, LENT: 1}
_MAX_DESCRIPTORS: Final = 3
"""Most descriptors taken with one read: what one parcel has. Linux drops the rest by itself."""


class Segment:
    """Memory of our own, zeroed. `view` is writable; `fd`, one of `fds`, is for peers to attach to.

    Raises OSError where there is none to be had.
    """

    def __init__(self, size: int, fds: SocketSet, name: str = "asyncdist") -> None:
        import fcntl

        self.size = -(-size // PAGE_BYTES) * PAGE_BYTES
        self._fds = fds
        self.fd = fds.add_fd(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            os.ftruncate(self.fd, self.size)
            self._map = mmap.mmap(self.fd, self.size, **_MAPPING)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)
        except BaseException:
            self.close()
            raise
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last view of it. Idempotent."""
        self._fds.close_fd(self.fd)
        self.fd = -1

    def release(self) -> None:
        """Unmap it as well. All views of `view` must have been released."""
        self.close()
        self.view.release()
        self._map.close()


class AttachedSegment:
    """A peer's segment, read-only. Takes `fd` and closes it; with `fds` it is one of those until `close`.

    Raises RemoteProtocolError unless the descriptor is a memfd of exactly `size` bytes that can change no more, OSError
    if this process has no descriptor or address space left for it.
    """

    def __init__(self, fd: int, size: int, fds: SocketSet | None = None) -> None:
        import fcntl

        self.fd = -1
        self._fds = fds
        try:
            if not 0 < size <= MAX_SEGMENT_BYTES:
                raise RemoteProtocolError(f"a segment of {size} bytes: at most {MAX_SEGMENT_BYTES} are mapped")
            try:
                seals = fcntl.fcntl(fd, _F_GET_SEALS)
            except OSError:
                raise RemoteProtocolError("what a peer passed as a segment is no memfd") from None
            if seals & _SEALS != _SEALS:
                raise RemoteProtocolError(f"a peer's segment is not sealed (seals {seals:#x})")
            if os.fstat(fd).st_size != size:
                raise RemoteProtocolError(f"a peer's segment has {os.fstat(fd).st_size} bytes, {size} were announced")
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ, **_MAPPING)
            if fds is not None:
                self.fd, fd = fds.add_fd(fd), -1
        finally:
            if fd >= 0:
                os.close(fd)
        self.size = size
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Give the descriptor back, if it was kept; the memory goes with the last view of it. Idempotent."""
        if self._fds is not None:
            self._fds.close_fd(self.fd)
        self.fd = -1

    def release(self) -> None:
        """Unmap it. All views of `view` must have been released."""
        self.view.release()
        self._map.close()


def segments_available() -> bool:
    """Whether this system has sealed memfds: Linux since 5.1."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return False
    try:
        Segment(PAGE_BYTES, SocketSet(lambda: None)).close()
    except OSError:
        return False
    return True


class Parcel(NamedTuple):
    """One record. Its taker owns the descriptors: none where this process could take no more."""

    kind: int
    number: int
    size: int
    fds: tuple[int, ...]


def send_parcel(sock: socket.socket, kind: int, number: int = 0, size: int = 0, fds: Sequence[int] = ()) -> None:
    """Send one record with its descriptors. Raises OSError; what is sent is small, so a full socket is an error."""
    sent = socket.send_fds(sock, [_PARCEL.pack(kind, number, size)], list(fds))
    if sent != _PARCEL.size:
        raise BlockingIOError("the peer does not take its parcels")


class ParcelReader:
    """Cuts what a socket delivers into parcels; never reads past the one that is asked for."""

    def __init__(self) -> None:
        self._data = b""
        self._fds: list[int] = []
        self._cut = False

    def read(self, sock: socket.socket) -> Parcel | None:
        """Return the next parcel, or None at the end of the stream.

        Raises BlockingIOError when it is not there yet, OSError, and RemoteProtocolError for what is no parcel.
        """
        while len(self._data) < _PARCEL.size:
            wanted = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            data, fds, flags, _address = socket.recv_fds(sock, _PARCEL.size - len(self._data), _MAX_DESCRIPTORS, wanted)
            self._fds += fds
            self._cut |= bool(flags & socket.MSG_CTRUNC)
            if len(self._fds) > _MAX_DESCRIPTORS:
                raise RemoteProtocolError("a peer passed more descriptors than a parcel has")
            if not data:
                return None
            self._data += data
        kind, number, size = _PARCEL.unpack(self._data)
        expected = _DESCRIPTORS.get(kind, -1)
        if self._cut and len(self._fds) < expected:
            self.close()  # the kernel had more, but this process has no descriptors left
        elif expected != len(self._fds):
            raise RemoteProtocolError(f"a peer passed {len(self._fds)} descriptors with a parcel of kind {kind}")
        parcel = Parcel(kind, number, size, tuple(self._fds))
        self._data = b""
        self._cut = False
        self._fds.clear()
        return parcel

    def close(self) -> None:
        """Close the descriptors of a parcel of which only a part came."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors without an owner."""
    for fd in fds:
        os.close(fd)
