"""MpiMesh: messages to and from every rank through MPI, whose messages are pieces of a stream of bytes for each pair.

The cores, with their matching, credit and withdrawing, are those of sockets (`transport.protocol`). So a receive that
times out is taken back although MPI could not cancel the sender's message, and a send of any size ends on time.
A message of MPI without bytes is the end of a stream: behind a GOODBYE a rank has left, without one it is lost.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np

from asyncdist.errors import ClosedError, DistBackendError, RemoteProtocolError
from asyncdist.mpi.library import leave_behind, open_meshes
from asyncdist.mpi.progress import Progress
from asyncdist.transport.base_mesh import MeshOwner, StreamMesh, StreamPeer
from asyncdist.transport.protocol.frame import FRAGMENT_BYTES
from asyncdist.transport.protocol.peer import PeerCore

SEGMENT_BYTES: Final = FRAGMENT_BYTES + 4096
"""Longest message of MPI: one fragment of a payload, with its header and some control frames."""
RECEIVES: Final = 4
"""Receives that are always posted, from any rank: while one is emptied the others fill."""
SENDS: Final = 8
"""Messages to one rank that MPI has at a time: two MiB, as a socket's buffers hold."""
STREAM_TAG: Final = 0
ACCEPT_LIMIT_S: Final = 30.0
"""How long ranks that have met in a store may take until they meet in MPI: milliseconds, unless one of them fails."""
PAUSE_S: Final = 1e-3
GRACE_S: Final = 0.02
"""How long a rank that has ended its stream without a goodbye is not taken for lost: collectives that it has carried
out do not need it any more, but end here only when MPI is asked."""

Communicators = tuple[Any, Any]
"""Of one group: what its members agree on goes through the first, arrays through the second."""


class _Peer(StreamPeer):
    """With our messages that MPI still reads."""

    def __init__(self, core: PeerCore) -> None:
        super().__init__(core, "mpi")
        self.sending = 0
        self.wants_flush = False
        self.finished = False
        """Whether we have ended our stream."""


