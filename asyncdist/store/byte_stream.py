"""A connection to the daemon before it carries frames: found by name, perhaps inside TLS, the token proven."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

from asyncdist.errors import DistStoreError
from asyncdist.store.credentials import TLSConfig, context_and_name
from asyncdist_server.serving.sockets import is_loopback
from asyncdist_server.serving.user_token import find_user_token
from asyncdist_server.wire.auth import (
    MAGIC,
    TLS_ALERT_BYTE,
    TLS_HANDSHAKE_BYTE,
    AuthenticationError,
    ClientHandshake,
    Refusal,
)
from asyncdist_server.wire.tls import TLSStream, describe_failure

__all__ = ["ByteStream", "StoreRefusedError", "open_stream", "prove"]

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
"""What is said of a store of this host that does not have this user's token, where no token was given."""

KEEPALIVE_IDLE_S: Final = 20
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 4
"""A daemon's host that vanished without a word is noticed after 40 s, even when there is nothing to send."""

UNACKNOWLEDGED_MS: Final = 40_000
"""The same when something was sent that nobody acknowledges."""


class StoreRefusedError(DistStoreError):
    """Whoever listens there is no store for us: another token, version or protocol. Trying again is of no use."""


class ByteStream:
    """A connected socket, and TLS on it if there is any. Closing it is all it takes to give it up."""

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
        """Send the last words of TLS, as far as the other side still hears them."""
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
) -> ByteStream:
    """Connect to the first address of `host` that takes it, with TLS unless that is None.

    Raises OSError for what may go away by itself; StoreRefusedError, and AuthenticationError as said by the other side,
    for what will not. The caller bounds it with a time-out; cancelling closes the socket.
    """
    loop = asyncio.get_running_loop()
    new_socket = getattr(loop, "new_socket", socket.socket)  # a simulated network has sockets of its own
    problem: OSError = ConnectionRefusedError(f"{host} has no address")
    for family, kind, proto, _, address in await _resolve(loop, host, port):
        connection = new_socket(family, kind | socket.SOCK_CLOEXEC, proto)
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
        on_connected()
        stream = ByteStream(loop, connection)
        try:
            if tls is not None:
                await stream.start_tls(*_context_and_name(tls, host))
        except BaseException:
            stream.close()
            raise
        return stream
    raise problem


async def prove(
    stream: ByteStream, token: str | None, context: bytes, *, own_user_only: bool = False
) -> ClientHandshake:
    """Prove the token, and have the other side prove its own; the handshake says which token that was.

    Without a token, a store of this host is shown that of this user, if it asks for one; with `own_user_only` it has to
    ask. Raises AuthenticationError, and what `receive` does. The other side is told why the handshake ends, for its
    log: else it would not know that the tokens differ.
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
    try:
        return context_and_name(tls, host)
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
