"""Mesh: this rank's connections to all others, opened on first use. The only thing upper layers need from here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from asyncdist import events
from asyncdist.errors import ClosedError, PeerLostError
from asyncdist.transport.address import PeerAddress, host_id
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.context import MeshContext
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.handshake import Handshake
from asyncdist.transport.hello import Identity, ListenerHello
from asyncdist.transport.link import Link, LinkState
from asyncdist.transport.listener import Listener
from asyncdist.transport.loopback import LoopbackConnection
from asyncdist.transport.matching import AnySourceTable, DroppedGroups, Receive, SendOp, nobody_left
from asyncdist.transport.peer import PeerCore

__all__ = ["Mesh", "MeshOwner", "Resolve"]

Resolve: TypeAlias = Callable[[Sequence[int]], Awaitable[dict[int, PeerAddress]]]
"""Look up where ranks listen, all of them in one request. May raise; a rank missing from the result is unreachable."""


class MeshOwner(Protocol):
    """Who is told about peers. Calls come from the loop and must not raise; they may post, drop and abort."""

    def peer_connected(self, rank: int) -> None:
        """The connection to `rank` is open, whoever dialed. A control message sent now goes ahead of all else."""

    def peer_lost(self, rank: int, error: PeerLostError) -> None:
        """The connection to `rank` broke, or none could be made; operations with it have failed with `error`."""

    def peer_left(self, rank: int) -> None:
        """`rank` said goodbye: nothing more can be sent to it or received from it."""

    def control_received(self, rank: int, payload: bytes) -> None:
        """`rank` sent a control message."""


class Mesh:
    """Messages to and from every rank of a world of `world_size`.

    To be made within a running event loop and used only there. `world_id` (16 random bytes) is the same on all ranks,
    as is `secret`, which peers prove to each other; `resolve` finds addresses. `cores` holds the `PeerCore` of each
    rank used so far, by global rank, for callers that post many messages: where it is None, `peer(rank)` makes it.

    Posting is synchronous and never blocks; messages wait for the connection. Nothing here is awaited per message.
    """

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
        self.rank = rank
        self.world_size = world_size
        self.cores: list[PeerCore | None] = [None] * world_size
        self.address: PeerAddress | None = None
        self._owner = owner
        self._resolve = resolve
        self._context = MeshContext(
            asyncio.get_running_loop(),
            Identity(world_id, rank, world_size, secret),
            config or TransportConfig(),
            SocketSet(self._forked),
            host_id(),
        )
        self._listener = Listener(self._context, self._hello_came)
        self._links: dict[int, Link] = {}
        self._loopback: LoopbackConnection | None = None
        self._any_source = AnySourceTable()
        self._dropped = DroppedGroups()
        self._gone: dict[int, bool] = {}  # whether it left with a goodbye
        self._unresolved: list[int] = []
        self._resolve_turn: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_ended = asyncio.Event()
        self._closing = False
        self._closed_because = ""

    @property
    def closing(self) -> bool:
        """Whether `close` or `abort` was called."""
        return self._closing

    async def listen(self, ips: Sequence[str] = ("127.0.0.1",)) -> PeerAddress:
        """Listen on `ips` (and on a Unix socket, as configured) and return the address to publish.

        Raises OSError naming the address that cannot be bound, and ClosedError. Not needed by a rank that only dials.
        """
        self._check_open()
        transport = self._context.config.transport
        try:
            endpoints = () if transport == "unix" else self._listener.open_tcp(ips)
            unix = b"" if transport == "tcp" else self._listener.open_unix()
        except BaseException:
            self._listener.close()
            raise
        self.address = PeerAddress(self._context.host_id, endpoints, unix)
        events.info("rank %d: listening on %s", self.rank, self.address)
        return self.address

    # -- messages

    def post_send(self, rank: int, op: SendOp) -> bool:
        """Send `op` to `rank`. True: complete, the sink is not called; False: the sink hears later.

        Raises ValueError for a rank outside the world, PeerLostError once the peer is lost or has left, ClosedError.
        """
        core = self.cores[rank] if 0 <= rank < self.world_size else None
        if core is None:
            core = self.peer(rank)
        return core.post_send(op)

    def post_receive(self, rank: int, receive: Receive) -> bool:
        """Post a receive from `rank`. Results and errors as `post_send`, and those of `PeerCore.post_receive`."""
        core = self.cores[rank] if 0 <= rank < self.world_size else None
        if core is None:
            core = self.peer(rank)
        return core.post_receive(receive)

    def post_receive_any(self, ranks: Collection[int], receive: Receive) -> bool:
        """Post a receive from whichever of `ranks` sends first. It dials nobody: senders do.

        When one of `ranks` is lost the receive fails, as that rank might have been the one; when one leaves, it goes on
        until all others have left. We count as a source only once we have sent something to ourselves. Raises
        PeerLostError if all are gone already, ValueError for a rank outside the world.
        """
        self._check_open()
        for rank in ranks:
            self._check_rank(rank)
        if self._any_source.post(receive, ranks):
            return True
        if self._all_gone(ranks) and self._any_source.withdraw(receive):
            raise nobody_left(self.rank, ranks, self._gone)
        return False

    def withdraw(self, receive: Receive, rank: int | None = None) -> bool:
        """Forget a posted receive; False if it was matched or has ended. With `rank` only that peer is asked."""
        source = receive.source if rank is None else rank
        if source is None:
            return self._any_source.withdraw(receive)
        core = self.cores[source]
        return core is not None and core.withdraw(receive)

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

    def connect(self, ranks: Iterable[int]) -> None:
        """Start connecting to all of `ranks`; addresses asked for in one turn of the loop are looked up together."""
        for rank in ranks:
            self.peer(rank)

    def send_control(self, rank: int, payload: bytes) -> None:
        """Send a control message, ahead of everything queued. Raises as `post_send`."""
        self.peer(rank).send_control(payload)

    def broadcast_control(self, ranks: Iterable[int], payload: bytes) -> list[int]:
        """Send a control message to those of `ranks` that are connected now; returns them."""
        reached = []
        for rank in ranks:
            link = self._links.get(rank)
            if link is not None and link.state is LinkState.OPEN and not self._closing:
                link.core.send_control(payload)
                reached.append(rank)
        return reached

    def break_pair(self, rank: int, cause: Exception) -> None:
        """Give up on `rank`, as if its connection had broken: pending operations with it fail with PeerLostError."""
        self._check_rank(rank)
        if rank != self.rank:
            self._link(rank).break_off(cause)
        elif (own := self.cores[rank]) is not None and self._loopback is not None:
            self._loopback.close()
            own.fail(PeerLostError(f"rank {rank} broke off with itself: {cause}", rank))

    def drop_group(self, group: bytes, error: BaseException) -> None:
        """Forget every operation of the group with id `group` (8 bytes), telling no sink; late messages are drained.

        16 bytes (group, tag, sequence) name one operation of a group.

        On return no array of the group is read or written any more. `error` says why, for those who ask later.
        """
        self._dropped.add(group)
        self._any_source.drop_group(group)
        for link in self._links.values():
            link.core.drop_group(group, error)
        own = self.cores[self.rank] if self._loopback is not None else None
        if own is not None:
            own.drop_group(group, error)

    # -- the end

    async def close(self, timeout_s: float) -> None:
        """Leave: send what was posted, say goodbye to every peer, and wait for each to hang up, at most `timeout_s`.

        Whoever has not by then is cut off. Operations still pending fail with ClosedError. Cancelled, it aborts.
        Idempotent; concurrent calls wait for the same end.
        """
        try:
            if not self._closed_because:
                self._closing = True
                for link in list(self._links.values()):
                    link.leave()
                self.link_ended()
                async with asyncio.timeout(timeout_s):
                    await self._all_ended.wait()
        except TimeoutError:
            slow = [rank for rank, link in self._links.items() if not link.ended]
            events.info("rank %d: ranks %s did not hang up within %g s and were cut off", self.rank, slow, timeout_s)
        finally:
            self._shut("the mesh is closed")
            if self._tasks:
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self, reason: str = "the mesh was aborted") -> None:
        """Close everything at once, without goodbye: peers see this rank as lost.

        Pending operations fail with ClosedError. Idempotent. `close` may still be awaited afterwards; then it only
        waits for what was cancelled here.
        """
        self._shut(reason)

    def describe(self, rank: int) -> str:
        """One line about how `rank` is reached."""
        if rank == self.rank:
            return f"rank {rank}: itself"
        link = self._links.get(rank)
        if link is None:
            return f"rank {rank}: {LinkState.IDLE.value}"
        return f"rank {rank}: {link.label or link.state.value}" + (f" ({link.state.value})" if link.ended else "")

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
        """Look `rank` up at the end of this turn of the loop, with everybody else asked for in it."""
        self._unresolved.append(rank)
        if self._resolve_turn is None:
            self._resolve_turn = self._context.loop.call_soon(self._begin_resolving)

    def link_open(self, rank: int) -> None:
        """Tell the owner."""
        self._owner.peer_connected(rank)

    def link_lost(self, rank: int, error: PeerLostError) -> None:
        """Fail what any-source receives hoped for, and tell the owner."""
        self._gone[rank] = False
        self._any_source.fail_source(rank, error)
        self._owner.peer_lost(rank, error)

    def link_left(self, rank: int, error: PeerLostError) -> None:
        """Fail any-source receives that nobody can serve any more, and tell the owner."""
        self._gone[rank] = True
        for receive in list(self._any_source.table):
            if self._all_gone(receive.ranks) and self._any_source.withdraw(receive):
                receive.sink.message_failed(receive.token, error)
        self._owner.peer_left(rank)

    def link_ended(self) -> None:
        """Wake `close` when no link is left."""
        if self._closing and all(link.ended for link in self._links.values()):
            self._all_ended.set()

    # -- inside

    def _link(self, rank: int) -> Link:
        link = self._links.get(rank)
        if link is None:
            core = PeerCore(
                self.rank, rank, self._owner.control_received, any_source=self._any_source, dropped=self._dropped
            )
            link = self._links[rank] = Link(self._context, self, rank, core)
        return link

    def _own_core(self) -> PeerCore:
        core = self.cores[self.rank]
        if core is None:
            core = PeerCore(
                self.rank, self.rank, self._owner.control_received, any_source=self._any_source, dropped=self._dropped
            )
            self.cores[self.rank] = core
            self._loopback = LoopbackConnection(self._context.loop, core)
            self._loopback.start()
        return core

    def _hello_came(self, handshake: Handshake[ListenerHello]) -> None:
        self._link(handshake.hello.peer_rank).hello_came(handshake)

    def _begin_resolving(self) -> None:
        self._resolve_turn = None
        ranks, self._unresolved = self._unresolved, []
        task = self._context.loop.create_task(self._resolve_all(ranks), name=f"asyncdist resolve {len(ranks)} ranks")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _resolve_all(self, ranks: list[int]) -> None:
        """One look-up; every rank of it hears of an address or of a failure."""
        found: dict[int, PeerAddress] = {}
        problem: Exception | None = None
        try:
            async with asyncio.timeout(self._context.config.connect_timeout_s):
                found = await self._resolve(ranks)
        except Exception as error:
            problem = error
        for rank in ranks:
            link = self._links[rank]
            if rank in found:
                link.address_known(found[rank])
            elif not link.ended and link.state is not LinkState.OPEN:
                link.dial_failed(problem or LookupError(f"rank {rank} has published no address"))

    def _all_gone(self, ranks: Collection[int]) -> bool:
        """Whether nobody can send any more: all others of `ranks` are gone, and we never were a peer of our own."""
        gone, own = self._gone, self.rank
        if not gone or (own in ranks and self.cores[own] is not None):
            return False
        return any(rank != own for rank in ranks) and all(rank in gone or rank == own for rank in ranks)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size} ranks")

    def _check_open(self) -> None:
        if self._closed_because:
            raise ClosedError(f"rank {self.rank}: {self._closed_because}")

    def _shut(self, reason: str) -> None:
        if self._closed_because:
            return
        self._closing = True
        self._closed_because = reason
        own = self.cores[self.rank]
        self.cores[:] = [None] * self.world_size
        self._listener.close()
        if self._resolve_turn is not None:
            self._resolve_turn.cancel()
        for task in self._tasks:
            task.cancel()
        error = ClosedError(f"rank {self.rank}: {reason}")
        for link in list(self._links.values()):
            link.abort(error)
        if self._loopback is not None:
            self._loopback.close()
        if own is not None:
            own.fail(error)
        self._any_source.fail(error)
        self.link_ended()

    def _forked(self) -> None:
        """In the child: sockets are closed; nothing may touch the parent's loop, and no sink may be called."""
        self._closing = True
        self._closed_because = "this process was forked, and the connections belong to its parent"
        self.cores[:] = [None] * self.world_size
        for link in self._links.values():
            link.forget()
