"""The store daemon on a thread of this process, for a TCPStore that is master and for the rank that hosts."""

from __future__ import annotations

import asyncio
import errno
import ssl
from typing import Protocol

import asyncdist_server
from asyncdist.errors import DistStoreError
from asyncdist.store.tls_config import TLSConfig

__all__ = ["HostedStore", "host_store"]


class HostedStore(Protocol):
    """A daemon served by this process."""

    @property
    def port(self) -> int:
        """The port it is bound to."""

    @property
    def connection_count(self) -> int:
        """Connections open now; may be asked from any thread."""

    def close(self) -> None:
        """Stop serving; blocks for a moment."""


async def host_store(
    host: str, port: int, token: str | None, tls: TLSConfig | ssl.SSLContext | None, *, may_join: bool
) -> HostedStore | None:
    """Start the daemon; None if the port is taken and `may_join`. Cancelling leaves nothing running.

    Raises DistStoreError for an address that cannot be bound or a certificate that cannot be served, ValueError for an
    address that needs a token.
    """
    where = f"cannot host the store at {host}:{port}"
    try:
        cert, key = tls.server_files() if isinstance(tls, TLSConfig) else (None, None)
    except ValueError as error:
        raise DistStoreError(f"{where}: {error}") from None
    starting = asyncio.ensure_future(
        asyncio.to_thread(asyncdist_server.serve_in_thread, host, port, token=token, tls_cert=cert, tls_key=key)
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait([starting])  # a thread cannot be cancelled: what it started is stopped
        if starting.exception() is None:
            await asyncio.to_thread(starting.result().close)
        raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE and may_join:
            return None
        hint = " (multi_tenant=True uses the store there)" if error.errno == errno.EADDRINUSE else ""
        raise DistStoreError(f"{where}: {error.strerror or error}{hint}") from error
