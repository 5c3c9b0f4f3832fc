"""One hello over one connected socket: callbacks, a deadline, and no byte read beyond the hello."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Generic, TypeVar

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.context import MeshContext
from asyncdist.transport.protocol.hello import Hello

H = TypeVar("H", bound=Hello)


class Handshake(Generic[H]):
    """Drives `hello` over `sock`, a connected non-blocking socket which it owns until `detach`.

    `on_step` is called after each message of the peer's, `on_failed` at most once, when the socket is closed because
    of an error, the peer's hanging up, or the deadline. Neither is called after `close` or `detach`.
    """

    def __init__(
        self,
        context: MeshContext,
        sock: socket.socket,
        hello: H,
        label: str,
        on_step: Callable[[Handshake[H]], None],
        on_failed: Callable[[Handshake[H], Exception], None],
    ) -> None:
        self.hello = hello
        self.label = label
        self.on_step = on_step
        self.on_failed = on_failed
        self._loop = context.loop
        self._sockets = context.sockets
        self._sock: socket.socket | None = sock
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, timeout_s: float) -> None:
        """Send the opening and wait for the peer's words, at most `timeout_s`."""
        assert self._sock is not None
        self.set_deadline(timeout_s)
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self.send(self.hello.opening())

    def set_deadline(self, timeout_s: float) -> None:
        """Fail `timeout_s` from now unless the hello is over."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(timeout_s, self._expired, timeout_s)

    def send(self, data: bytes) -> None:
        """Send a message. A fresh connection's buffer has room for it; failure is reported from the loop."""
        if not data or self._sock is None:
            return
        try:
            sent = self._sock.send(data)
        except OSError as error:
            self._loop.call_soon(self._fail, error)
            return
        if sent != len(data):
            self._loop.call_soon(self._fail, ConnectionAbortedError("no room in the send buffer of a new connection"))

    @property
    def taken_back(self) -> bool:
        """Whether the listener has hung up behind its answer: it gave up waiting for our confirmation.

        It sends nothing else before that, so there is nothing to read unless it is the end.
        """
        assert self._sock is not None
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def detach(self) -> socket.socket:
        """End here and return the socket, positioned right behind the hello."""
        sock = self._release()
        assert sock is not None
        return sock

    def close(self) -> None:
        """Close the socket, reporting nothing. Idempotent."""
        sock = self._release()
        if sock is not None:
            self._sockets.close(sock)

    def _release(self) -> socket.socket | None:
        sock, self._sock = self._sock, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if sock is not None:
            self._loop.remove_reader(sock.fileno())
        return sock

    def _readable(self) -> None:
        if self._sock is None:
            return
        try:
            data = self._sock.recv(self.hello.wanted - len(self._buffer))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        if not data:
            self._fail(ConnectionResetError("the peer closed the connection during the hello"))
            return
        self._buffer += data
        if len(self._buffer) < self.hello.wanted:
            return
        message = bytes(self._buffer)
        self._buffer.clear()
        try:
            reply = self.hello.feed(message)
        except RemoteProtocolError as error:
            self.send(self.hello.refusal)
            self._fail(error)
            return
        self.send(reply)
        self.on_step(self)

    def _expired(self, timeout_s: float) -> None:
        """The time is over; but if it was this loop that was busy, the peer's words may be here, unread."""
        self._timer = None
        awaited = self.hello.wanted
        self._readable()
        if self._sock is None or self._timer is not None:
            return
        if self.hello.wanted != awaited:  # a whole message, of which a hello has three at most
            self.set_deadline(timeout_s)
        else:
            self._fail(TimeoutError(f"no hello within {timeout_s:g} s"))

    def _fail(self, error: Exception) -> None:
        if self._sock is not None:
            self.close()
            self.on_failed(self, error)
