"""HostMemory: what one mesh needs to share memory with the ranks beside it, made when the first of them connects."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Collection
from typing import Final, Protocol

from asyncdist.concurrency import trace as events
from asyncdist.concurrency.process import is_stopped
from asyncdist.errors import ClosedError, PeerLostError
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.protocol.zero_copy import ZeroCopy
from asyncdist.transport.shared_memory.arrays import SharedArrays
from asyncdist.transport.shared_memory.doorbell import Doorbell, Ringer
from asyncdist.transport.shared_memory.process_memory import OwnMemory, permit_reading
from asyncdist.transport.shared_memory.ring import half_bytes
from asyncdist.transport.shared_memory.segment import PAGE_BYTES, AttachedSegment, Segment

__all__ = ["DEFAULT_SHARED_BYTES", "MIN_RING_BYTES", "RING_BYTES", "HostMemory"]

DEFAULT_SHARED_BYTES: Final = 32 << 20
"""Memory one rank shares in all: rings to its peers, and what its groups put out for each other."""
RING_BYTES: Final = 1 << 20
"""One direction of one pair: four fragments, so that both sides copy at the same time, and still within the caches."""
MIN_RING_BYTES: Final = 32 << 10
"""Shortest ring: where many ranks share a host theirs become shorter, but one of a few pages is worse than a stream."""
RING_SHARE: Final = 8
"""A ring takes at most this part of what is left for rings, which is half of the limit: with 32 MiB some forty peers
find room, the first eight of them for rings of full length."""


class Closable(Protocol):
    """Touches shared memory unless `closed`."""

    closed: bool

    def close(self) -> None:
        """Touch shared memory no more, and revoke what is still exposed in it. Idempotent."""


class Sharing(Protocol):
    """A connection through which memory is shared."""

    zero_copy: ZeroCopy
    ringer: Ringer | None

    @property
    def peer_process(self) -> int:
        """The process of the peer. Raises OSError."""

    def share(self, number: int, segment: Segment | AttachedSegment, *, lend: bool = False) -> None:
        """Have the peer map `segment` under `number`; with `lend` it may lend it on. Raises OSError, ClosedError."""

    def unshare(self, number: int) -> None:
        """We have no segment of that number any more."""

    def take_segment(self, number: int) -> AttachedSegment:
        """Keep what the peer has shared. Raises OSError, RemoteProtocolError."""


class HostMemory:
    """The doorbell of this rank, its segments by the numbers that others know them by, and the connections to those."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fds: SocketSet,
        limit_bytes: int = DEFAULT_SHARED_BYTES,
        arrays_bytes: int | None = None,
        *,
        single_copy: str = "off",
        huge_pages: bool = False,
    ) -> None:
        self.loop = loop
        self._doorbell: Doorbell | None = None
        self._left_bytes = limit_bytes
        self._ring_bytes = limit_bytes // 2
        self._next_number = 1
        self._left_listeners: dict[Callable[[int, PeerLostError], None], None] = {}
        self.fds = fds
        self.arrays = SharedArrays(loop, fds, self._number, self._arena_gone, arrays_bytes)
        self.own = None if single_copy == "off" else OwnMemory(huge_pages=huge_pages)
        """What of our process others may read, None: nothing, and we read nothing of theirs."""
        if single_copy == "permit":
            permit_reading()
        self.segments: dict[int, Segment] = {}
        self.lanes: dict[Closable, None] = {}
        """What writes into segments of ours."""
        self.connections: dict[int, Sharing] = {}
        """By global rank, those through which memory is shared now."""
        self.ranks_here = 0
        """Ranks that share memory with each other here, as far as we know: our peers and we. 0 without any."""
        self.crowded = False
        """Whether a peer lives in this very process: while we look, it cannot do anything."""

    @property
    def doorbell(self) -> Doorbell:
        """The doorbell, made at the first use. Raises OSError without descriptors or memory."""
        if self._doorbell is None:
            self._doorbell = Doorbell(self.loop, self.fds, self._unheard)
        return self._doorbell

    def joined(self, rank: int, connection: Sharing, *, crowded: bool) -> None:
        """Rank `rank` shares memory with us; `crowded` if it lives in this very process."""
        self.connections[rank] = connection
        self.ranks_here = self.ranks_here + 1 if self.ranks_here else 2
        self.crowded |= crowded

    def parted(self, rank: int) -> None:
        """Rank `rank` shares no memory with us any more."""
        if self.connections.pop(rank, None) is not None:
            self.ranks_here = self.ranks_here - 1 if self.ranks_here > 2 else 0

    def stopped(self, rank: int) -> bool:
        """Whether the process of a rank that shares memory with us is stopped, by a signal or by a debugger."""
        connection = self.connections.get(rank)
        return connection is not None and is_stopped(connection.peer_process)

    def new_ring(self) -> Segment:
        """Memory for our half of a pair, to be given back with `free_ring`. Raises OSError."""
        ring_bytes = min(RING_BYTES, self._ring_bytes // RING_SHARE, self._left_bytes) // PAGE_BYTES * PAGE_BYTES
        if ring_bytes < MIN_RING_BYTES:
            ring_bytes = MIN_RING_BYTES
            if min(self._ring_bytes, self._left_bytes) < half_bytes(ring_bytes):
                raise OSError(errno.ENOMEM, "ASYNCDIST_SHM_BYTES leaves no memory for another ring")
        segment = Segment(half_bytes(ring_bytes), self.fds, "asyncdist-ring")
        self._ring_bytes -= segment.size
        self._left_bytes -= segment.size
        return segment

    def free_ring(self, segment: Segment) -> None:
        """A pair has ended."""
        segment.close()
        self._ring_bytes += segment.size
        self._left_bytes += segment.size

    def on_left(self, listener: Callable[[int, PeerLostError], None]) -> None:
        """Call `listener(rank, error)` when a peer has left, which ends nothing that it took part in to the end."""
        self._left_listeners[listener] = None

    def forget(self, listener: Callable[[int, PeerLostError], None]) -> None:
        """Call `listener` no more."""
        self._left_listeners.pop(listener, None)

    def left(self, rank: int, error: PeerLostError) -> None:
        """Rank `rank` has said goodbye."""
        for listener in list(self._left_listeners):
            listener(rank, error)

    def new_segment(self, size: int) -> int:
        """Make a segment of our own and return its number; 0 if there is no memory left for it."""
        if size > self._left_bytes:
            return 0
        try:
            segment = Segment(size, self.fds, "asyncdist-items")
        except OSError as error:
            events.info("no shared memory of %d bytes: %s", size, error)
            return 0
        number = self._number()
        self.segments[number] = segment
        self._left_bytes -= segment.size
        return number

    def share(self, number: int, ranks: Collection[int]) -> bool:
        """Have `ranks` map segment `number`; whether all of them can."""
        try:
            for rank in ranks:
                self.connections[rank].share(number, self.segments[number])
        except (OSError, ClosedError, KeyError) as error:
            events.info("segment %d could not be shared with ranks %s: %r", number, ranks, error)
            return False
        return True

    def lend(self, segment: Segment | AttachedSegment, rank: int) -> int:
        """Have `rank` map a segment that stays the caller's; returns its number there, 0 if it cannot be mapped."""
        number = self._number()
        try:
            self.connections[rank].share(number, segment, lend=True)
        except (OSError, ClosedError, KeyError) as error:
            events.info("a segment of %d bytes could not be lent to rank %d: %r", segment.size, rank, error)
            return 0
        return number

    def free(self, number: int) -> None:
        """Give a segment back: its descriptor now, its memory with the last view of it."""
        segment = self.segments.pop(number, None)
        if segment is not None:
            self._left_bytes += segment.size
            segment.close()
            for connection in list(self.connections.values()):
                connection.unshare(number)

    def _number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def _arena_gone(self, number: int) -> None:
        for connection in list(self.connections.values()):
            connection.zero_copy.release(number)

    def _unheard(self) -> None:
        """The loop has ended, or this rank has: nothing moves lanes on any more, so what they expose is revoked.

        The memory is the program's again, although the group was never closed.
        """
        for lane in list(self.lanes):
            lane.close()

    def forked(self) -> None:
        """In a forked child: what the parent shares must neither be written nor waited for here."""
        self.ranks_here = 0
        self.connections.clear()
        for lane in self.lanes:
            lane.closed = True
        if self._doorbell is not None:
            self._doorbell.silence()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        for number in list(self.segments):
            self.free(number)
        self.arrays.close()
        if self._doorbell is not None:
            self._doorbell.close()
