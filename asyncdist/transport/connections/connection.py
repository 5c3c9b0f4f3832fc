"""Connection: what a connection to a peer is to its link; and those through a socket, and from a rank to itself.

A `StreamConnection` is the shell around a peer's core: one raw non-blocking socket, TCP or Unix, on any event loop. Raw
sockets with `add_reader` rather than a transport, because only they tell when a message's buffer is free, read straight
into the receiver's array, and can be written to and waited for at once on both loops. Never the loop's own `sock_*`
coroutines: a cancelled one leaves its callback registered.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from asyncdist.errors import ClosedError, RemoteProtocolError
from asyncdist.transport.context import MeshContext
from asyncdist.transport.keepalive import set_keepalive
from asyncdist.transport.protocol.frame import MAX_CALL_BYTES
from asyncdist.transport.protocol.operations import NO_GOODBYE
from asyncdist.transport.protocol.peer import PeerCore

MAX_CALL_FRAMES: Final = 256
"""Frames handled in one callback: at some 3 us each, more would hold the loop for over a millisecond."""

UNSENT_BYTES: Final = 512 << 10
"""What the kernel takes of a connection to another host beyond what it has sent. All that is written later waits behind
it, such as small messages and what tells of a loss; 10 Gbit/s carry it in the 0.4 ms that a loop may be busy."""
LOOK_AGAIN_S: Final = 0.1
"""After something was read. Where data and a reset of the connection come together, uvloop tells of both in one call
and of nothing more: a rank that only receives would never know. Asking at once would be a system call each time."""
MAX_QUEUED_BYTES: Final = 2 * MAX_CALL_BYTES
"""Bytes on their way to ourselves before the writer says it is full, as a socket's buffer would."""


OnEnd: TypeAlias = Callable[["Connection", Exception | None], None]


class Connection(ABC):
    """Moves bytes between `core` and its peer until either side ends it; its socket tells when the peer has gone.

    `on_end(connection, error)` is called once, from the loop, with everything closed: `error` is None if the peer left
    (its GOODBYE came) or if we had said goodbye and it hung up. It is not called after `abort`.
    """

    def __init__(self, context: MeshContext, sock: socket.socket, core: PeerCore, label: str, on_end: OnEnd) -> None:
        self.label = label
        self.bytes_received = 0
        self.bytes_sent = 0
        self._loop = context.loop
        self._sockets = context.sockets
        self._sock: socket.socket | None = sock
        self._core = core
        self._on_end = on_end
        self._get_buffer = core.get_buffer
        self._updated = core.buffer_updated
        self._frames = core.reader
        self._leaving = False
        self._shut = False

    @abstractmethod
    def start(self) -> None:
        """Let bytes flow; what the core has queued goes out as soon as it can."""

    def leave(self) -> None:
        """Say goodbye behind everything posted, shut the sending side and read to the end; `on_end` follows then."""
        if self._sock is not None and not self._leaving:
            self._leaving = True
            self._say_goodbye()

    def abort(self) -> None:
        """Close everything now. Idempotent; calls nothing back."""
        self._release()

    @abstractmethod
    def forget(self) -> None:
        """In a forked child: the descriptors are closed already, and the loop must not be touched."""

    def _say_goodbye(self) -> None:
        self._core.goodbye()
        self._shut_when_done()

    def _took(self) -> None:
        """Something was read: it may have been the peer's goodbye, or all that ours waited for."""
        if self._core.left:
            self._end(None)
        elif self._leaving:
            self._shut_when_done()

    def _fail(self, error: Exception) -> None:
        """What came cannot be taken; unless the peer is to blame, the fault is ours and the loop hears of it."""
        if not isinstance(error, RemoteProtocolError):
            self._loop.call_exception_handler(
                {"message": f"a frame from {self.label} could not be handled", "exception": error}
            )
        self._end(error)

    def _shut_when_done(self) -> None:
        if self._sock is not None and self._core.goodbye_sent and not self._shut:
            self._shut = True
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                self._loop.call_soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        """Close and tell. After our goodbye it does not matter how the peer hangs up."""
        if self._release():
            said = self._core.goodbye_sent
            self._on_end(self, None if said and not isinstance(error, RemoteProtocolError) else error)

    @staticmethod
    def _closed_here() -> ClosedError:
        return ClosedError("this connection is closed here (closed, aborted, or forked)")

    @abstractmethod
    def _release(self) -> bool:
        """Close everything; False if that was done before."""


def set_stream_options(sock: socket.socket, keepalive_s: float) -> None:
    """Prepare a TCP socket for frames: no Nagle delay, and probes that notice a dead host. Nothing to do for Unix."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    set_keepalive(sock, keepalive_s)


def send_unpaced(sock: socket.socket) -> None:
    """Have a TCP connection inside this host send at once.

    Nothing gets lost there and no other traffic is in the way. BBR, which some systems use for all connections, waits
    for timers between packets all the same. Reno does not, and every user may choose it.
    """
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is not None and sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, b"reno")


def limit_unsent(sock: socket.socket) -> None:
    """Have the kernel take no more of a TCP connection than `UNSENT_BYTES` that it cannot send, where it can."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)


