"""TCPStore: the store of processes that reach each other by TCP, and its daemon where this process runs that."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import asyncdist_server
from asyncdist.concurrency.deadline import Deadline, Timeout
from asyncdist.concurrency.tasks import uninterrupted
from asyncdist.errors import DistStoreError, StoreTimeoutError
from asyncdist.store.base import DEFAULT_STORE_TIMEOUT_S
from asyncdist.store.credentials import FROM_ENVIRONMENT, GivenTLS, GivenToken, TLSConfig, credentials
from asyncdist.store.tcp_client import TCPClient
from asyncdist_server.serving.user_token import default_token
from asyncdist_server.wire.auth import store_context
from asyncdist_server.wire.messages import OBSERVER_ID

if TYPE_CHECKING:
    from asyncdist_server import ThreadedServer

WORKERS: Final = "init/"
"""The queue through which workers tell the master that they have come: torch counts them in a key of that name."""


class TCPStore(TCPClient):
    """A client of the store daemon: of `asyncdist-server`, or of the one that the master runs in its process.

        async with TCPStore("127.0.0.1", 29500) as store:
            await store.set("key", "value")

    `await TCPStore.connect(host, port, ...)` is the same without `async with`. Connecting is tried until `timeout`, as
    the daemon may still be starting, also behind a proxy that closes connections meanwhile: `ConnectTimeoutError`.
    What answers and is no daemon, or one with another token, is refused at once: `DistStoreError`.

    Requests are pipelined: all that are issued in one turn of the event loop travel as one write. When the connection
    breaks, it is made anew (tried for a minute; then pending requests fail, and the next one tries again). Pending
    requests are sent again; the daemon applies each of them once. If it came back without its data, pending changes
    fail with `DistStoreError`, reads and waits are asked again, and `on_incarnation_change` is called, so that the
    owner can publish again what it had stored. After a fork the child's copy is closed.

    Args:
        host_name, port: where the daemon listens. A master may give port 0; `port` says which one it got, once open.
        world_size: how many stores there will be, the master's among them; None, or less than 1, for any number.
        is_master: run the daemon here, on a thread of its own, until this store is closed. DistStoreError if the port
            is taken; ValueError for an address off loopback without a token.
        timeout: seconds or timedelta, of connecting and of every verb; None for no limit.
        wait_for_workers: with `world_size`, the master is open when all others are; StoreTimeoutError says how many
            came.
        multi_tenant: a master whose port is taken uses the store that answers there.
        master_listen_fd: not offered (NotImplementedError): port 0 picks a free one.
        use_libuv: accepted for torch's sake and not used.
        token: the daemon's token, by default that of ASYNCDIST_TOKEN or ASYNCDIST_TOKEN_FILE. Without one, or None:
            this user's on this host, if a daemon on loopback asks for one, as that of a master does. It is proven,
            never sent.
        tls: a TLSConfig or an ssl.SSLContext for a daemon that was started with TLS, by default what ASYNCDIST_TLS_CA
            and its like say; None for a daemon without. The host is checked against the daemon's certificate. A
            master's TLSConfig must have a certificate.
        namespace: the job whose keys this client sees.
        rank: this process's rank in the job, told to the daemon; None for tools.
        on_incarnation_change: called without arguments, in the event loop.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_STORE_TIMEOUT_S,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        token: GivenToken = FROM_ENVIRONMENT,
        tls: GivenTLS = FROM_ENVIRONMENT,
        namespace: str = "",
        rank: int | None = None,
        on_incarnation_change: Callable[[], None] | None = None,
    ) -> None:
        del use_libuv
        if not isinstance(host_name, str) or isinstance(port, bool) or not isinstance(port, int):
            raise TypeError(f"TCPStore needs a host (str) and a port (int), not {host_name!r} and {port!r}")
        lowest = 0 if is_master else 1
        if not lowest <= port < 65536:
            raise ValueError(f"port must be in {lowest}..65535, got {port}")
        if isinstance(world_size, bool) or not isinstance(world_size, int | None):
            raise TypeError(f"world_size must be int or None, not {type(world_size).__name__}")
        if master_listen_fd is not None:
            raise NotImplementedError(
                "master_listen_fd is not offered: port=0 picks a free port, which `port` then says"
            )
        token, tls = credentials(token, tls)
        if isinstance(tls, TLSConfig):
            tls.context()  # what is wrong with the files is said here
        if is_master and isinstance(tls, ssl.SSLContext):
            raise TypeError("a master needs its certificate by name: tls=TLSConfig(cert=..., key=...)")
        super().__init__(host_name, port, token, tls, store_context(namespace, rank), timeout, on_incarnation_change)
        self._is_master = is_master
        self._may_join = multi_tenant
        self._workers = (world_size or 0) if wait_for_workers else 0
        self._server: ThreadedServer | None = None
        self._opened = False

    @classmethod
    async def connect(
        cls,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_STORE_TIMEOUT_S,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        *,
        token: GivenToken = FROM_ENVIRONMENT,
        tls: GivenTLS = FROM_ENVIRONMENT,
        namespace: str = "",
        rank: int | None = None,
        on_incarnation_change: Callable[[], None] | None = None,
    ) -> Self:
        """Return an open store; the arguments are those of the class."""
        store = cls(
            host_name,
            port,
            world_size,
            is_master,
            timeout,
            wait_for_workers,
            multi_tenant,
            token=token,
            tls=tls,
            namespace=namespace,
            rank=rank,
            on_incarnation_change=on_incarnation_change,
        )
        return await store.__aenter__()

    def clone(self) -> TCPStore:
        """See `Store.clone`; also of a master, whose daemon ends with the master all the same."""
        self._raise_if_closed()
        where = self.dialer
        other = TCPStore(where.host, where.port, timeout=self._timeout_s, token=where.token, tls=where.tls)
        other.dialer.context = where.context
        return other

    async def open_by(self, deadline: Deadline) -> Self:
        if self._opened:
            return await super().open_by(deadline)
        try:
            if self._is_master and not self._closed:
                where = self.dialer
                self._server = await host_store(where.host, where.port, where.token, where.tls, may_join=self._may_join)
                where.port = where.port if self._server is None else self._server.port
            await super().open_by(deadline)
            await self._meet(deadline)
        except BaseException:
            await uninterrupted(self.close())
            raise
        self._opened = True
        return self

    async def _meet(self, deadline: Deadline) -> None:
        """Wait for the workers, or tell the master that one has come."""
        if self._server is None:
            if self._workers > 0:
                await self.queue_push(WORKERS, b"")
            return
        loop = asyncio.get_running_loop()
        for come in range(1, self._workers):
            try:
                await self.queue_pop(WORKERS, timeout=deadline.remaining_s(loop.time()))
            except StoreTimeoutError:
                raise StoreTimeoutError(
                    f"{self!r}: {come} of {self._workers} stores, this one among them, opened within "
                    f"{deadline.given_s:g} s"
                ) from None

    async def close(self) -> None:
        """Wait, bounded, for the answers to what was issued, take leave of the daemon and close the connection.

        Waiting verbs end at once with `ClosedError`. A master's daemon ends, and with it what others have open there.
        Cancelling it closes the connection without further waiting.
        """
        try:
            await super().close()
        finally:
            server, self._server = self._server, None
            if server is not None:
                await uninterrupted(asyncio.to_thread(server.close))


class StoreObserver(TCPStore):
    """A TCPStore of which only `status`, `waits`, `namespaces` and `clients` may be used.

    The daemon ends the connection over anything else.

    It connects and is answered even while the daemon's disk hangs. Other clients of a durable daemon wait until their
    arrival is on the disk. The arguments are those of TCPStore.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.dialer.client_id = OBSERVER_ID


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
