"""A daemon with TLS on the test's own loop, and clients that are let in, refused, or speak in bare bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from server_kit import SocketClient
from tls_kit import Certificates

from asyncdist.errors import ConnectTimeoutError, DistStoreError
from asyncdist.store import TCPStore, TLSConfig
from asyncdist_server import ServerConfig, StoreServer, serve

DEADLINE_S = 60.0
AT_ONCE_S = 4.0
"""Less than any time-out between a client and a daemon."""


@asynccontextmanager
async def daemon(certificates: Certificates, **changes: Any) -> AsyncIterator[StoreServer]:
    """A daemon with TLS on this loop."""
    settings = {"port": 0, "tls_cert": certificates.server.cert, "tls_key": certificates.server.key, **changes}
    async with serve(ServerConfig(**settings)) as server:
        yield server


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection to the daemon."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def answer_to(port: int, data: bytes) -> bytes:
    """What the daemon says to these bytes before it closes, which must be soon."""
    async with connection(port) as (reader, writer), asyncio.timeout(AT_ONCE_S):
        writer.write(data)
        with contextlib.suppress(ConnectionResetError):
            return await reader.read()
        return b""


async def refused(port: int, tls: TLSConfig | ssl.SSLContext | None, host: str = "127.0.0.1", **options: Any) -> str:
    """Connect, which must fail at once and not by trying again; returns what the client says."""
    with pytest.raises(DistStoreError) as caught:
        async with asyncio.timeout(AT_ONCE_S):
            await TCPStore.connect(host, port, tls=tls, **options)
    return str(caught.value)


async def given_up(port: int, tls: TLSConfig) -> str:
    """Connect until the time is over; returns what the client says. On a busy machine none may be answered in time."""
    for timeout_s in (0.3, 3.0, 30.0):
        with pytest.raises(ConnectTimeoutError) as caught:
            await TCPStore.connect("127.0.0.1", port, tls=tls, timeout=timeout_s)
        if not any(words in str(caught.value) for words in ("does not answer", "no store answers")):
            break
    return str(caught.value)


class TLSSocketClient(SocketClient):
    """The blocking client, inside the ssl module's own idea of TLS: another implementation than ours."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__(port)

    def _handshake(self, token: str | None, namespace: str) -> None:
        self.socket = self._context.wrap_socket(self.socket, server_hostname="localhost")
        super()._handshake(token, namespace)
