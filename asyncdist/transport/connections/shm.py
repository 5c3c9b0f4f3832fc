"""ShmConnection: frames between two ranks of one host through shared memory, beside the Unix socket that joined them.

The two first agree: each offers memory, and uses that of the other only if both can (`Pairing`). The socket stays: it
passes descriptors, and its end tells at once that the peer has gone. What the peer put into its ring before it went is
still there then, and is read first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final

from asyncdist.concurrency import trace as events
from asyncdist.errors import ClosedError, RemoteProtocolError
from asyncdist.transport.connections.connection import MAX_CALL_FRAMES, Connection, OnEnd
from asyncdist.transport.context import MeshContext
from asyncdist.transport.host_memory import MIN_RING_BYTES, RING_BYTES
from asyncdist.transport.protocol.frame import MAX_CALL_BYTES, Kind, pack_header
from asyncdist.transport.protocol.operations import NO_GOODBYE
from asyncdist.transport.protocol.output_queue import nothing
from asyncdist.transport.protocol.peer import PeerCore
from asyncdist.transport.protocol.zero_copy import ZeroCopy
from asyncdist.transport.shared_memory.doorbell import Ringer
from asyncdist.transport.shared_memory.ring import PART_BYTES, SENT, RingReader, RingWriter, half_bytes
from asyncdist.transport.shared_memory.segment import (
    ARENA,
    LENT,
    READY,
    REFUSAL,
    SEGMENT,
    SETUP,
    AttachedSegment,
    Parcel,
    ParcelReader,
    Segment,
    close_all,
    send_parcel,
)

MAX_PEER_SEGMENTS: Final = 4096
"""Segments of one peer that may be mapped here without having been taken: arrays that live in shared memory."""

_CREDENTIALS: Final = struct.Struct("i2I")
"""struct ucred: process, user and group."""


class ShmConnection(Connection):
    """A connection whose frames travel in two rings of shared memory.

    `on_refused(connection, sock, reason)` is called instead of `on_end`, before any frame, if one side cannot share
    memory: the socket is the caller's then, for a stream.
    """

    def __init__(
        self,
        context: MeshContext,
        sock: socket.socket,
        core: PeerCore,
        label: str,
        on_end: OnEnd,
        on_refused: Callable[[ShmConnection, socket.socket, str], None],
    ) -> None:
        super().__init__(context, sock, core, f"shm beside {label}", on_end)
        self.socket_label = label
        self.attached: dict[int, AttachedSegment | None] = {}  # by number; None: cannot be mapped here
        self._memory = context.memory
        self._on_refused = on_refused
        self._parcels = ParcelReader()
        self._numbers: set[int] = set()
        self._pairing = Pairing(context)
        self._reader: RingReader | None = None
        self._writer: RingWriter | None = None
        self.ringer: Ringer | None = None
        self._ring: Callable[[], None] = nothing
        self.zero_copy = ZeroCopy(self, self._memory.arrays, self._memory.own)
        self._copying = False
        self._blocked = False
        self._hung_up = -1  # else where its stream ends

    def start(self) -> None:
        """Offer to share memory; bytes flow once the peer has offered it too."""
        sock = self._sock
        assert sock is not None
        self._loop.add_reader(sock.fileno(), self._parcel_came)
        try:
            self._pairing.offer(sock)
        except OSError as error:
            self._loop.call_soon(self._end, error)

    def forget(self) -> None:
        """In a forked child: the descriptors are closed already, and the loop must not be touched."""
        self._sock = None
        if self._writer is None:  # what is posted must be refused, not wait for a peer's offer
            with contextlib.suppress(ClosedError):
                self._core.open(self._write, self._arm)

    def share(self, number: int, segment: Segment | AttachedSegment, *, lend: bool = False) -> None:
        """Have the peer map `segment` under `number`, once. Raises OSError, ClosedError."""
        sock = self._open_socket()
        if number not in self._numbers:
            send_parcel(sock, LENT if lend else SEGMENT, number, segment.size, (segment.fd,))
            self._numbers.add(number)

    def unshare(self, number: int) -> None:
        """We have no segment of that number any more: should the peer not have taken it, it need not keep it for us."""
        if number in self._numbers:
            self._numbers.discard(number)
            self.tell(pack_header(Kind.UNMAP, length=number))

    def detach(self, number: int) -> None:
        """The peer has no segment of that number any more."""
        self._read_parcels(number)  # the segment was passed before it was given up
        segment = self.attached.pop(number, None)
        if segment is not None:
            segment.close()

    def offer(self, number: int) -> None:
        """Have the peer map a segment of our arrays. Raises OSError, ClosedError."""
        segment = self._memory.arrays.segment(number)
        send_parcel(self._open_socket(), ARENA, number, segment.size, (segment.fd,))

    @property
    def peer_process(self) -> int:
        """The process of the peer, as the kernel numbers it for us. Raises OSError, also where it is another user's.

        That process made the socket. A rank with the right to read all processes would else read from any process that
        now has that number: a token that the peer chose does not say whose it is.
        """
        if self._sock is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        found = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process: int
        process, user, _group = _CREDENTIALS.unpack(found)
        if user != os.geteuid():
            raise PermissionError(errno.EPERM, f"process {process} belongs to another user")
        return process

    def tell(self, frame: bytes) -> None:
        """Send a frame in line with messages."""
        if self._sock is not None:
            self._core.send_frame(frame)

    def segment(self, number: int) -> AttachedSegment:
        """The peer's segment `number`. Raises RemoteProtocolError if it passed none, OSError if we cannot map it."""
        self._read_parcels(number)  # the segment was passed before whatever names it
        if number not in self.attached:
            raise RemoteProtocolError(f"a peer refers to segment {number}, which it has not passed")
        found = self.attached[number]
        if found is None:
            raise OSError(errno.EMFILE, f"segment {number} of a peer could not be mapped")
        return found

    def take_segment(self, number: int) -> AttachedSegment:
        """The same, to be kept by the caller: it is unmapped with the last view of it, not with the connection."""
        found = self.segment(number)
        del self.attached[number]
        return found

    # -- the socket

    def _read_parcels(self, number: int) -> None:
        """Look for the parcel of a segment, unless that is here."""
        if number not in self.attached and self._sock is not None and self._hung_up < 0:
            self._parcel_came()

    def _parcel_came(self) -> None:
        try:
            while self._sock is not None:
                parcel = self._parcels.read(self._sock)
                if parcel is None:
                    self._eof()
                    return
                if self._take(self._sock, parcel):
                    return
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, RemoteProtocolError) as error:
            self._end(error)

    def _take(self, sock: socket.socket, parcel: Parcel) -> bool:
        """Act on a parcel; True if what follows on the socket is not for us. Raises RemoteProtocolError, OSError."""
        if self._writer is not None:
            self._attach(parcel)
            return False
        agreed = self._pairing.take(sock, parcel)
        if agreed:
            self._open()
        elif agreed is False:
            self._sock = None
            self._loop.remove_reader(sock.fileno())
            self._give_back()
            self._on_refused(self, sock, self._pairing.refusal)
            return True
        return False

    def _attach(self, parcel: Parcel) -> None:
        """Map a segment; a failure is only told when the segment is asked for."""
        if parcel.kind == ARENA:
            self.zero_copy.attach(parcel)
            return
        if (
            parcel.kind not in (SEGMENT, LENT)
            or len(self.attached) >= MAX_PEER_SEGMENTS
            or parcel.number in self.attached
        ):
            close_all(parcel.fds)
            raise RemoteProtocolError(f"a peer sent a parcel of kind {parcel.kind} where it may not")
        try:
            if not parcel.fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            fds = self._memory.fds if parcel.kind == LENT else None
            self.attached[parcel.number] = AttachedSegment(parcel.fds[0], parcel.size, fds)
        except OSError as error:
            events.info("a segment of %d bytes of %s cannot be mapped: %s", parcel.size, self.label, error)
            self.attached[parcel.number] = None

    def _open(self) -> None:
        """Both sides have mapped what the other offered."""
        pairing = self._pairing
        self._reader, self._writer = pairing.rings()
        self.ringer = pairing.ringer
        assert self.ringer is not None
        self._ring = self.ringer.ring
        self._memory.doorbell.add(self._poll)
        self._memory.joined(self._core.peer_rank, self, crowded=pairing.peer_is_here)
        self._core.open(self._write, self._arm, self.zero_copy)
        self.zero_copy.open()
        if self._leaving and self._sock is not None:
            self._say_goodbye()
        self._loop.call_soon(self._poll)  # what came before we could be rung for it

    def _eof(self) -> None:
        """The peer has hung up, or is dead: what it had put into its ring by then is read first."""
        if self._sock is not None and self._hung_up < 0:
            self._loop.remove_reader(self._sock.fileno())
            self._hung_up = 0 if self._reader is None else self._reader.sent
            self._loop.call_soon(self._drain)  # not at once: what asked for a parcel may be a frame that is being read

    def _drain(self) -> None:
        reader = self._reader
        if self._sock is None:
            return
        if reader is not None and not self._core.left and reader.taken < self._hung_up:
            before = reader.taken
            self._readable()
            if reader.taken > before:
                self._loop.call_soon(self._drain)
                return
        gone = ConnectionResetError(NO_GOODBYE)
        self._end(None if self._core.left else gone)

    # -- the rings

    def _poll(self) -> bool:
        """Take what came, and write on where there is room again; whether there was anything."""
        reader, writer = self._reader, self._writer
        if self._sock is None or reader is None or writer is None:
            return False
        found = reader.words[SENT] != reader.taken
        if not (found or self._blocked):  # as nearly always, and a look asks all connections
            return False
        if found:
            self._readable()
        try:
            room = self._blocked and self._sock is not None and writer.has_room()
        except RemoteProtocolError as error:
            self._end(error)
            return True
        if room:
            self._writable()
        return found or room

    def _readable(self) -> None:
        reader = self._reader
        assert reader is not None
        received = frames = 0
        try:
            while received < MAX_CALL_BYTES and frames < MAX_CALL_FRAMES and self._sock is not None:
                nbytes = reader.read_into(self._get_buffer())
                if not nbytes:
                    break
                received += nbytes
                frames += self._updated(nbytes)
                if nbytes >= PART_BYTES and reader.writer_waits():
                    self._ring()
                if reader.words[SENT] == reader.taken:
                    break
            else:
                self._loop.call_soon(self._poll)
        except Exception as error:
            self._fail(error)
            return
        self.bytes_received += received
        if self._sock is None:
            return
        if reader.writer_waits():
            self._ring()
        if self.zero_copy.copies and not self._copying:
            self._copy()
        if self._leaving or self._frames.left:
            self._took()

    def _copy(self) -> None:
        """Copy a part of what the peer has exposed; the rest in later turns of the loop."""
        self._copying = False
        if self._sock is None:
            return
        self.zero_copy.advance()
        self._core.kick()
        if self.zero_copy.copies:
            self._copying = True
            self._loop.call_soon(self._copy)

    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        writer = self._writer
        if self._sock is None or writer is None:
            raise self._closed_here()
        try:
            sent = writer.write(buffers, self._ring)
        except RemoteProtocolError as error:
            self._loop.call_soon(self._end, error)
            return 0
        if sent:
            self.bytes_sent += sent
            self._ring()
        return sent

    def _arm(self) -> None:
        writer = self._writer
        if not self._blocked and self._sock is not None and writer is not None:
            self._blocked = True
            try:
                room = writer.wait_for_room()
            except RemoteProtocolError as error:
                self._loop.call_soon(self._end, error)
                return
            if room:
                self._loop.call_soon(self._poll)

    def _writable(self) -> None:
        self._blocked = False
        self._core.flush()  # arms us again if anything is left
        if self._leaving:
            self._shut_when_done()

    # -- ending

    def _say_goodbye(self) -> None:
        if self._writer is not None:  # else once there is one
            super()._say_goodbye()

    def _release(self) -> bool:
        sock, self._sock = self._sock, None
        if sock is None:
            return False
        self._loop.remove_reader(sock.fileno())
        self._sockets.close(sock)
        self._give_back()
        return True

    def _open_socket(self) -> socket.socket:
        if self._sock is None:
            raise self._closed_here()
        return self._sock

    def _give_back(self) -> None:
        self._parcels.close()
        self._pairing.close()
        if self._writer is not None:
            self._memory.doorbell.remove(self._poll)
            self._memory.parted(self._core.peer_rank)
        self._reader = self._writer = self.ringer = None
        self._ring = nothing
        for number in list(self.attached):
            self.detach(number)
        self.zero_copy.close()


_numbers: dict[int, int] = {}


class Pairing:
    """One side. `refusal` says why there will be no shared memory; the rest is what is to be used if there will.

    A side that cannot map what the other has offered refuses as well, so that both know before a frame is sent.
    """

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
