"""StripedConnection: the frames of a pair over several TCP connections, its *paths*, which may use several interfaces.

What the core writes is one stream of bytes, so messages keep their order. Each write is a *stripe* of that stream and
goes over the next path that takes it; the other side puts the stripes in order. A stripe that comes in its turn goes
straight into the receiver's array, any other waits in memory of its own.

A copy of each stripe is kept until the peer has acknowledged it, so a path may be lost at any time: its stripes go over
the others, and the side that has dialed the pair connects the path anew as soon as it can. The peer is lost with the
last path. A path that is silent for PATH_SILENT_S while there are others counts as lost; the last one is left to the
time of all connections (`keepalive`).

A stripe is a header, then `length` bytes. All integers are little-endian.

| offset | size | field | meaning |
| --- | --- | --- | --- |
| 0 | 8 | offset | of the first byte in the stream |
| 8 | 8 | acknowledged | bytes of the opposite stream that its receiver has handled |
| 16 | 4 | length | at most MAX_STRIPE_BYTES; 0: it only acknowledges |
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from asyncdist.concurrency import trace as events
from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.connections.connection import MAX_CALL_FRAMES, Connection, OnEnd, limit_unsent
from asyncdist.transport.context import MeshContext
from asyncdist.transport.protocol.frame import MAX_CALL_BYTES
from asyncdist.transport.protocol.operations import NO_GOODBYE
from asyncdist.transport.protocol.peer import PeerCore

HEADER: Final = struct.Struct("<QQI")
MAX_STRIPE_BYTES: Final = 2 * MAX_CALL_BYTES
"""More than any core writes at a time: MAX_CALL_BYTES and the frame that exceeds them."""
WINDOW_BYTES: Final = 4 << 20
"""Bytes for each path that may be without an acknowledgement, as much as Linux lets a TCP connection have under way.
Both sides may hold copies of so much."""
ACKNOWLEDGE_BYTES: Final = 512 << 10
"""Bytes handled after which the peer is told, should nothing else be sent to it: a small part of any window."""
SCRATCH_BYTES: Final = 4 << 10
"""Read at a time where a header is next: small stripes together, and little of a large one that is copied for it."""

_DISCARDED: Final = memoryview(bytearray(64 << 10))
"""Where bytes are read that have come before."""


class Path:
    """One TCP connection of a pair, and the stripe that is being read from it."""

    __slots__ = ("end", "fd", "number", "position", "rest", "scratch", "sock", "start", "stash", "unread")

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.sock: socket.socket | None = sock
        self.fd = sock.fileno()
        self.rest: memoryview | None = None  # of a stripe that the kernel has taken in part
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.unread = 0  # bytes of a header in scratch
        self.start = self.position = self.end = 0  # of the stripe, in the stream
        self.stash: bytearray | None = None  # the stripe, where it has come before its turn


@dataclass(slots=True, eq=False)
class _Stripe:
    """Bytes of the stream that the peer has not acknowledged; `path` is None where they are to be sent again."""

    end: int
    data: bytes  # with its header
    path: Path | None


class StripedConnection(Connection):
    """A connection of up to `count` paths, of which `sock` is the first.

    `on_lost(number)` is called when a path is lost while there are others.
    """

    def __init__(
        self,
        context: MeshContext,
        sock: socket.socket,
        core: PeerCore,
        label: str,
        on_end: OnEnd,
        number: int = 0,
        on_lost: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(context, sock, core, label, on_end)
        self._context = context
        self._on_lost = on_lost
        self._paths: deque[Path] = deque((Path(number, sock),))  # the next to be written to first
        self._window = WINDOW_BYTES * context.config.streams
        self._sent = 0  # bytes of the stream written so far
        self._acknowledged = 0  # those of them that the peer has handled
        self._stripes: deque[_Stripe] = deque()  # all others
        self._again: deque[_Stripe] = deque()
        self._wanted = False  # the core waits to be flushed
        self._flush: asyncio.Handle | None = None
        self._handled = 0  # bytes of the peer's stream
        self._told = 0  # those of them that we have acknowledged
        self._early: dict[int, memoryview] = {}  # stripes that have come before their turn
        self._early_bytes = 0
        self._frames_read = 0

    def start(self) -> None:
        """Let bytes flow; what the core has queued goes out at once."""
        self._begin(self._paths[0])
        self._core.open(self._write, self._arm)

    def add(self, number: int, sock: socket.socket) -> None:
        """One path more, or another in place of the one of that number."""
        path = Path(number, sock)
        old = next((each for each in self._paths if each.number == number), None)
        self._paths.append(path)
        self._begin(path)
        if old is not None:
            self._lose(old, ConnectionResetError("the peer has connected it anew"))
        self._flush_soon()

    def forget(self) -> None:
        """In a forked child: the descriptors are closed already, and the loop must not be touched."""
        self._sock = None
        self._paths.clear()

    def _begin(self, path: Path) -> None:
        sock = path.sock
        assert sock is not None
        limit_unsent(sock)
        self._loop.add_reader(path.fd, self._readable, path)
        self._context.keepalive.add(path, sock, partial(self._lose, path))
        self._context.path_watch.add(path, sock, partial(self._silent, path))

    # -- reading

    def _readable(self, path: Path) -> None:
        """Read all there is, or an error: of one behind data, uvloop tells only once."""
        received = 0
        self._frames_read = 0
        while path.sock is not None:
            buffer = self._place(path)
            try:
                nbytes = path.sock.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._lose(path, error)
                return
            if not nbytes:
                self._lose(path, ConnectionResetError(NO_GOODBYE))
                return
            received += nbytes
            try:
                if path.position < path.end:
                    self._took_part(path, nbytes)
                else:
                    self._read_stripes(path, nbytes)
            except Exception as error:
                self._fail(error)
                return
            if received >= MAX_CALL_BYTES or self._frames_read >= MAX_CALL_FRAMES:
                self._loop.call_soon(self._readable, path)
                break
        self.bytes_received += received
        if self._frames.left or self._handled - self._told >= ACKNOWLEDGE_BYTES:
            self._acknowledge(path)
        if self._leaving or self._frames.left:
            self._took()

    def _place(self, path: Path) -> memoryview:
        """Where the next bytes of a path belong."""
        left = path.end - path.position
        if not left:
            return path.scratch[path.unread :]
        if path.stash is not None:
            return memoryview(path.stash)[path.position - path.start :]
        if path.position < self._handled:
            return _DISCARDED[: min(left, self._handled - path.position)]
        return self._get_buffer()[:left]

    def _read_stripes(self, path: Path, nbytes: int) -> None:
        """Handle what is in scratch: headers, whole stripes, and the front of the last one."""
        data = path.scratch[: path.unread + nbytes]
        path.unread = 0
        while len(data) >= HEADER.size and self._sock is not None:
            self._begin_stripe(path, *HEADER.unpack_from(data))
            data = data[HEADER.size :]
            while data and path.position < path.end and self._sock is not None:
                place = self._place(path)
                here = min(len(place), len(data))
                place[:here] = data[:here]
                data = data[here:]
                self._took_part(path, here)
        if data:
            path.unread = len(data)
            path.scratch[: len(data)] = bytes(data)

    def _begin_stripe(self, path: Path, offset: int, acknowledged: int, length: int) -> None:
        if acknowledged > self._sent:
            raise RemoteProtocolError(f"the peer acknowledged {acknowledged} bytes of {self._sent}")
        if length > MAX_STRIPE_BYTES or offset + length > self._handled + self._window + MAX_STRIPE_BYTES:
            raise RemoteProtocolError(
                f"the peer sent bytes {offset} to {offset + length}, of which {self._handled} are handled"
            )
        path.start = path.position = offset
        path.end = offset + length
        path.stash = bytearray(length) if length and offset > self._handled else None
        if acknowledged > self._acknowledged:
            self._acknowledged = acknowledged
            stripes = self._stripes
            while stripes and stripes[0].end <= acknowledged:
                stripes.popleft()
            if self._wanted or self._again:
                self._flush_soon()

    def _took_part(self, path: Path, nbytes: int) -> None:
        """So many bytes came into place."""
        in_turn = path.stash is None and path.position == self._handled
        path.position += nbytes
        if in_turn:
            self._handled += nbytes
            self._frames_read += self._updated(nbytes)
        if path.position < path.end or self._sock is None:
            return
        stash, path.stash = path.stash, None
        if stash is not None and path.end > self._handled:
            start = max(path.start, self._handled)
            self._early_bytes += path.end - start - len(self._early.get(start, b""))
            self._early[start] = memoryview(stash)[start - path.start :]
            if self._early_bytes > self._window + MAX_STRIPE_BYTES:
                raise RemoteProtocolError(f"the peer sent {self._early_bytes} bytes before their turn")
        while self._sock is not None and (early := self._early.pop(self._handled, None)) is not None:
            self._early_bytes -= len(early)
            self._hand_over(early)

    def _hand_over(self, data: memoryview) -> None:
        while data and self._sock is not None:
            place = self._get_buffer()
            here = min(len(place), len(data))
            place[:here] = data[:here]
            data = data[here:]
            self._handled += here
            self._frames_read += self._updated(here)

    # -- writing

    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Take all of `buffers` as one stripe, or nothing."""
        if self._again or self._sent - self._acknowledged >= self._window:
            return 0
        path = self._free_path()
        if path is None:
            return 0
        nbytes = sum(map(len, buffers))
        data = b"".join((HEADER.pack(self._sent, self._handled, nbytes), *buffers))
        self._told = self._handled
        self._sent += nbytes
        self._stripes.append(_Stripe(self._sent, data, path))
        self._send(path, data)
        return nbytes

    def _free_path(self) -> Path | None:
        """The next path in turn that can be written to."""
        if self._sock is None:
            raise self._closed_here()
        paths = self._paths
        for _ in range(len(paths)):
            path = paths[0]
            paths.rotate(-1)
            if path.rest is None:
                return path
        return None

    def _acknowledge(self, path: Path) -> None:
        """Send an acknowledgement over `path`, unless a stripe is under way there: the next stripe carries it."""
        if path.sock is not None and path.rest is None:
            self._told = self._handled
            self._send(path, HEADER.pack(0, self._handled, 0))

    def _send(self, path: Path, data: bytes) -> None:
        assert path.sock is not None
        sent = 0
        try:
            sent = path.sock.send(data)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            path.rest = memoryview(data)  # it takes nothing more
            self._loop.call_soon(self._read_out, path, error)
            return
        self.bytes_sent += sent
        if sent < len(data):
            path.rest = memoryview(data)[sent:]
            self._loop.add_writer(path.fd, self._writable, path)

    def _writable(self, path: Path) -> None:
        if path.sock is None or path.rest is None:
            return
        try:
            sent = path.sock.send(path.rest)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._loop.remove_writer(path.fd)
            self._read_out(path, error)
            return
        self.bytes_sent += sent
        path.rest = path.rest[sent:]
        if not path.rest:
            path.rest = None
            self._loop.remove_writer(path.fd)
            self._flush_now()

    def _arm(self) -> None:
        self._wanted = True
        if self._sent - self._acknowledged < self._window and any(path.rest is None for path in self._paths):
            self._flush_soon()  # the core has only had its share of this turn

    def _flush_soon(self) -> None:
        if self._flush is None and self._sock is not None:
            self._flush = self._loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        """Write to paths that have room: lost stripes first, then what the core has queued."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        while self._again and self._sock is not None:
            if self._again[0].end <= self._acknowledged:
                self._again.popleft()
                continue
            path = self._free_path()
            if path is None:
                return
            stripe = self._again.popleft()
            stripe.path = path
            self._send(path, stripe.data)
        if self._wanted:
            self._wanted = False
            self._core.flush()
        if self._sock is not None and self._handled - self._told >= ACKNOWLEDGE_BYTES:
            path = self._free_path()
            if path is not None:
                self._acknowledge(path)
        if self._leaving:
            self._shut_when_done()

    # -- the end of a path

    def _silent(self, path: Path, error: Exception) -> None:
        """Its host has acknowledged nothing for a while; so may the others, then the last is kept."""
        if len(self._paths) > 1:
            self._lose(path, error)
        elif path.sock is not None:
            self._context.path_watch.add(path, path.sock, partial(self._silent, path))

    def _read_out(self, path: Path, error: OSError) -> None:
        """It cannot be written to: what the peer sent before it broke off, perhaps its goodbye, is still to be read."""
        while path.sock is not None:
            before = self.bytes_received
            self._readable(path)
            if self.bytes_received == before:
                self._lose(path, error)

    def _lose(self, path: Path, error: Exception) -> None:
        if path.sock is None:
            return
        self._close(path)
        self._paths.remove(path)
        if not self._paths or (self._core.goodbye_sent and not self._stripes):
            self._end(None if self._core.left else error)
            return
        events.info("%s: path %d is lost, %d left: %s", self.label, path.number, len(self._paths), error)
        for stripe in self._stripes:
            if stripe.path is path:
                stripe.path = None
        self._again = deque(stripe for stripe in self._stripes if stripe.path is None)
        self._told = 0  # what was told over this path may not have come
        self._flush_soon()
        self._on_lost(path.number)

    def _close(self, path: Path) -> None:
        sock, path.sock = path.sock, None
        if sock is not None:
            self._loop.remove_reader(path.fd)
            self._loop.remove_writer(path.fd)
            self._context.keepalive.remove(path)
            self._context.path_watch.remove(path)
            self._sockets.close(sock)

    # -- the end

    def _shut_when_done(self) -> None:
        """Once the peer has handled our goodbye, which may have to be sent again until then."""
        if self._sock is not None and self._core.goodbye_sent and not self._stripes and not self._shut:
            self._shut = True
            for path in self._paths:
                if path.sock is not None:
                    try:
                        path.sock.shutdown(socket.SHUT_WR)
                    except OSError as error:
                        self._loop.call_soon(self._lose, path, error)

    def _release(self) -> bool:
        if self._sock is None:
            return False
        self._sock = None
        if self._flush is not None:
            self._flush.cancel()
        for path in self._paths:
            self._close(path)
        self._early.clear()
        self._stripes.clear()
        self._again.clear()
        return True
