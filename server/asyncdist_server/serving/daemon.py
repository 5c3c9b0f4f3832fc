"""The daemon: listening sockets, the engine's one timer, an orderly stop, and what STATUS says of the process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import random
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.replies import UNSAID_FRAMES, Unsaid
from asyncdist_server.journal.group_commit import GroupCommit
from asyncdist_server.journal.persistence import Persistence
from asyncdist_server.logs import EventLog
from asyncdist_server.serving.busy_poll import BusyPoll, busy_poll
from asyncdist_server.serving.config import BACKLOG, MAX_HALF_OPEN, ServerConfig
from asyncdist_server.serving.connection import Connection
from asyncdist_server.serving.fairness import HalfOpen, Turns
from asyncdist_server.serving.sockets import descriptor_limit, format_address, is_loopback, sockets_within
from asyncdist_server.serving.tls_connection import TLSConnection
from asyncdist_server.torch.namespaces import TorchNamespace, TorchNamespaces
from asyncdist_server.wire.auth import Refusal
from asyncdist_server.wire.messages import INCARNATION_BYTES, Encoder

BIND_ATTEMPTS: Final = 16
"""How often a free port is tried that must be free on several addresses (127.0.0.1 and ::1 of localhost)."""


CONTENDED_ATTEMPTS: Final = 3
"""How often a given port is tried that is in use; one that stays in use is an error within hundredths of a second."""
CONTENDED_PAUSE_S: Final = 0.02
"""Longest random pause between two of those tries."""


class StoreServer:
    """Serves one `StoreEngine` on a running event loop.

    `await start()` binds and serves, `await stop()` ends it; both belong to the same loop. Attributes starting with a
    letter are also read by `Connection`, which belongs to this class.
    """

    def __init__(self, config: ServerConfig, persistence: Persistence | None = None) -> None:
        self.config = config
        self.token, self.former_token = config.token, config.former_token
        self._persistence = persistence or Persistence(config.durability, config.data_dir)
        # Revisions and fencing tokens of a daemon that lost its state are larger than before: it makes fewer than one
        # in a microsecond. Unless the host's clock was set back.
        self.engine = StoreEngine(secrets.token_bytes(INCARNATION_BYTES), config.limits, time.time_ns() // 1000)
        self.engine.describe_server = lambda: describe(self)
        self.started_at = time.monotonic()
        self.torch = TorchNamespaces(self.engine, config.torch_linger_s, config.torch_memory_percent)
        self.encoder = Encoder()
        self.log = logging.getLogger("asyncdist_server")
        self.events = EventLog(self.log, self._call_later)
        self.cut_count = 0
        """Connections that a stop did not wait for to the end."""
        self.not_ready = "starting"
        """Why clients are not served now, in a word or two; empty while they are."""
        self.gate: GroupCommit | None = None
        self.failure: Exception | None = None
        """Why the journal cannot be written any more; nothing is served then."""
        self.failed = asyncio.Event()
        self.dirty: list[Connection] = []
        self.inbound_bytes = 0
        self.held_bytes = 0  # of output that waits for the disk
        self.turns = Turns(lambda call: asyncio.get_running_loop().call_soon(call))
        self.unsaid = Unsaid(UNSAID_FRAMES * config.limits.frame_bytes, config.limits.memory_bytes)
        self.timed_at = 0.0  # the loop's clock when a turn was timed last
        self.busy_poll: BusyPoll | None = None
        self._connections: set[Connection] = set()
        self._half_open = HalfOpen()
        self._ending: set[Connection] = set()
        self._most_sockets = sockets_within(descriptor_limit())
        self._listeners: list[asyncio.Server] = []
        self._addresses: list[tuple[str, int]] = []
        self._torch_ports: dict[int, None] = {}
        self._tls: ssl.SSLContext | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0  # uvloop's handle of a timer due at once does not tell
        self._emptied: asyncio.Event | None = None
        self._stopping = False

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, call)

    @property
    def port(self) -> int:
        """The port listened on, the real one if the configuration said 0."""
        return self._addresses[0][1]

    @property
    def address(self) -> str:
        """Where clients connect, as host:port with brackets around an IPv6 address."""
        return format_address(self._addresses[0]) if self._addresses else ""

    @property
    def torch_ports(self) -> tuple[int, ...]:
        """The ports on which torch clients are served."""
        return tuple(self._torch_ports)

    @property
    def connection_count(self) -> int:
        """Connections that are neither refused nor ending."""
        return len(self._connections)

    @property
    def half_open_count(self) -> int:
        """Connections that have not proven themselves yet."""
        return len(self._half_open)

    async def start(self) -> None:
        """Bind and serve. Raises `ConfigError` for an address that needs a token, `OSError` if it cannot be bound.

        With a journal, the store is first brought back from it; raises `JournalError` where that fails.
        """
        loop = asyncio.get_running_loop()
        self.busy_poll = busy_poll(loop, self.config.busy_poll_us)
        self._tls = self.config.tls_context()
        if self.config.durability.journaled:
            self.not_ready = "recovering"
        self.gate = await self._persistence.open(self.engine, self.settle, self.journal_failed, self.events)
        sockets: list[socket.socket] = []
        try:
            sockets += await _bind(self.config, self.config.port)
            if self.config.torch:
                self._torch_ports[sockets[0].getsockname()[1]] = None
            for port in self.config.torch_ports:
                more = await _bind(self.config, port)
                sockets += more
                self._torch_ports[more[0].getsockname()[1]] = None
            for sock in sockets:
                server = await loop.create_server(self._accept, sock=sock, backlog=BACKLOG)
                self._listeners.append(server)
                self._addresses.append(sock.getsockname()[:2])
        except BaseException:
            for sock in sockets:
                sock.close()
            await self.stop()
            raise
        self.not_ready = ""
        self.settle()  # what the journal brought back may end before anybody comes

    def _accept(self) -> asyncio.Protocol:
        connection = Connection(self)
        return connection if self._tls is None else TLSConnection(connection, self._tls)

    def reload_certificates(self) -> None:
        """Read the files for TLS anew; they count for new connections. Raises `ConfigError` and keeps the old ones."""
        self._tls = self.config.tls_context()

    def reload_token(self) -> None:
        """Read the token's file anew; it counts for new connections. Raises `ConfigError` and keeps what was valid."""
        self.token, self.former_token = self.config.read_tokens()

    def descriptors(self) -> list[int]:
        """Open file descriptors of listeners and clients: a forked child must give its copies up."""
        listening = [sock.fileno() for listener in self._listeners for sock in listener.sockets]
        return listening + [connection.descriptor for connection in self._connections | self._ending]

    async def stop(self) -> None:
        """Stop listening, send what was answered, end every connection, within `drain_timeout_s`. Runs only once."""
        self._stopping = True
        self.not_ready = "draining"
        for listener in self._listeners:
            listener.close()
        for connection in in_order(self._connections):
            connection.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self._until_empty()
        except TimeoutError:
            pass
        finally:
            self.hurry()
        await self._until_empty()
        for listener in self._listeners:
            await listener.wait_closed()
        if self.gate is not None:
            await self.gate.close()
        self.events.close()

    def hurry(self) -> None:
        """Wait no longer: cut every connection. Ends a `stop` that is under way."""
        remaining = self._connections | self._ending
        self.cut_count += len(remaining)
        for connection in in_order(remaining):
            connection.abort()

    async def _until_empty(self) -> None:
        while self._connections or self._ending:
            self._emptied = asyncio.Event()
            await self._emptied.wait()

    def journal_failed(self, error: Exception) -> None:
        """Serve no client any more: what was not acknowledged by now never will be."""
        self.failure = error
        self.not_ready = "the journal failed"
        self.events.error("journal_failed", reason=str(error))
        for listener in self._listeners:
            listener.close()
        self.hurry()
        self.failed.set()

    # ---- what connections tell

    def admit(self, connection: Connection) -> bool:
        """Take a new connection, in the place of one that has not proven itself if need be; false if too many have."""
        self._connections.add(connection)
        if len(self._half_open) >= MAX_HALF_OPEN:
            self._half_open.first_to_go().refuse(Refusal.TOO_MANY_CONNECTIONS)
        self._half_open.add(connection)
        if self._stopping:  # the system let it in before the listeners were closed: it ends as all others do
            asyncio.get_running_loop().call_soon(connection.stop)
            return True
        return len(self._connections) <= self.config.limits.connections

    def torch_namespace(self, address: tuple[str, int], peer: str) -> TorchNamespace | None:
        """Return the namespace of a torch client that connected to `address`, None if it is not to be served there."""
        host, port = address[:2]
        if port not in self._torch_ports:
            option = "--torch" if self._tls is None else "--torch-port, as torch has no TLS"
            reason = f"it speaks torch's store protocol, which is served with {option}"
        elif not (self.config.torch_insecure_no_auth or is_loopback(host)):
            reason = (
                "it speaks torch's store protocol, which has no authentication and is served beyond loopback with "
                "--torch-insecure-no-auth only"
            )
        else:
            return self.torch.of_port(port)
        self.events.warning("torch_refused", peer=peer, reason=reason)
        return None

    def opened(self, connection: Connection) -> None:
        """Note that a connection has proven itself."""
        self._half_open.discard(connection)

    def begin_ending(self, connection: Connection) -> bool:
        """Stop counting a connection that waits for its last message to be read; false if too many do."""
        self._connections.discard(connection)
        self._half_open.discard(connection)
        self._ending.add(connection)
        ending = len(self._ending)
        return ending <= MAX_HALF_OPEN and ending + len(self._connections) <= self._most_sockets

    def forget(self, connection: Connection) -> None:
        """Note that a connection is gone."""
        self._connections.discard(connection)
        self._half_open.discard(connection)
        self._ending.discard(connection)
        self.unsaid.forget(connection)
        if self._emptied is not None:
            self._emptied.set()

    def settle(self) -> None:
        """Write the replies that the last requests caused on other connections, and set the timer anew."""
        while self.dirty:
            dirty, self.dirty = self.dirty, []
            for connection in dirty:
                connection.flush()
        if self.gate is not None:
            self.gate.settle()
        deadline = self.engine.next_deadline()
        torch_deadline = self.torch.next_deadline()
        if torch_deadline is not None:
            deadline = torch_deadline if deadline is None else min(deadline, torch_deadline)
        if deadline is None or self._stopping:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return  # it fires early, finds nothing due, and is set anew
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = asyncio.get_running_loop().call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        # Loops may fire a little early; the time that was asked for is what has come.
        now = max(asyncio.get_running_loop().time(), self._timer_at)
        self.engine.expire(now, now - self._timer_at)
        self.torch.expire(now, now - self._timer_at)
        self.settle()


