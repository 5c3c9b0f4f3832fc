"""One connection to the daemon: dialling with proof of the token, then frames in both directions on a raw socket."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any, Final

from asyncdist.errors import DistStoreError
from asyncdist_server.auth import AuthenticationError, ClientHandshake, Refusal
from asyncdist_server.messages import (
    CLIENT_ID_BYTES,
    Encoder,
    FrameReader,
    Hello,
    HelloRefused,
    ProtocolError,
    Welcome,
    decode_welcome,
)

__all__ = ["CLIENT_ID_BYTES", "Connection", "StoreRefusedError", "client_name", "dial"]

RECEIVE_BYTES: Final = 64 * 1024
"""What one read takes at most: hundreds of replies, or a slice of a large value. Each connection has such a buffer, and
a process that simulates many ranks has many connections."""

HANDSHAKE_READ_BYTES: Final = 4096

KEEPALIVE_IDLE_S: Final = 20
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 4
"""A daemon's host that vanished without a word is noticed after 40 s, even when there is nothing to send."""

UNACKNOWLEDGED_MS: Final = 40_000
"""The same when something was sent that nobody acknowledges."""

TRANSIENT_REFUSALS: Final = frozenset({Refusal.TIMEOUT, Refusal.TOO_MANY_CONNECTIONS})
"""Refusals that trying again may cure."""


class StoreRefusedError(DistStoreError):
    """Whoever listens there is no store for us: another token, version or protocol. Trying again is of no use."""


def client_name() -> str:
    """Return what this process is called where people look for the one that hangs."""
    return f"{socket.gethostname()} pid {os.getpid()}"


async def dial(
    host: str, port: int, handshake: ClientHandshake, hello: Hello
) -> tuple[socket.socket, Welcome, FrameReader]:
    """Connect, prove the token and introduce ourselves.

    Returns the socket, what the daemon answered and the reader of what follows. Raises OSError for what may go away by
    itself and StoreRefusedError for what will not. The caller bounds it with a time-out; cancelling closes the socket.
    """
    loop = asyncio.get_running_loop()
    problem: OSError = ConnectionRefusedError(f"{host} has no address")
    for family, kind, proto, _, address in await _resolve(loop, host, port):
        connection = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
        try:
            connection.setblocking(False)
            _set_options(connection)
            await loop.sock_connect(connection, address)
            if connection.getsockname() == connection.getpeername():
                raise ConnectionRefusedError("the socket was connected to itself, nobody listens")
        except OSError as error:
            connection.close()
            problem = error
            continue
        except BaseException:
            connection.close()
            raise
        try:
            return (connection, *await _introduce(loop, connection, handshake, hello))
        except BaseException:
            connection.close()
            raise
    raise problem


async def _resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[tuple[Any, ...]]:
    """Return the addresses of `host`; a numeric one without asking a thread."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return list(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    return [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (  # not every system has them all
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def _introduce(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, handshake: ClientHandshake, hello: Hello
) -> tuple[Welcome, FrameReader]:
    """Authenticate, say hello and read the welcome."""
    reader = FrameReader()
    try:
        await loop.sock_sendall(connection, handshake.start())
        while not handshake.done:
            answer = handshake.receive(await _receive(loop, connection))
            if answer:
                await loop.sock_sendall(connection, answer)
        await loop.sock_sendall(connection, Encoder().hello(hello))
        payloads = reader.feed(handshake.leftover)
        while not payloads:
            payloads = reader.feed(await _receive(loop, connection))
        if len(payloads) > 1 or reader.buffered:
            raise ProtocolError("it answers what it was not asked")
        welcome = decode_welcome(payloads[0])
        return welcome, FrameReader(welcome.limits.frame_bytes)
    except AuthenticationError as error:
        if error.refusal in TRANSIENT_REFUSALS:
            raise ConnectionRefusedError(str(error)) from error
        raise StoreRefusedError(str(error)) from error
    except HelloRefused as error:
        raise StoreRefusedError(f"it refuses this client: {error}") from error
    except ProtocolError as error:
        raise StoreRefusedError(f"it does not keep to asyncdist's store protocol: {error}") from error


async def _receive(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    data = await loop.sock_recv(connection, HANDSHAKE_READ_BYTES)
    if not data:
        raise ConnectionAbortedError("it closed the connection during the handshake")
    return data


class Connection:
    """Moves frames between a connected socket and its owner.

    `next_frame` is asked for what to send, and only when the socket takes it, so that nothing piles up here.
    `on_frame` gets each frame's payload, valid until it returns. `on_lost` is called once, not by `close`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        reader: FrameReader,
        next_frame: Callable[[], bytes | None],
        on_frame: Callable[[memoryview], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._loop = loop
        self._socket = connection
        self._reader = reader
        self._next_frame = next_frame
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._unsent: memoryview | None = None
        self._fd = connection.fileno()
        loop.add_reader(self._fd, self._on_readable)

    def send(self) -> None:
        """Send what there is to send, as far as the socket takes it now; the rest follows by itself."""
        if self._unsent is not None or self._fd < 0:
            return
        try:
            while (frame := self._next_frame()) is not None:
                sent = self._send_some(frame)
                if sent < len(frame):
                    self._unsent = memoryview(frame)[sent:]
                    self._loop.add_writer(self._fd, self._on_writable)
                    return
        except OSError as error:
            self._lose(error)

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
        try:
            for payload in self._reader.feed(self._buffer[:count]):
                self._on_frame(payload)
        except ProtocolError as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self.close()
        self._on_lost(error)

    def close(self) -> None:
        """Close the socket. May be called twice."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._socket.close()
            self._fd = -1

    def close_after_fork(self) -> None:
        """Close this process's copy and nothing else: the loop's selector is still shared with the parent."""
        if self._fd >= 0:
            self._socket.close()
            self._fd = -1
