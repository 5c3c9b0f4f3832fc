"""MemoryMesh: a `Mesh` whose connections are those of a `MemoryNetwork`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

from asyncdist.errors import ClosedError, PeerLostError, RemoteProtocolError
from asyncdist.transport.absence import Absence
from asyncdist.transport.addresses.address import PeerAddress
from asyncdist.transport.base_mesh import BaseMesh, MeshOwner
from asyncdist.transport.in_memory.network import MemoryLink, MemoryNetwork
from asyncdist.transport.protocol.kept_error import NO_GOODBYE
from asyncdist.transport.protocol.matching import Discarded
from asyncdist.transport.protocol.peer import PeerCore

__all__ = ["MemoryMesh"]


class _Peer:
    """One rank as another sees it. `link` is None before it is open; `state` is for people."""

    __slots__ = ("core", "ended", "link", "requested", "state")

    def __init__(self, core: PeerCore) -> None:
        self.core = core
        self.link: MemoryLink | None = None
        self.requested = False
        self.ended = False
        self.state = "not connected"


class MemoryMesh(BaseMesh):
    """The methods are those of `Mesh`, and so is what they promise; `MESH_CHECKS` of asyncdist.testing test both.

    Ranks wait for each other without limit: one that never calls `listen` is never found, but not lost either.
    """

    asks_who_is_gone: ClassVar[bool] = False
    """A store that is watched has something to do every now and then, so that nobody saw that all wait in vain."""

    def __init__(
        self, network: MemoryNetwork, rank: int, world_size: int, owner: MeshOwner, world_id: bytes = b""
    ) -> None:
        super().__init__(rank, world_size, owner)
        self.world_id = world_id
        self.has_left = False
        self._network = network
        self._peers: dict[int, _Peer] = {}

    @property
    def gone(self) -> bool:
        """Whether no peer can connect any more."""
        return self._closing

    async def listen(self, ips: Sequence[str] = ("127.0.0.1",), *, accept: bool = True) -> PeerAddress:
        """Can be found from now on, or once `accept` is called. The address says nothing."""
        self._check_open()
        self.address = PeerAddress("memory", (), b"")
        if accept:
            self.accept()
        return self.address

    def accept(self) -> None:
        """See BaseMesh.accept."""
        self._network.register(self)

    # -- messages

    def peer(self, rank: int) -> PeerCore:
        """See BaseMesh.peer."""
        self._check_rank(rank)
        self._check_open()
        peer = self._peer(rank)
        self.cores[rank] = peer.core
        if not peer.requested and not peer.ended:
            peer.requested = True
            peer.state = "connecting"
            if rank == self.rank:
                MemoryLink(self._network, self, self).open()
            else:
                self._network.dial(self, rank)
        return peer.core

    def break_pair(self, rank: int, cause: Exception) -> None:
        """See BaseMesh.break_pair."""
        self._check_rank(rank)
        if self._peer(rank).ended:
            return
        if rank != self.rank:
            self._peer_lost(rank, cause)
        else:
            self._finish(rank, "lost", PeerLostError(f"rank {rank} broke off with itself: {cause}", rank))

    def is_connected(self, rank: int) -> bool:
        """See BaseMesh.is_connected."""
        peer = self._peers.get(rank)
        return peer is not None and not peer.ended and peer.link is not None

    def is_reached(self, rank: int) -> bool:
        """See BaseMesh.is_reached."""
        peer = self._peers.get(rank)
        return peer is not None and not peer.ended and (peer.requested or peer.link is not None)

    def drop_group(self, group: bytes, discarded: Discarded | None = None) -> None:
        """See BaseMesh.drop_group."""
        self._dropped.add(group, discarded)
        self._any_source.drop_group(group)
        for peer in self._peers.values():
            peer.core.drop_group(group)

    # -- the end

    async def close(self, timeout_s: float, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """See BaseMesh.close."""
        try:
            if not self._closed_because:
                self._closing = self.has_left = True
                for rank in list(self._peers):
                    if rank != self.rank:
                        self._leave(rank)
                self._check_ended()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._all_ended.wait()
            if last is not None:
                await last()
        finally:
            self._shut("the mesh is closed")
            if self._tasks:
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def abort(self, reason: str = "the mesh was aborted") -> None:
        """See BaseMesh.abort."""
        self._shut(reason)

    def describe(self, rank: int) -> str:
        """See BaseMesh.describe."""
        if rank == self.rank:
            return f"rank {rank}: itself"
        peer = self._peers.get(rank)
        return f"rank {rank}: {'not connected' if peer is None else peer.state}"

    def statistics(self) -> dict[str, Any]:
        """Peers by state."""
        states: dict[str, int] = {}
        for peer in self._peers.values():
            states[peer.state] = states.get(peer.state, 0) + 1
        return {"peers": states}

    # -- called by the network and its links

    def link_core(self, rank: int) -> PeerCore:
        """The core that a link to `rank` feeds."""
        return self._peer(rank).core

    def link_wanted(self, rank: int) -> bool:
        """Whether a connection to `rank` is still to be made: not when the other's dial came first."""
        peer = self._peers[rank]
        return peer.link is None and not peer.ended

    def link_open(self, rank: int, link: MemoryLink) -> None:
        """The connection to `rank` exists."""
        peer = self._peer(rank)
        peer.requested = True
        peer.link = link
        peer.state = "memory"
        if rank != self.rank:
            self._owner.peer_connected(rank)
        if self._closing:
            self._network.loop.call_soon(self._leave, rank)

    def link_refused(self, rank: int, left: bool) -> None:
        """`rank` has ended before a connection was made."""
        self.link_not_met(rank, lambda absence: self._not_met(rank, left or absence is Absence.LEFT))

    def _not_met(self, rank: int, left: bool) -> None:
        if self._peers[rank].ended:
            return
        if left:
            self._peer_left(rank)
        else:
            self._peer_lost(rank, ConnectionRefusedError(f"rank {rank} takes no connections"))

    def link_moved(self, rank: int) -> None:
        """Something was read from or written to the link to `rank`: look whether an end is reached."""
        peer = self._peers[rank]
        if peer.ended or peer.link is None:
            return
        if peer.core.goodbye_sent:
            peer.link.end(self)
        if peer.core.left:
            self._peer_left(rank)

    def link_eof(self, rank: int) -> None:
        """Nothing more will come from `rank`."""
        peer = self._peers[rank]
        if peer.ended:
            return
        if peer.core.left:
            self._peer_left(rank)
        elif self._closing and peer.core.goodbye_sent:
            self._finish(rank, "closed", ClosedError(f"the connection to rank {rank} was closed here"))
        else:
            self._peer_lost(rank, ConnectionResetError(NO_GOODBYE))

    def link_broken(self, rank: int, error: RemoteProtocolError) -> None:
        """`rank` broke the protocol."""
        if not self._peers[rank].ended:
            self._peer_lost(rank, error)

    # -- inside

    def _peer_left(self, rank: int) -> None:
        error = PeerLostError(f"rank {rank} has left the world (it closed its group and said goodbye)", rank, left=True)
        self._finish(rank, "left", error)
        self._source_gone(rank, error)
        self._owner.peer_left(rank)
        self._check_ended()

    def _peer_lost(self, rank: int, cause: Exception) -> None:
        error = PeerLostError(f"rank {self.rank} lost rank {rank}: {cause}", rank)
        error.__cause__ = cause
        self._finish(rank, "lost", error)
        self._source_gone(rank, error)
        self._owner.peer_lost(rank, error)
        self._check_ended()

    def _finish(self, rank: int, state: str, error: Exception) -> None:
        peer = self._peers[rank]
        peer.ended = True
        peer.state = state
        if peer.link is not None:
            peer.link.hang_up(self)
        peer.core.fail(error)
        self._check_ended()

    def _leave(self, rank: int) -> None:
        peer = self._peers[rank]
        if peer.ended:
            return
        if peer.link is not None:
            peer.core.goodbye()
            self.link_moved(rank)
        elif not peer.core.has_output:
            self._finish(rank, "closed", ClosedError(f"the connection to rank {rank} was closed here"))

    def _check_ended(self) -> None:
        if self._closing and all(peer.ended or rank == self.rank for rank, peer in self._peers.items()):
            self._all_ended.set()

    def _peer(self, rank: int) -> _Peer:
        peer = self._peers.get(rank)
        if peer is None:
            peer = self._peers[rank] = _Peer(self._new_core(rank))
        return peer

    def _shut(self, reason: str) -> None:
        if self._closed_because:
            return
        self._closing = True
        self._closed_because = reason
        for task in self._tasks:
            task.cancel()
        error = ClosedError(f"rank {self.rank}: {reason}")
        for rank, peer in list(self._peers.items()):
            if not peer.ended:
                if peer.link is not None:
                    peer.link.cut()
                self._finish(rank, "closed", error)
        self._any_source.fail(error)
        self.cores[:] = [None] * self.world_size
        self._check_ended()
