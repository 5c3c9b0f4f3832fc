"""One connection to the daemon: dialling with proof of the token, then frames in both directions on a raw socket."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Final

from asyncdist.concurrency.loop import forget_closed
from asyncdist.store.byte_stream import ByteStream, StoreRefusedError, open_stream, prove
from asyncdist.store.credentials import TLSConfig
from asyncdist_server.wire.auth import AuthenticationError, ClientHandshake, Refusal, http_answer
from asyncdist_server.wire.messages import (
    CLIENT_ID_BYTES,
    STOPPING,
    Encoder,
    FrameReader,
    Hello,
    HelloRefused,
    ProtocolError,
    Welcome,
    decode_replies,
    decode_welcome,
)
from asyncdist_server.wire.tls import TLSStream

__all__ = ["CLIENT_ID_BYTES", "Connection", "StoreRefusedError", "Trouble", "ask_for_http", "client_name", "dial"]

RECEIVE_BYTES: Final = 64 * 1024
"""What one read takes at most: hundreds of replies, or a slice of a large value. Each connection has such a buffer, and
a process that simulates many ranks has many connections."""

TRANSIENT_REFUSALS: Final = frozenset({Refusal.TIMEOUT, Refusal.TOO_MANY_CONNECTIONS})
"""Refusals that trying again may cure."""

SILENT_CLOSES: Final = 3
"""After so many in a row people are told: it may be a proxy whose daemon is away, a daemon that is going away, or no
store of ours, and nobody can tell from outside."""


class Trouble:
    """Why no connection could be made, in words; of several tries."""

    def __init__(self) -> None:
        self.text = ""
        """Of the last one, empty before."""
        self._silent_closes = 0  # in a row
        self.connected_at = math.inf
        """Since when there is a connection on which nothing was answered, on the loop's clock; infinity without one."""
        self.stranger = ""
        """What else than a store answers there."""

    def __str__(self) -> str:
        if self._silent_closes < SILENT_CLOSES:
            return self.text
        return f"{self.text} {self._silent_closes} times in a row: a proxy whose daemon is away, or no asyncdist store"

    def note(self, text: str) -> None:
        """Take note of what one try came to."""
        self.text = text
        self._silent_closes = 0

    def note_connected(self) -> None:
        """Take note that a connection is there, from now on."""
        self.connected_at = asyncio.get_running_loop().time()

    def note_error(self, error: OSError) -> bool:
        """Take note of how one failed; true if it is one of several silent closes, for the first time."""
        self.connected_at = math.inf
        cut = isinstance(error, ConnectionAbortedError | ConnectionResetError | BrokenPipeError)
        closes = self._silent_closes + 1 if cut else 0
        refused = isinstance(error, ConnectionRefusedError)
        self.note("nothing listens there" if refused else str(error) or type(error).__name__)
        self._silent_closes = closes
        return closes == SILENT_CLOSES


def client_name() -> str:
    """Return what this process is called where people look for the one that hangs."""
    return f"{socket.gethostname()} pid {os.getpid()}"


async def dial(
    host: str,
    port: int,
    tls: TLSConfig | ssl.SSLContext | None,
    token: str | None,
    context: bytes,
    hello: Hello,
    trouble: Trouble,
    *,
    own_user_only: bool = False,
) -> tuple[ByteStream, str | None, Welcome, FrameReader]:
    """Connect, prove the token and introduce ourselves; `trouble` is told when there is a connection.

    Returns the connection, the token that was proven, what the daemon answered and the reader of what follows. Raises
    OSError for what may go away by itself and StoreRefusedError for what will not. The caller bounds it with a
    time-out; cancelling closes it.
    """
    try:
        trouble.connected_at = math.inf
        stream = await open_stream(host, port, tls, trouble.note_connected)
        try:
            handshake = await prove(stream, token, context, own_user_only=own_user_only)
            return (stream, handshake.token, *await _introduce(stream, handshake, hello))
        except BaseException:
            stream.close()
            raise
    except AuthenticationError as error:
        if error.refusal in TRANSIENT_REFUSALS:
            raise ConnectionError(str(error)) from error
        raise StoreRefusedError(str(error)) from error
    except HelloRefused as error:
        raise StoreRefusedError(f"it refuses this client: {error}") from error
    except ProtocolError as error:
        raise StoreRefusedError(f"it does not keep to asyncdist's store protocol: {error}") from error


async def ask_for_http(host: str, port: int, timeout_s: float) -> str:
    """Return what an HTTP server there answers in time, for people; empty if there is none. It waits to be asked."""
    try:
        async with asyncio.timeout(timeout_s):
            stream = await open_stream(host, port, None)
            try:
                await stream.send(b"HEAD / HTTP/1.0\r\n\r\n")
                return http_answer(await stream.receive())
            finally:
                stream.close()
    except OSError:  # time-outs are such
        return ""