class StreamConnection(Connection):
    """A connection whose socket carries the frames themselves."""

    def __init__(self, context: MeshContext, sock: socket.socket, core: PeerCore, label: str, on_end: OnEnd) -> None:
        super().__init__(context, sock, core, label, on_end)
        self._fd = sock.fileno()
        self._recv_into = sock.recv_into
        self._send = sock.send
        self._sendmsg = sock.sendmsg
        self._armed = False
        self._write_error: OSError | None = None
        self._again: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Let bytes flow; what the core has queued goes out at once."""
        self._loop.add_reader(self._fd, self._readable)
        self._core.open(self._write, self._arm)

    def forget(self) -> None:
        """In a forked child: the descriptor is closed already, and the loop must not be touched."""
        self._sock = None
        self._write_error = BrokenPipeError("forked")

    # -- reading

    def poll(self) -> bool:
        """Read what is there and send what is queued, without waiting to be told; whether anything was read."""
        if self._armed:
            self._writable()
        if self._sock is None:
            return False
        before = self.bytes_received
        self._readable()
        return self.bytes_received != before or self._sock is None

    def catch_up(self) -> None:
        """As `poll`, in the middle of calls that post receives: only as far as they are posted.

        A call may be made by what `_readable` has just read; then it goes on reading itself.
        """
        if self._armed:
            self._writable()
        if self._sock is not None and self._core.expects:
            self._readable(ahead=False)

    def _readable(self, *, ahead: bool = True) -> None:
        received = frames = 0
        while True:
            buffer = self._get_buffer()
            try:
                nbytes = self._recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._end(error)
                return
            if not nbytes:
                self._eof()
                return
            try:
                frames += self._updated(nbytes)
            except Exception as error:
                self._fail(error)
                return
            received += nbytes
            # A short read has emptied the socket: asking again would only cost a system call.
            if nbytes < len(buffer) or received >= MAX_CALL_BYTES or frames >= MAX_CALL_FRAMES:
                break
            if not (ahead or self._core.expects):
                break
        self.bytes_received += received
        if received and self._again is None and self._sock is not None:
            self._again = self._loop.call_later(LOOK_AGAIN_S, self._look_again)
        if self._leaving or self._frames.left:
            self._took()

    def _look_again(self) -> None:
        """Read what the loop may not have told of; while that is anything, look again."""
        self._again = None
        if self._sock is not None:
            self._readable()

    def _eof(self) -> None:
        if self._core.left:
            self._end(None)
        else:
            self._end(self._write_error or ConnectionResetError(NO_GOODBYE))

    # -- writing

    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        try:
            sent = self._send(buffers[0]) if len(buffers) == 1 else self._sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._write_failed(error)
            return 0
        self.bytes_sent += sent
        return sent

    def _write_failed(self, error: OSError) -> None:
        """Remember the error: what the peer sent before it broke off, perhaps its goodbye, is still to be read."""
        if self._sock is None:
            raise self._closed_here()
        if self._write_error is None:
            self._write_error = error
            self._loop.call_soon(self._after_write_error)

    def _after_write_error(self) -> None:
        while self._sock is not None:
            before = self.bytes_received
            self._readable()
            if self.bytes_received == before and self._sock is not None:
                self._end(self._write_error)

    def _arm(self) -> None:
        if not self._armed and self._sock is not None and self._write_error is None:
            self._armed = True
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        if self._core.flush() or self._write_error is not None:
            self._disarm()
        if self._leaving:
            self._shut_when_done()

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            self._loop.remove_writer(self._fd)

    def _release(self) -> bool:
        sock, self._sock = self._sock, None
        if sock is None:
            return False
        self._disarm()
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._fd)
        self._sockets.close(sock)
        return True


class LoopbackConnection:
    """Feeds what `core` writes back to it, in later turns of the loop and at most 1 MiB in each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, core: PeerCore) -> None:
        self._loop = loop
        self._core = core
        self._chunks: deque[memoryview] = deque()
        self._queued = 0
        self._handle: asyncio.Handle | None = None
        self._wants_flush = False

    def start(self) -> None:
        """Let messages flow."""
        self._core.open(self._write, self._arm)

    def close(self) -> None:
        """Drop what is on its way. Idempotent."""
        self._chunks.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        if self._queued >= MAX_QUEUED_BYTES:
            return 0
        data = b"".join(buffers)
        self._chunks.append(memoryview(data))
        self._queued += len(data)
        self._schedule()
        return len(data)

    def _arm(self) -> None:
        self._wants_flush = True
        self._schedule()

    def _schedule(self) -> None:
        if self._handle is None:
            self._handle = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._handle = None
        budget = MAX_CALL_BYTES
        while self._chunks and budget > 0:
            chunk = self._chunks.popleft()
            buffer = self._core.get_buffer()
            nbytes = min(len(chunk), len(buffer))
            buffer[:nbytes] = chunk[:nbytes]
            if nbytes < len(chunk):
                self._chunks.appendleft(chunk[nbytes:])
            self._queued -= nbytes
            budget -= nbytes
            self._core.buffer_updated(nbytes)
        if self._wants_flush and self._queued < MAX_QUEUED_BYTES:
            self._wants_flush = False
            self._core.flush()
        if self._chunks or self._wants_flush:
            self._schedule()