@contextlib.asynccontextmanager
async def serve(config: ServerConfig) -> AsyncIterator[StoreServer]:
    """Serve on the running loop while the block runs; entering raises what `StoreServer.start` does."""
    server = StoreServer(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def in_order(connections: set[Connection]) -> list[Connection]:
    """Return them in an order that a simulated run can repeat."""
    return sorted(connections, key=lambda connection: connection.descriptor)


async def _bind(config: ServerConfig, port: int) -> list[socket.socket]:
    """Return listening sockets for all addresses of the host, all with the same port, a free one for 0."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(config.host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise OSError(error.errno, f"cannot listen on {config.host}: {error.strerror}") from None
    addresses = list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))
    config.require_token_for([address for _, address in addresses])
    for attempt in range(BIND_ATTEMPTS):
        try:
            return _bind_all(addresses, port)
        except OSError as error:
            # A free port may be free on the first address only. A given one may be contended: Linux refuses both of two
            # processes that begin to listen in the same instant.
            attempts = BIND_ATTEMPTS if port == 0 else CONTENDED_ATTEMPTS
            if error.errno != errno.EADDRINUSE or attempt >= attempts - 1:
                raise
            if port != 0:
                await asyncio.sleep(CONTENDED_PAUSE_S * random.random())
    raise AssertionError("unreachable")


def _bind_all(addresses: Sequence[tuple[int, str]], port: int) -> list[socket.socket]:
    new_socket = getattr(asyncio.get_running_loop(), "new_socket", socket.socket)  # a simulated network has its own
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, address in addresses:
            try:
                sock = new_socket(family, socket.SOCK_STREAM)
            except OSError as error:
                absent = error  # a family this host does not have, as ::1 in many containers
                continue
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind((address, port))
                sock.listen(BACKLOG)  # here, as several processes may bind one port until the first of them listens
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or len(addresses) == 1:
                    raise OSError(error.errno, f"cannot listen on {address} port {port}: {error.strerror}") from None
                absent = error
                sockets.pop().close()
                continue
            port = sock.getsockname()[1]
        if not sockets:
            raise absent or OSError("the host has no address")
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def describe(server: StoreServer) -> dict[str, Any]:
    """Return the server's version, address, process, age, connections, memory and journal."""
    return {
        "version": version(),
        "address": server.address,
        "pid": os.getpid(),
        "uptime_s": round(time.monotonic() - server.started_at, 3),
        "connections": server.connection_count,
        "connection_limit": server.config.limits.connections,
        "process_bytes": resident_bytes(),
        "durability": server.config.durability.name,
        **_of_journal(server),
    }


def stuck(server: StoreServer) -> dict[str, float]:
    """Return for how long the journal has been stuck, nothing if it is not."""
    stuck_s = 0.0 if server.gate is None else server.gate.stuck_s
    return {"journal_stuck_s": round(stuck_s, 3)} if stuck_s else {}


def not_served(server: StoreServer) -> str:
    """Return why clients are not served now, in a few words; empty while they are."""
    gate = server.gate
    if not server.not_ready and gate is not None and gate.stuck_s and gate.durability.delay_s is None:
        return "the journal is stuck"  # every answer waits for it, and every new client
    return server.not_ready


def _of_journal(server: StoreServer) -> dict[str, Any]:
    gate = server.gate
    if gate is None:
        return {}
    return {"journal_bytes": gate.journal_bytes, "commits": gate.statistics.commits, **stuck(server)}


def resident_bytes() -> int:
    """Return how much memory this process occupies, 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@functools.cache
def version() -> str:
    """Return the version of the installed package; `unknown` where the sources run without being installed."""
    import importlib.metadata  # which loads as much as all of the store client, for what few ask

    try:
        return importlib.metadata.version("asyncdist")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
