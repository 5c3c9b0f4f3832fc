"""Parcels: descriptors passed beside a stream between two ranks of one host, each announced by a record of fixed size.

    kind u32 | number u32 | size u64        little-endian, with the kind's descriptors attached to its first byte

| kind | descriptors | meaning |
| --- | --- | --- |
| SETUP | half of a pair, doorbell page, eventfd | let us share memory; `size`: of the half, `number`: of our process |
| READY | | your SETUP is in place here |
| REFUSAL | | let us not; nothing but the stream follows |
| SEGMENT | segment | from now on `number` names a segment of `size` bytes in what the sender refers to |
| ARENA | segment | the same, of arrays: what lies in it may be lent once the peer says MAPPED |

Both sides open with SETUP or REFUSAL. Who has said SETUP and hears it answers READY, or REFUSAL if the descriptors did
not arrive or cannot be mapped; memory is shared if both said READY.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from asyncdist.errors import RemoteProtocolError

__all__ = ["ARENA", "READY", "REFUSAL", "SEGMENT", "SETUP", "Parcel", "ParcelReader", "close_all", "send_parcel"]

SETUP: Final = 1
REFUSAL: Final = 2
SEGMENT: Final = 3
READY: Final = 4
ARENA: Final = 5

_RECORD: Final = struct.Struct("<IIQ")
_DESCRIPTORS: Final = {SETUP: 3, REFUSAL: 0, SEGMENT: 1, READY: 0, ARENA: 1}
_MAX_DESCRIPTORS: Final = 3
"""Most descriptors taken with one read: what one record has. Linux drops the rest by itself."""


class Parcel(NamedTuple):
    """One record. Whoever takes it owns the descriptors: none of them where this process could take no more."""

    kind: int
    number: int
    size: int
    fds: tuple[int, ...]


def send_parcel(sock: socket.socket, kind: int, number: int = 0, size: int = 0, fds: Sequence[int] = ()) -> None:
    """Send one record with its descriptors. Raises OSError; what is sent is small, so a full socket is an error."""
    sent = socket.send_fds(sock, [_RECORD.pack(kind, number, size)], list(fds))
    if sent != _RECORD.size:
        raise BlockingIOError("the peer does not take its parcels")


class ParcelReader:
    """Cuts what a socket delivers into parcels; never reads past the one that is asked for."""

    __slots__ = ("_cut", "_data", "_fds")

    def __init__(self) -> None:
        self._data = b""
        self._fds: list[int] = []
        self._cut = False

    def read(self, sock: socket.socket) -> Parcel | None:
        """Return the next parcel, or None at the end of the stream.

        Raises BlockingIOError when it is not there yet, OSError, and RemoteProtocolError for what is no parcel.
        """
        while len(self._data) < _RECORD.size:
            wanted = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            data, fds, flags, _address = socket.recv_fds(sock, _RECORD.size - len(self._data), _MAX_DESCRIPTORS, wanted)
            self._fds += fds
            self._cut |= bool(flags & socket.MSG_CTRUNC)
            if len(self._fds) > _MAX_DESCRIPTORS:
                raise RemoteProtocolError("a peer passed more descriptors than a parcel has")
            if not data:
                return None
            self._data += data
        kind, number, size = _RECORD.unpack(self._data)
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
    """Close descriptors that nobody owns."""
    for fd in fds:
        os.close(fd)