async def _introduce(stream: ByteStream, handshake: ClientHandshake, hello: Hello) -> tuple[Welcome, FrameReader]:
    """Say hello and read the welcome. Raises ConnectionResetError if the daemon says right behind it that it stops."""
    reader = FrameReader()
    await stream.send(Encoder().hello(hello))
    payloads = reader.feed(handshake.leftover)
    while not payloads:
        payloads = reader.feed(await stream.receive())
    welcome, unasked = decode_welcome(payloads[0]), payloads[1:]
    while reader.buffered and reader.error is None and not unasked:
        unasked = reader.feed(await stream.receive())
    if unasked and any(reply[:2] == (0, STOPPING) for reply in decode_replies(unasked[0])):
        raise ConnectionResetError("it is stopping")
    if unasked or reader.error is not None:
        raise ProtocolError("it answers what it was not asked")
    return welcome, FrameReader(welcome.limits.frame_bytes)


class Connection:
    """Moves frames between a connected stream and its owner.

    `next_frame` is asked for what to send, and only when the socket takes it, so that nothing piles up here.
    `on_frame` gets each frame's payload, valid until it returns. `on_lost` is called once, not by `close`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stream: ByteStream,
        reader: FrameReader,
        next_frame: Callable[[], bytes | None],
        on_frame: Callable[[memoryview], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._socket = stream.socket
        self._tls = stream.tls
        self._reader = reader
        self._next_frame = next_frame
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._unsent: memoryview | None = None
        self._fd = self._socket.fileno()
        loop.add_reader(self._fd, self._on_readable)

    def send(self) -> None:
        """Send what there is to send, as far as the socket takes it now; the rest follows by itself."""
        if self._unsent is not None or self._fd < 0:
            return
        try:
            while (frame := self._next_frame()) is not None:
                if not self._start_sending(frame if self._tls is None else self._tls.encrypt(frame)):
                    return
        except OSError as error:
            self._lose(error)

    def _start_sending(self, data: bytes) -> bool:
        """Send; false if some of it has to wait until the socket takes it."""
        sent = self._send_some(data)
        if sent == len(data):
            return True
        self._unsent = memoryview(data)[sent:]
        self._loop.add_writer(self._fd, self._on_writable)
        return False

    def _send_some(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def _on_writable(self) -> None:
        assert self._unsent is not None
        try:
            self._unsent = self._unsent[self._send_some(self._unsent) :]
        except OSError as error:
            self._lose(error)
            return
        if not self._unsent:
            self._unsent = None
            self._loop.remove_writer(self._fd)
            self.send()

    def poll(self) -> bool:
        """Take what has come, without waiting to be told; false once the connection is gone."""
        if self._fd >= 0:
            self._on_readable()
        return self._fd >= 0

    def _on_readable(self) -> None:
        try:
            count = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error)
            return
        if not count:
            self._lose(ConnectionResetError("the store closed the connection"))
            return
        data: memoryview | bytes = self._buffer[:count]
        if self._tls is not None:
            try:
                data = self._decrypt(self._tls, count)
            except OSError as error:  # those of TLS are such
                self._lose(error)
                return
        try:
            for payload in self._reader.feed(data):
                self._on_frame(payload)
            if self._reader.error is not None and self._fd >= 0:
                raise self._reader.error
        except (ProtocolError, ConnectionResetError) as error:
            self._lose(error)
            return
        if self._tls is not None and self._tls.ended and self._fd >= 0:
            self._lose(ConnectionResetError("the store closed the connection"))

    def _decrypt(self, tls: TLSStream, count: int) -> bytes:
        """Return what the first `count` bytes of the buffer say, and send what TLS answers to them."""
        plain = tls.receive(self._buffer[:count])
        records = tls.take_records()
        if records and self._unsent is not None:
            self._unsent = memoryview(b"".join((self._unsent, records)))
        elif records:
            self._start_sending(records)
        return plain

    def _lose(self, error: Exception) -> None:
        self.close()
        self._on_lost(error)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            if self._tls is not None and self._unsent is None:
                with contextlib.suppress(OSError):
                    self._socket.send(self._tls.close())  # that nothing follows; the end of the socket says it too
            self._socket.close()
            self._fd = -1

    def close_after_fork(self) -> None:
        """Close this process's copy, and then have the loop forget it: its selector is still shared with the parent."""
        if self._fd >= 0:
            self._socket.close()
            if self._thread == threading.get_ident():
                forget_closed(self._loop, (self._fd,))
            self._fd = -1
