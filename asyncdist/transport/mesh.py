"""Mesh: this rank's connections to all others, opened on first use. The only thing upper layers need from here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Final, TypeAlias

from asyncdist.concurrency import trace as events
from asyncdist.errors import ClosedError, DistNetworkError, DistStoreError, PeerLostError
from asyncdist.transport.addresses import Endpoint, PeerAddress, host_id
from asyncdist.transport.base_mesh import BaseMesh, MeshOwner
from asyncdist.transport.config import LATE_S, TransportConfig
from asyncdist.transport.connections.connection import LoopbackConnection
from asyncdist.transport.connections.dialer import Target, choose_targets
from asyncdist.transport.connections.handshake import Handshake
from asyncdist.transport.connections.link import Link, LinkState
from asyncdist.transport.connections.listener import Listener
from asyncdist.transport.context import MeshContext
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.host_memory import HostMemory
from asyncdist.transport.keepalive import PATH_SILENT_S, KeepaliveWatch
from asyncdist.transport.protocol.hello import Identity, ListenerHello
from asyncdist.transport.protocol.peer import PeerCore
from asyncdist.transport.spin import Neighbors, Spinner, settle, vacate

Resolve: TypeAlias = Callable[[Sequence[int]], Awaitable[dict[int, PeerAddress]]]
"""Look up where ranks listen, all of them in one request. May raise; a rank missing from the result is not known."""

_REMEDY: Final = (
    "ASYNCDIST_SOCKET_IFNAME names interfaces whose addresses can be bound, ASYNCDIST_SOCKET_DIR a directory for Unix "
    "sockets, ASYNCDIST_TRANSPORT=tcp does without those; `ulimit -n` bounds the open sockets of a process"
)


class Mesh(BaseMesh):
    """Messages to and from every rank of a world of `world_size`.

    To be made within a running event loop and used only there. `world_id` (16 random bytes) is the same on all ranks,
    as is `secret`, which peers prove to each other; `resolve` finds addresses. `cores` holds the `PeerCore` of each
    rank used so far, by global rank, for callers that post many messages: where it is None, `peer(rank)` makes it.

    Posting is synchronous and never blocks; messages wait for the connection. Nothing here is awaited per message.
    """

    shares_memory: ClassVar[bool] = True
    """Ranks of one host can map each other's memory, if the configuration lets them."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        world_id: bytes,
        secret: bytes,
        resolve: Resolve,
        owner: MeshOwner,
        config: TransportConfig | None = None,
    ) -> None:
        super().__init__(rank, world_size, owner)
        self._resolve = resolve
        config = config or TransportConfig()
        loop = asyncio.get_running_loop()
        sockets = SocketSet(self._forked, loop)
        self._context = MeshContext(
            loop,
            Identity(world_id, rank, world_size, secret),
            config,
            sockets,
            host_id(config.socket_dir),
            HostMemory(
                loop,
                sockets,
                config.shared_bytes,
                config.arrays_bytes if config.shares_memory else 0,
                single_copy=config.single_copy if config.shares_memory else "off",
                huge_pages=config.huge_pages != "off",
            ),
            Neighbors(),
            KeepaliveWatch(loop, config.keepalive_s),
            KeepaliveWatch(loop, PATH_SILENT_S),
        )
        settle(self._context.identity)
        self.memory = self._context.memory
        if config.spin_us:
            self.spinner = Spinner(self.memory, self._context.neighbors, config.spin_us, config.local_ranks)
        self._listener = Listener(self._context, self._hello_came)
        self._links: dict[int, Link] = {}
        self._loopback: LoopbackConnection | None = None
        self._unresolved: list[int] = []
        self._resolve_turn: asyncio.Handle | None = None

    @property
    def config(self) -> TransportConfig:
        """How it connects."""
        return self._context.config

    async def listen(
        self, ips: Sequence[str] = ("127.0.0.1",), advertised: Sequence[Endpoint] = (), *, accept: bool = True
    ) -> PeerAddress:
        """Listen on `ips` (and on a Unix socket, as configured) and return the address to publish.

        It has `advertised` in place of `ips`, if there are any; port 0 stands for the port of the first of `ips`,
        or of the one at the same place where several interfaces are used.
        Without `accept`, peers that connect wait until that is called. Raises DistNetworkError naming the address that
        cannot be bound, and ClosedError. Not needed by a rank that only dials.
        """
        self._check_open()
        config = self._context.config
        try:
            endpoints = self._listener.open_tcp(ips) if config.uses_tcp else ()
            unix = self._listener.open_unix() if config.uses_unix else b""
        except BaseException as error:
            self._listener.close()
            if isinstance(error, OSError):
                raise DistNetworkError(f"rank {self.rank}: {error.strerror or error}; {_REMEDY}") from error
            raise
        self._context.ips[:] = ips
        if endpoints and advertised:
            endpoints = tuple(
                (ip, port or endpoints[number if number < config.interfaces else 0][1])
                for number, (ip, port) in enumerate(advertised)
            )
        self.address = PeerAddress(self._context.host_id, endpoints, unix)
        events.info("rank %d: listening on %s", self.rank, self.address)
        if accept:
            self.accept()
        return self.address

    def accept(self) -> None:
        """Take connections from now on."""
        self._listener.accept()

    # -- messages

    def peer(self, rank: int) -> PeerCore:
        """Return the core of `rank`, connecting to it if that has not begun. Raises ValueError and ClosedError."""
        self._check_rank(rank)
        self._check_open()
        if rank == self.rank:
            return self._own_core()
        link = self._link(rank)
        self.cores[rank] = link.core
        link.request()
        return link.core

    def break_pair(self, rank: int, cause: Exception) -> None:
        """Give up on `rank`, as if its connection had broken: pending operations with it fail with PeerLostError."""
        self._check_rank(rank)
        if rank != self.rank:
            self._link(rank).break_off(cause)
        elif (own := self.cores[rank]) is not None and self._loopback is not None:
            self._loopback.close()
            own.fail(PeerLostError(f"rank {rank} broke off with itself: {cause}", rank))

    def forget(self, rank: int) -> None:
        link = self._links.get(rank)
        if link is not None and link.ended:
            del self._links[rank]
            self.cores[rank] = None
            self._gone.pop(rank, None)

    def is_connected(self, rank: int) -> bool:
        """Whether the connection to `rank` is open: then its end will be noticed at once."""
        link = self._links.get(rank)
        return link is not None and link.state is LinkState.OPEN

    def is_reached(self, rank: int) -> bool:
        """Whether `rank` is connected to us or is about to be: then its loss will be noticed here."""
        link = self._links.get(rank)
        return link is not None and link.state in (LinkState.CONNECTING, LinkState.OPEN)

    # -- the end

    def describe(self, rank: int) -> str:
        """One line about how `rank` is reached."""
        link = self._links.get(rank)
        if rank == self.rank or link is None:
            return f"rank {rank}: {'itself' if rank == self.rank else LinkState.IDLE.value}"
        return f"rank {rank}: {link.label or link.state.value}" + (f" ({link.state.value})" if link.ended else "")

    def targets(self, address: PeerAddress) -> tuple[list[Target], str]:
        """Where the rank that listens at `address` is dialed, in turn; and if nowhere, why."""
        context = self._context
        return choose_targets(context.host_id, address, context.config, context.ips)

    def link_facts(self, rank: int) -> dict[str, Any]:
        """How it stands with the connection to `rank`, as JSON has it. Any thread may ask."""
        link = self._links.get(rank)
        over, (sent, received) = ("", (0, 0)) if link is None else (link.label, link.bytes_moved())
        state = LinkState.IDLE if link is None else link.state
        last_error = "" if link is None else link.last_error
        return {"state": state.value, "over": over, "sent": sent, "received": received, "last_error": last_error}

    def statistics(self) -> dict[str, Any]:
        """Counts since the start: peers by state, bytes on open connections, refused connections, open sockets."""
        states: dict[str, int] = {}
        sent = received = 0
        for link in self._links.values():
            states[link.state.name.lower()] = states.get(link.state.name.lower(), 0) + 1
            out, into = link.bytes_moved()
            sent += out
            received += into
        return {
            "peers": states,
            "bytes_sent": sent,
            "bytes_received": received,
            "refused_connections": self._listener.refused,
            "sockets": len(self._context.sockets),
        }

    # -- called by the links

    def address_wanted(self, rank: int) -> None:
        """Look `rank` up at the end of this turn of the loop, in one request with all others asked for in it."""
        self._unresolved.append(rank)
        if self._resolve_turn is None:
            self._resolve_turn = self._context.loop.call_soon(self._begin_resolving)

    def link_open(self, rank: int) -> None:
        """Tell the owner."""
        self._owner.peer_connected(rank)

    def link_lost(self, rank: int, error: PeerLostError) -> None:
        """Fail the any-source receives that `rank` might have served, and tell the owner."""
        self._source_gone(rank, error)
        self._owner.peer_lost(rank, error)

    def link_left(self, rank: int, error: PeerLostError) -> None:
        """Fail any-source receives that no rank can serve any more, and tell the owner."""
        self._source_gone(rank, error)
        self._context.memory.left(rank, error)
        self._owner.peer_left(rank)

    def link_ended(self) -> None:
        """A link has reached its end."""
        self._look_for_end()

    # -- inside

    def _link(self, rank: int) -> Link:
        link = self._links.get(rank)
        if link is None:
            link = self._links[rank] = Link(self._context, self, rank, self._new_core(rank))
        return link

    def _own_core(self) -> PeerCore:
        core = self.cores[self.rank]
        if core is None:
            core = self.cores[self.rank] = self._new_core(self.rank)
            self._loopback = LoopbackConnection(self._context.loop, core)
            self._loopback.start()
        return core

    def _hello_came(self, handshake: Handshake[ListenerHello]) -> None:
        self._link(handshake.hello.peer_rank).hello_came(handshake)

    def _begin_resolving(self) -> None:
        self._resolve_turn = None
        ranks, self._unresolved = self._unresolved, []
        self._begin(self._resolve_all(ranks), f"asyncdist resolve {len(ranks)} ranks")

    async def _resolve_all(self, ranks: list[int]) -> None:
        """One look-up; every rank of it hears of an address or of a failure."""
        found: dict[int, PeerAddress] = {}
        problem: Exception = LookupError("it has published no address")
        try:
            found = await self._look_up(ranks)
        except Exception as error:
            problem = error
        for rank in ranks:
            link = self._links.get(rank)
            if link is None:  # an earlier look-up has failed
                continue
            if rank in found:
                link.address_known(found[rank])
            elif link.state is LinkState.CONNECTING and not link.answering:
                self._unknown(link, problem)

    def _unknown(self, link: Link, problem: Exception) -> None:
        """The address of a rank is unknown. What waits for the rank fails, but the rank does not count as lost.

        What is posted later looks the rank up again.
        """
        del self._links[link.rank]
        self.cores[link.rank] = None
        self.lookups_failed += 1
        error = DistStoreError(
            f"rank {self.rank} does not know where rank {link.rank} listens, and the store does not say: {problem}"
        )
        error.__cause__ = problem.with_traceback(None)
        link.abort(error)

    async def _look_up(self, ranks: list[int]) -> dict[int, PeerAddress]:
        """Addresses of `ranks`; time that this loop was busy with other things does not count."""
        loop, limit_s = self._context.loop, self._context.config.connect_timeout_s
        while True:
            until_s = loop.time() + limit_s
            try:
                async with asyncio.timeout_at(until_s) as limit:
                    return await self._resolve(ranks)
            except TimeoutError:
                if not limit.expired():
                    raise
                if loop.time() - until_s <= LATE_S:
                    raise TimeoutError(f"no answer within {limit_s:g} s") from None

    def _all_cores(self) -> list[PeerCore]:
        cores = [link.core for link in self._links.values()]
        own = self.cores[self.rank]
        return cores if own is None else [*cores, own]

    def _leave(self) -> None:
        for link in list(self._links.values()):
            link.leave()

    def _not_ended(self) -> list[int]:
        return [rank for rank, link in self._links.items() if not link.ended]

    def _close_all(self, error: ClosedError) -> None:
        own = self.cores[self.rank]
        self.cores[:] = [None] * self.world_size
        self._listener.close()
        if self._resolve_turn is not None:
            self._resolve_turn.cancel()
        for link in list(self._links.values()):
            link.abort(error)
        if self._loopback is not None:
            self._loopback.close()
        self._context.memory.close()
        vacate(self._context.identity)
        if own is not None:
            own.fail(error)

    def _forked(self) -> None:
        """In the child: sockets are closed; nothing may touch the parent's loop, and no sink may be called."""
        self._closing = True
        self._closed_because = "this process was forked, and the connections belong to its parent"
        self.cores[:] = [None] * self.world_size
        self._context.memory.forked()
        for link in self._links.values():
            link.forget()
