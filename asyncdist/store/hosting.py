"""The store daemon on a thread of this process, for a TCPStore that is master and for the rank that hosts."""

from __future__ import annotations

import asyncio
import errno
import ssl
from pathlib import Path

import asyncdist_server
from asyncdist.concurrency.tasks import uninterrupted
from asyncdist.errors import DistStoreError
from asyncdist.store.tls_config import TLSConfig
from asyncdist_server.serving.user_token import default_token

__all__ = ["host_store", "serve_off_loop"]


async def host_store(
    host: str, port: int, token: str | None, tls: TLSConfig | ssl.SSLContext | None, *, may_join: bool
) -> asyncdist_server.ThreadedServer | None:
    """Start the daemon; None if the port is taken and `may_join`. Cancelling leaves nothing running.

    Raises DistStoreError for an address that cannot be bound or a certificate that cannot be served, ValueError for an
    address that needs a token.
    """
    where = f"cannot host the store at {host}:{port}"
    try:
        files = tls.server_files() if isinstance(tls, TLSConfig) else (None, None)
    except ValueError as error:
        raise DistStoreError(f"{where}: {error}") from None
    try:
        return await serve_off_loop(host, port, token, files)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and may_join:
            return None
        hint = " (multi_tenant=True uses the store there)" if error.errno == errno.EADDRINUSE else ""
        raise DistStoreError(f"{where}: {error.strerror or error}{hint}") from error


async def serve_off_loop(
    host: str,
    port: int,
    token: str | None,
    files: tuple[Path | str | None, Path | str | None],
    former_token: str | None = None,
) -> asyncdist_server.ThreadedServer:
    """As `asyncdist_server.serve_in_thread`, without blocking the loop. Cancelling leaves nothing running.

    On loopback a server that is given no token has this user's; ValueError where there can be none. `files` are
    certificate and key, None for a server without TLS.
    """
    cert, key = files

    def start() -> asyncdist_server.ThreadedServer:
        own = default_token(host) if token is None else token
        return asyncdist_server.serve_in_thread(
            host, port, token=own, former_token=former_token, tls_cert=cert, tls_key=key
        )

    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await uninterrupted(_stop(starting))
        raise


async def _stop(starting: asyncio.Future[asyncdist_server.ThreadedServer]) -> None:
    await asyncio.wait([starting])  # a thread cannot be cancelled: what it started is stopped
    if starting.exception() is None:
        await asyncio.to_thread(starting.result().close)
