"""A client's connection to the daemon: found by name, perhaps inside TLS, the token proven; then frames both ways.

`open_stream` and `prove` work on a `ByteStream`, which awaits each read and write. Once the daemon has said welcome, a
`Connection` takes the socket over. A `Connection` awaits nothing: the event loop calls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, Final

from asyncdist.concurrency.loop import forget_closed, place_of
from asyncdist.errors import DistStoreError
from asyncdist.store.credentials import TLSConfig
from asyncdist_server.serving.sockets import is_loopback, keep_alive
from asyncdist_server.serving.user_token import find_user_token
from asyncdist_server.wire.auth import (
    MAGIC,
    TLS_ALERT_BYTE,
    TLS_HANDSHAKE_BYTE,
    AuthenticationError,
    ClientHandshake,
    Refusal,
)
from asyncdist_server.wire.messages import FrameReader, ProtocolError
from asyncdist_server.wire.tls import TLSStream, describe_failure

HANDSHAKE_READ_BYTES: Final = 4096

_OTHER_TOKEN: Final = (
    "the server requires a token, and none was given: it belongs to another user of this host or to a container, or it "
    "was started with a token, or before this user's was made anew; set ASYNCDIST_TOKEN or ASYNCDIST_TOKEN_FILE to its "
    "token"
)
_REASONS: Final = {
    Refusal.TOKEN_REQUIRED: _OTHER_TOKEN,
    Refusal.WRONG_TOKEN: _OTHER_TOKEN,
    Refusal.NO_TOKEN: "it has no token, so it may belong to another user of this host: set ASYNCDIST_STORE=host:port "
    "to use it all the same",
}
"""What the error says where no token was given, and a store of this host does not have this user's token."""

KEEPALIVE_IDLE_S: Final = 20
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 4
"""A daemon's host that vanished without a word is noticed after 40 s, even when there is nothing to send."""

UNACKNOWLEDGED_MS: Final = 40_000
"""The same when something was sent that nobody acknowledges."""

OTHER_ADDRESS_MS: Final = 1000
"""Where the daemon has several addresses, another one is tried after this: before launchers give each other up."""

CONNECT_S: Final = 0.5
"""An address that does not answer within this is not waited for while there are others."""


class StoreRefusedError(DistStoreError):
    """What listens there is no store for this client: another token, version or protocol. To try again is of no use."""


