"""Ranks of one event loop connected without sockets, for simulation and tests: `MemoryMesh`es of a `MemoryNetwork`.

The cores, their bytes and their flow control are the real ones; only the wire is a queue. With a seed, bytes are cut at
random, take random times, and are accepted in part, but never change their order within one direction of a link.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Final

from asyncdist.errors import ClosedError, RemoteProtocolError
from asyncdist.transport.base_mesh import MeshOwner, StreamMesh, StreamPeer, closed_here
from asyncdist.transport.context import Absence
from asyncdist.transport.protocol.frame import MAX_CALL_BYTES
from asyncdist.transport.protocol.peer import PeerCore

MAX_FLIGHT_BYTES: Final = 2 * MAX_CALL_BYTES
"""Bytes in one direction of a link before its writer says it is full, as a socket's buffer would."""

JITTER_S: Final = 0.001
"""Random extra latency of a seeded network, on top of the given one: enough to reorder anything between links."""


class _Direction:
    """One way of a link: from the core of `source` to that of `target`, in order."""

    def __init__(self, network: MemoryNetwork, source: MemoryMesh, target: MemoryMesh) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._flight: deque[tuple[float, memoryview | None]] = deque()  # None is the end of the stream
        self._flight_bytes = 0
        self._arrival_s = 0.0
        self._timer: asyncio.Handle | None = None
        self._wants_flush = False
        self._closed = False
        self._ended = False

    def open(self) -> None:
        """Let the source write."""
        self._source.link_core(self._target.rank).open(self._write, self._arm)

    def end(self) -> None:
        """The source will write no more."""
        self._send(None)
        self._ended = True
        self._wants_flush = False

    def close(self) -> None:
        """Nothing arrives any more; what is written is lost."""
        self._closed = True
        self._flight.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        room = self._network.accepted(MAX_FLIGHT_BYTES - self._flight_bytes)
        data = memoryview(b"".join(buffers))[:room]
        for segment in self._network.cut_up(data):
            self._send(segment)
        self._flight_bytes += len(data)
        return len(data)

    def _arm(self) -> None:
        if not self._ended:
            self._wants_flush = True
            self._schedule()

    def _send(self, segment: memoryview | None) -> None:
        if not self._closed:
            self._arrival_s = max(self._arrival_s, self._network.arrival_s())
            self._flight.append((self._arrival_s, segment))
            self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None or self._closed:
            return
        loop = self._network.loop
        due_s = loop.time() if self._can_flush or not self._flight else self._flight[0][0]
        self._timer = loop.call_at(due_s, self._turn) if due_s > loop.time() else loop.call_soon(self._turn)

    @property
    def _can_flush(self) -> bool:
        return self._wants_flush and self._flight_bytes < MAX_FLIGHT_BYTES

    def _turn(self) -> None:
        self._timer = None
        self._deliver()
        if self._closed:
            return
        if self._can_flush:
            self._wants_flush = False
            if not self._source.link_core(self._target.rank).flush():
                self._wants_flush = not self._ended
            self._source.moved(self._target.rank)
        if self._flight or self._wants_flush:
            self._schedule()

    def _deliver(self) -> None:
        """Hand over what has arrived, as a socket's shell would."""
        core = self._target.link_core(self._source.rank)
        now_s = self._network.loop.time()
        budget = MAX_CALL_BYTES
        while self._flight and self._flight[0][0] <= now_s and budget > 0:
            arrival_s, segment = self._flight.popleft()
            if segment is None:
                self._target.end_came(self._source.rank)
                return
            buffer = core.get_buffer()
            nbytes = min(len(segment), len(buffer))
            buffer[:nbytes] = segment[:nbytes]
            if nbytes < len(segment):
                self._flight.appendleft((arrival_s, segment[nbytes:]))
            self._flight_bytes -= nbytes
            self._network.delivered_bytes += nbytes
            budget -= nbytes
            try:
                core.buffer_updated(nbytes)
            except RemoteProtocolError as error:
                self._target.break_pair(self._source.rank, error)
            if self._closed:
                return
        self._target.moved(self._source.rank)


class MemoryLink:
    """What connects two ranks, or a rank with itself: then its one direction leads back."""

    def __init__(self, network: MemoryNetwork, one: MemoryMesh, other: MemoryMesh) -> None:
        self._network = network
        self._ended: set[int] = set()
        self._out = {one: _Direction(network, one, other)}
        if one is not other:
            self._out[other] = _Direction(network, other, one)

    def open(self) -> None:
        """Let bytes flow."""
        for mesh in self._out:
            mesh.link_open(self._other(mesh).rank, self)
        for direction in self._out.values():
            direction.open()

    def end(self, mesh: MemoryMesh) -> None:
        """`mesh` writes no more; what it wrote still arrives. Idempotent."""
        if mesh.rank not in self._ended:
            self._ended.add(mesh.rank)
            self._out[mesh].end()

    def hang_up(self, mesh: MemoryMesh) -> None:
        """`mesh` neither writes nor reads any more."""
        self.end(mesh)
        self._out[self._other(mesh)].close()

    def cut(self) -> None:
        """Whatever is under way is lost, and each end finds that nothing more will come."""
        for mesh, direction in self._out.items():
            direction.close()
            self._network.loop.call_soon(mesh.end_came, self._other(mesh).rank)

    def _other(self, mesh: MemoryMesh) -> MemoryMesh:
        return next((other for other in self._out if other is not mesh), mesh)