class MpiMesh(StreamMesh[_Peer]):
    """The methods are those of `Mesh`, and so is what they promise. Ranks are connected from the start.

    `rank` and `world_size` are those of `communicators`, which `accept` makes of MPI's world where none are given.
    """

    asks_who_is_gone: ClassVar[bool] = False
    """`mpirun` ends all when one rank dies."""

    unmet: ClassVar[str] = "mpi"

    def __init__(
        self,
        mpi: Any,
        rank: int,
        world_size: int,
        owner: MeshOwner,
        spin_us: float,
        communicators: Communicators | None = None,
    ) -> None:
        super().__init__(rank, world_size, owner)
        self.mpi = mpi
        self._loop = asyncio.get_running_loop()
        self.progress = self.spinner = Progress(mpi, self._loop, spin_us, self._take_messages, self._awaits)
        if not spin_us:
            self.spinner = None
        self._communicators = communicators
        self._untaken = communicators
        self._comm: Any = None
        self._receives: list[tuple[Any, Any]] = []
        self._status = mpi.Status()
        self._number = 0

    # -- communicators

    @property
    def comm(self) -> Any:
        """The communicator of all ranks."""
        return self._comm

    def take_communicators(self, ranks: Sequence[int]) -> Communicators | None:
        """Those of all ranks, for the first group that has them all; None for any other."""
        if tuple(ranks) != tuple(range(self.world_size)):
            return None
        taken, self._untaken = self._untaken, None
        return taken

    def accept(self) -> None:
        """Take messages from now on. Where the ranks have met in a store, all are about to call this."""
        if self._communicators is None:
            self._communicators = self._untaken = self._number_ranks()
        self._comm = self._communicators[0]
        host = self._comm.Split_type(self.mpi.COMM_TYPE_SHARED)
        self.progress.crowded = host.Get_size() > (os.cpu_count() or 1)
        host.Free()
        for _ in range(RECEIVES):
            room = np.empty(SEGMENT_BYTES, np.uint8)
            request = self._comm.Recv_init([room, self.mpi.BYTE], self.mpi.ANY_SOURCE, STREAM_TAG)
            request.Start()
            self._receives.append((request, room))
        open_meshes.add(self)
        self._begin(self._until_the_loop_ends(), "asyncdist mpi")
        self.progress.stir()

    def _number_ranks(self) -> Communicators:
        """Make communicators in which ranks have the numbers that the store gave them. Raises DistBackendError."""
        world, until_s = self.mpi.COMM_WORLD, time.monotonic() + ACCEPT_LIMIT_S
        here = world.Ibarrier()
        while not here.Test():
            if time.monotonic() > until_s:
                leave_behind("joining a world", [here])
                raise DistBackendError(
                    f"rank {self.rank}: not all ranks that met in the store came to MPI within {ACCEPT_LIMIT_S:g} s"
                )
            time.sleep(PAUSE_S)
        comm = world.Split(0, self.rank)
        return comm, comm.Dup()

    async def _until_the_loop_ends(self) -> None:
        """Nothing else would tell the others, as sockets do that are closed with the loop."""
        try:
            await self._all_ended.wait()
        except asyncio.CancelledError:
            self.abort("the event loop ended before it was closed")
            raise

    # -- messages

    def peer(self, rank: int) -> PeerCore:
        """See BaseMesh.peer."""
        self._check_rank(rank)
        self._check_open()
        core = self.cores[rank] = self._peer(rank).core
        return core

    def is_connected(self, rank: int) -> bool:
        """See BaseMesh.is_connected."""
        peer = self._peers.get(rank)
        return not self._closing and (peer is None or not peer.ended)

    is_reached = is_connected

    # -- the end

    def abort(self, reason: str = "the mesh was aborted") -> None:
        """See BaseMesh.abort."""
        super().abort(reason)
        self.hang_up()

    def _leave(self) -> None:
        """Tell every rank, as any may wait for a message from this one."""
        for rank in range(self.world_size):
            if rank != self.rank:
                self._peer(rank).core.goodbye()
                self.moved(rank)

    def _not_ended(self) -> list[int]:
        own = self.rank
        return [rank for rank, peer in self._peers.items() if peer.sending or not (peer.ended or rank == own)]

    def _close_all(self, error: ClosedError) -> None:
        if self._comm is not None:
            for rank in range(self.world_size):  # those that were not met may wait for this one as well
                if rank != self.rank and not self._peer(rank).ended:
                    self._finish(rank, "closed", error)
        if (own := self._peers.get(self.rank)) is not None:
            own.core.fail(error)
        self.cores[:] = [None] * self.world_size

    def hang_up(self) -> None:
        """End all streams, and take back the receives: nothing is left for MPI to do. Idempotent."""
        open_meshes.discard(self)
        if not self._receives:
            self.progress.stop()
            return
        for rank in range(self.world_size):
            peer = self._peers.get(rank)
            if rank != self.rank and not (peer is not None and peer.finished):
                request = self._comm.Isend([b"", self.mpi.BYTE], rank, STREAM_TAG)
                if not request.Test():
                    leave_behind("goodbyes", [request])
        for requests in self.progress.stop():
            leave_behind("messages and agreements that other ranks have not met", requests)
        for request, _ in self._receives:
            request.Cancel()
            request.Wait()
            request.Free()
        self._receives.clear()

    # -- what MPI does

    def _take_messages(self) -> bool:
        """Hand over what has come, in order, as far as one turn of the loop may take."""
        for turn in range(RECEIVES):
            if not self._receives:
                return False
            request, room = self._receives[0]
            if not request.Test(self._status):
                return turn > 0
            source, nbytes = self._status.Get_source(), self._status.Get_count(self.mpi.BYTE)
            self._receives.append(self._receives.pop(0))
            try:
                self._received(source, room[:nbytes].data)
            finally:
                if not self._closed_because:
                    request.Start()
        return True

    def _received(self, rank: int, segment: memoryview) -> None:
        peer = self._peer(rank)
        if peer.ended:
            return
        if not segment:
            self.end_came(rank)
            return
        core = peer.core
        try:
            while segment:
                buffer = core.get_buffer()
                nbytes = min(len(segment), len(buffer))
                buffer[:nbytes] = segment[:nbytes]
                core.buffer_updated(nbytes)
                segment = segment[nbytes:]
        except RemoteProtocolError as error:
            if not peer.ended:
                self._peer_lost(rank, error)
            return
        self.moved(rank)

    def _write(self, rank: int, peer: _Peer, buffers: Sequence[bytes | memoryview]) -> int:
        if peer.sending >= SENDS or peer.finished:
            return 0
        data = b"".join(buffers)[:SEGMENT_BYTES]
        self._send(rank, peer, data)
        return len(data)

    def _send(self, rank: int, peer: _Peer, data: bytes) -> None:
        request = self._comm.Isend([data, self.mpi.BYTE], rank, STREAM_TAG)
        peer.sending += 1
        self._number += 1
        self.progress.wait(("send", self._number), [request], partial(self._sent, rank, peer, data), len(data))

    def _sent(self, rank: int, peer: _Peer, data: bytes, error: Exception | None) -> None:
        peer.sending -= 1
        if error is not None and not peer.ended:
            self._peer_lost(rank, error)
        elif peer.wants_flush:
            self._flush(rank, peer)
        self._look_for_end()

    def _arm(self, rank: int, peer: _Peer) -> None:
        peer.wants_flush = True
        if peer.sending < SENDS:
            self._loop.call_soon(self._flush, rank, peer)

    def _flush(self, rank: int, peer: _Peer) -> None:
        if peer.wants_flush and not peer.ended:
            peer.wants_flush = False
            if not peer.core.flush():
                peer.wants_flush = True
            self.moved(rank)

    def _awaits(self) -> bool:
        return bool(self._any_source.entries) or any(
            not peer.ended and (peer.core.expects or peer.core.has_output) for peer in self._peers.values()
        )

    # -- streams that end

    def _ended_early(self, rank: int) -> None:
        self._loop.call_later(GRACE_S, super()._ended_early, rank)
        self.progress.stir()

    def _end_stream(self, rank: int, peer: _Peer) -> None:
        if not peer.finished:
            peer.finished = True
            self._send(rank, peer, b"")

    _hang_up = _end_stream

    def _new_peer(self, rank: int) -> _Peer:
        peer = self._peers[rank] = _Peer(self._new_core(rank))
        peer.core.open(partial(self._write, rank, peer), partial(self._arm, rank, peer))
        if rank != self.rank and not self._closed_because:
            self._owner.peer_connected(rank)
        return peer
