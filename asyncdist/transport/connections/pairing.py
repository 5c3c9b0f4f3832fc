"""Pairing: two ranks that have connected offer each other memory, and agree to use it or not to."""

from __future__ import annotations

import errno
import os
import secrets
import socket

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.context import MeshContext
from asyncdist.transport.host_memory import MIN_RING_BYTES, RING_BYTES
from asyncdist.transport.shared_memory.doorbell import Ringer
from asyncdist.transport.shared_memory.parcel import READY, REFUSAL, SETUP, Parcel, close_all, send_parcel
from asyncdist.transport.shared_memory.ring import RingReader, RingWriter, half_bytes
from asyncdist.transport.shared_memory.segment import AttachedSegment, Segment

__all__ = ["Pairing"]

_numbers: dict[int, int] = {}


class Pairing:
    """One side. `refusal` says why there will be no shared memory; the rest is what is to be used if there will.

    Whoever cannot map what the other has offered refuses as well, so that both know before a frame is sent.
    """

    __slots__ = ("_memory", "_peer_half", "half", "peer_process", "refusal", "ringer")

    def __init__(self, context: MeshContext) -> None:
        config = context.config
        self.half: Segment | None = None
        self.ringer: Ringer | None = None
        self.peer_process = -1  # until its SETUP has come
        self.refusal = "" if config.shares_memory else f"the transport is {config.transport} here"
        self._memory = context.memory
        self._peer_half: AttachedSegment | None = None

    def offer(self, sock: socket.socket) -> None:
        """Say the first word. Raises OSError."""
        memory = self._memory
        if not self.refusal:
            try:
                self.half = memory.new_ring()
                fds = (self.half.fd, memory.doorbell.page.fd, memory.doorbell.eventfd)
                send_parcel(sock, SETUP, _process_number(), self.half.size, fds)
                return
            except (OSError, AttributeError) as error:  # no descriptors, no memory, or no Linux
                self.refusal = f"this rank cannot: {error}"
                self.close()
        send_parcel(sock, REFUSAL)

    def take(self, sock: socket.socket, parcel: Parcel) -> bool | None:
        """Hear the peer. True: both are ready; False: one refuses, and the socket is a plain stream from here on.

        None: it has more to say. Raises RemoteProtocolError, OSError.
        """
        if parcel.kind == REFUSAL:
            self.refusal = self.refusal or "the peer cannot, or was told not to"
            return False
        if parcel.kind == SETUP and self.peer_process < 0:
            self.peer_process = parcel.number
            if self.half is None:  # so we have refused, and the peer says nothing more
                close_all(parcel.fds)
                return False
            try:
                self._map(parcel)
            except OSError as error:
                self.refusal = f"this rank cannot: {error}"
            send_parcel(sock, REFUSAL if self.refusal else READY)
            return None
        if parcel.kind == READY and self.peer_process >= 0:
            return not self.refusal
        close_all(parcel.fds)
        raise RemoteProtocolError(f"a peer sent a parcel of kind {parcel.kind} where it may not")

    @property
    def peer_is_here(self) -> bool:
        """Whether the peer lives in this very process."""
        return self.peer_process == _process_number()

    def rings(self) -> tuple[RingReader, RingWriter]:
        """The rings, once both are ready. Our descriptor has done its work then."""
        half, peer = self.half, self._peer_half
        assert half is not None
        assert peer is not None
        half.close()
        return RingReader(half.view, peer.view), RingWriter(half.view, peer.view)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if self.half is not None:
            self._memory.free_ring(self.half)
        if self.ringer is not None:
            self.ringer.close()
        self.half = self.ringer = self._peer_half = None

    def _map(self, parcel: Parcel) -> None:
        if not parcel.fds:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        half_fd, page_fd, eventfd = parcel.fds
        try:
            if not half_bytes(MIN_RING_BYTES) <= parcel.size <= half_bytes(RING_BYTES):
                raise RemoteProtocolError(f"a peer's ring has {parcel.size} bytes, which none has")
            fd, half_fd = half_fd, -1
            half = AttachedSegment(fd, parcel.size)
            fd, page_fd = page_fd, -1
            page = AttachedSegment(fd, self._memory.doorbell.page.size)
            if not os.readlink(f"/proc/self/fd/{eventfd}").startswith("anon_inode:[eventfd"):
                raise RemoteProtocolError("what a peer passed as its doorbell is no eventfd")
            os.set_blocking(eventfd, False)
        except BaseException:
            close_all(fd for fd in (half_fd, page_fd, eventfd) if fd >= 0)
            raise
        self._peer_half = half
        self.ringer = Ringer(self._memory.fds, eventfd, page)


def _process_number() -> int:
    """A number of this process that no other has: containers count their processes apart, each from 1."""
    pid = os.getpid()
    if pid not in _numbers:  # a forked child is another process
        _numbers.clear()
        _numbers[pid] = secrets.randbits(32)
    return _numbers[pid]