class ByteStream:
    """A connected socket, and the TLS on it if there is any. `close` frees both."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        self.socket = connection
        self.tls: TLSStream | None = None
        self._loop = loop
        self._received = b""

    async def start_tls(self, context: ssl.SSLContext, server_hostname: str) -> None:
        """Do the TLS handshake. Raises StoreRefusedError, AuthenticationError for what a daemon without TLS says."""
        try:
            tls = TLSStream(context, server_side=False, server_hostname=server_hostname)
            await self._loop.sock_sendall(self.socket, tls.start())
            data = await self._receive_raw()
            if data[0] not in (TLS_HANDSHAKE_BYTE, TLS_ALERT_BYTE):
                if MAGIC.startswith(data[: len(MAGIC)]):
                    ClientHandshake(None, b"").receive(data)
                raise StoreRefusedError("it does not speak TLS")
            while True:
                self._received += tls.receive(data)
                await self._loop.sock_sendall(self.socket, tls.take_records())
                if tls.established:
                    break
                data = await self._receive_raw()
        except ssl.SSLError as error:
            await self._say_why(tls.take_records())
            raise StoreRefusedError(f"TLS failed: {describe_failure(error)}") from error
        self.tls = tls

    async def _say_why(self, alert: bytes) -> None:
        """Send the alert of TLS, if the other side still reads."""
        with contextlib.suppress(OSError):
            await self._loop.sock_sendall(self.socket, alert)

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.socket, data if self.tls is None else self.tls.encrypt(data))

    async def receive(self) -> bytes:
        """Return the next bytes. Raises ConnectionAbortedError when there are no more."""
        if self.tls is None:
            return await self._receive_raw()
        data, self._received = self._received, b""
        try:
            while not data and not self.tls.ended:
                data = self.tls.receive(await self._receive_raw())
        except ssl.SSLError as error:  # TLS 1.3 says only here that it misses our certificate
            raise StoreRefusedError(f"TLS failed: {describe_failure(error)}") from error
        if not data:
            raise ConnectionAbortedError("it closed the connection during the handshake")
        return data

    async def _receive_raw(self) -> bytes:
        data = await self._loop.sock_recv(self.socket, HANDSHAKE_READ_BYTES)
        if not data:
            raise ConnectionAbortedError("it closed the connection during the handshake")
        return data

    def close(self) -> None:
        self.socket.close()


async def open_stream(
    host: str,
    port: int,
    tls: TLSConfig | ssl.SSLContext | None,
    on_connected: Callable[[], None] = lambda: None,
    *,
    turn: int = 0,
    unacknowledged_ms: int = UNACKNOWLEDGED_MS,
) -> ByteStream:
    """Connect to the first address of `host` that accepts, with TLS unless `tls` is None.

    `host` may be several with commas. Which address is the first depends on `turn`; only the last is waited for long.

    Raises OSError for a failure that may pass. Raises StoreRefusedError, or AuthenticationError as the daemon says it,
    for a failure that will not. The caller sets the time-out. Cancelling closes the socket.
    """
    loop = asyncio.get_running_loop()
    new_socket = getattr(loop, "new_socket", socket.socket)  # a simulated network has sockets of its own
    problem: OSError = ConnectionRefusedError(f"{host} has no address")
    found = [(one, *each) for one in host.split(",") for each in await _resolve(loop, one, port)]
    first = turn % max(1, len(found))
    for left, (one, family, kind, proto, _, address) in zip(
        reversed(range(len(found))), found[first:] + found[:first], strict=True
    ):
        connection = new_socket(family, kind | socket.SOCK_CLOEXEC, proto)
        try:
            connection.setblocking(False)
            keep_alive(connection, KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES, unacknowledged_ms)
            async with asyncio.timeout(CONNECT_S if left else None):
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
        on_connected()
        stream = ByteStream(loop, connection)
        try:
            if tls is not None:
                await stream.start_tls(*_context_and_name(tls, one))
        except BaseException:
            stream.close()
            raise
        return stream
    raise problem


async def prove(
    stream: ByteStream, token: str | None, context: bytes, *, own_user_only: bool = False
) -> ClientHandshake:
    """Prove the token and have the daemon prove the same one. Returns the handshake, which has the proven token.

    If `token` is None and a daemon of this host asks for a token, this user's token is proven; with `own_user_only` the
    daemon must ask. Raises AuthenticationError, and what `ByteStream.receive` raises. A handshake that fails is
    explained to the daemon, whose log would not say otherwise that the tokens differ.
    """
    here = token is None and is_loopback(str(stream.socket.getpeername()[0]))
    users = find_user_token() if here else None
    shown = users if token is None else token
    handshake = ClientHandshake(shown, context, optional=users is not None and not own_user_only)
    try:
        await stream.send(handshake.start())
        while not handshake.done:
            answer = handshake.receive(await stream.receive())
            if answer:
                await stream.send(answer)
        if here and own_user_only and handshake.token is None:
            raise AuthenticationError(Refusal.NO_TOKEN)
    except AuthenticationError as error:
        if error.farewell and not handshake.done:
            with contextlib.suppress(OSError):
                await stream.send(error.farewell)
        if here and error.refusal in _REASONS:
            reason = _REASONS[error.refusal]
            raise AuthenticationError(error.refusal, by_peer=error.by_peer, reason=reason) from None
        raise
    return handshake


def _context_and_name(tls: TLSConfig | ssl.SSLContext, host: str) -> tuple[ssl.SSLContext, str]:
    """Return the context for a connection to `host`, and the name that the daemon's certificate must be valid for."""
    name = host.partition("%")[0]
    if not isinstance(tls, TLSConfig):
        return tls, name
    try:
        return tls.context(), tls.server_hostname or name
    except ValueError as error:
        raise StoreRefusedError(f"TLS: {error}") from error


async def _resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[tuple[Any, ...]]:
    """Return the addresses of `host`; a numeric one without asking a thread."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return list(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    return [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]


RECEIVE_BYTES: Final = 64 * 1024
"""What one read takes at most: hundreds of replies, or a slice of a large value. Each connection has such a buffer, and
a process that simulates many ranks has many connections."""


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
        self._place = place_of(loop)
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
            if self._place.thread == threading.get_ident():
                forget_closed(self._loop, (self._fd,))
            self._fd = -1
