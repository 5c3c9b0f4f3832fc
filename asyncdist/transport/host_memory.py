"""HostMemory: what one mesh needs to share memory with the ranks beside it, made when the first of them connects."""

from __future__ import annotations

import asyncio
import os

from asyncdist.transport.doorbell import Doorbell
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.segment import Segment

__all__ = ["HostMemory"]


class HostMemory:
    """The doorbell of this rank, and the segments it has given numbers so that it can refer to them."""

    __slots__ = ("_doorbell", "_loop", "closed", "crowded", "fds", "ranks_here", "segments")

    def __init__(self, loop: asyncio.AbstractEventLoop, fds: SocketSet) -> None:
        self._loop = loop
        self._doorbell: Doorbell | None = None
        self.fds = fds
        self.segments: dict[int, Segment] = {}
        self.closed = False
        self.ranks_here = 0
        """Ranks that share memory with each other here, as far as we know: our peers and we. 0 without any."""
        self.crowded = False
        """Whether a peer lives in this very process: while we look, it cannot do anything."""

    @property
    def doorbell(self) -> Doorbell:
        """The doorbell, made at the first use. Raises OSError without descriptors or memory."""
        if self._doorbell is None:
            self._doorbell = Doorbell(self._loop, self.fds)
        return self._doorbell

    def joined(self, pid: int) -> None:
        """Another rank, of process `pid`, shares memory with us."""
        self.ranks_here = self.ranks_here + 1 if self.ranks_here else 2
        self.crowded |= pid == os.getpid()

    def poll(self) -> bool:
        """Look at what peers have put into shared memory; whether there was anything."""
        return self._doorbell is not None and self._doorbell.poll()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self.closed = True
        if self._doorbell is not None:
            self._doorbell.close()
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