class MemoryNetwork:
    """Where `MemoryMesh`es find each other, by world and rank.

    `latency_s` is the time every byte takes. A `seed` makes segments, latencies and partial writes random, and the
    same in every run of a deterministic program.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seed: int | None = None, latency_s: float = 0.0) -> None:
        self.loop = loop
        self._random = None if seed is None else random.Random(seed)
        self.delivered_bytes = 0
        self._latency_s = latency_s
        self._meshes: dict[tuple[bytes, int], MemoryMesh] = {}
        self._waiting: dict[tuple[bytes, int], list[MemoryMesh]] = {}

    def cut(self, rank: int, world_id: bytes = b"") -> None:
        """`rank` vanishes at once: its peers lose it, and what it has pending fails with ClosedError."""
        self._meshes[world_id, rank].abort("this rank was cut off")

    def register(self, mesh: MemoryMesh) -> None:
        """`mesh` can be connected to from now on; meshes that waited for it are."""
        self._meshes[mesh.world_id, mesh.rank] = mesh
        for dialer in self._waiting.pop((mesh.world_id, mesh.rank), []):
            self.dial(dialer, mesh.rank)

    def dial(self, mesh: MemoryMesh, rank: int) -> None:
        """Connect `mesh` with `rank`, once that exists."""
        if (mesh.world_id, rank) in self._meshes:
            self.loop.call_at(self.arrival_s(), self._connect, mesh, rank)
        else:
            self._waiting.setdefault((mesh.world_id, rank), []).append(mesh)

    def _connect(self, mesh: MemoryMesh, rank: int) -> None:
        other = self._meshes[mesh.world_id, rank]
        if not mesh.link_wanted(rank):
            return
        if other.closing:
            mesh.link_refused(rank, left=other.has_left)
        else:
            MemoryLink(self, mesh, other).open()

    def arrival_s(self) -> float:
        """When something sent now arrives."""
        jitter_s = 0.0 if self._random is None else self._random.random() * JITTER_S
        return self.loop.time() + self._latency_s + jitter_s

    def accepted(self, room: int) -> int:
        """How many bytes a write may take of `room`."""
        if self._random is None or self._random.random() < 0.7:
            return max(0, room)
        return max(0, min(room, self._random.choice((0, 1, 47, 48, 49, 4096, self._random.randrange(1 << 19)))))

    def cut_up(self, data: memoryview) -> list[memoryview]:
        """The segments in which `data` travels."""
        if self._random is None or len(data) < 2 or self._random.random() < 0.5:
            return [data] if data else []
        cuts = sorted(self._random.randrange(1, len(data)) for _ in range(self._random.randrange(1, 4)))
        return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if end > start]


class _Peer(StreamPeer):
    """`link` is None before it is open."""

    def __init__(self, core: PeerCore) -> None:
        super().__init__(core, "not connected")
        self.link: MemoryLink | None = None
        self.requested = False


class MemoryMesh(StreamMesh[_Peer]):
    """The methods are those of `Mesh`, and so is what they promise; `tests/kits/transport_conformance.py` tests both.

    Ranks wait for each other without limit: one that never calls `listen` is never found, but not lost either.
    """

    asks_who_is_gone: ClassVar[bool] = False
    """Watching the store would keep the simulated loop busy, which then never finds that all ranks wait in vain."""

    def __init__(
        self, network: MemoryNetwork, rank: int, world_size: int, owner: MeshOwner, world_id: bytes = b""
    ) -> None:
        super().__init__(rank, world_size, owner)
        self.world_id = world_id
        self.has_left = False
        self._network = network

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

    def is_connected(self, rank: int) -> bool:
        """See BaseMesh.is_connected."""
        peer = self._peers.get(rank)
        return peer is not None and not peer.ended and peer.link is not None

    def is_reached(self, rank: int) -> bool:
        """See BaseMesh.is_reached."""
        peer = self._peers.get(rank)
        return peer is not None and not peer.ended and (peer.requested or peer.link is not None)

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
            self._network.loop.call_soon(self._leave_peer, rank)

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

    # -- inside

    def _end_stream(self, rank: int, peer: _Peer) -> None:
        if peer.link is not None:
            peer.link.end(self)

    def _hang_up(self, rank: int, peer: _Peer) -> None:
        if peer.link is not None:
            peer.link.hang_up(self)

    def _leave_peer(self, rank: int) -> None:
        peer = self._peers[rank]
        if peer.ended:
            return
        if peer.link is not None:
            peer.core.goodbye()
            self.moved(rank)
        elif not peer.core.has_output:
            self._finish(rank, "closed", closed_here(rank))

    def _leave(self) -> None:
        self.has_left = True
        for rank in list(self._peers):
            if rank != self.rank:
                self._leave_peer(rank)

    def _not_ended(self) -> list[int]:
        return [rank for rank, peer in self._peers.items() if not peer.ended and rank != self.rank]

    def _new_peer(self, rank: int) -> _Peer:
        peer = self._peers[rank] = _Peer(self._new_core(rank))
        return peer

    def _close_all(self, error: ClosedError) -> None:
        for rank, peer in list(self._peers.items()):
            if not peer.ended:
                if peer.link is not None:
                    peer.link.cut()
                self._finish(rank, "closed", error)
        self.cores[:] = [None] * self.world_size
