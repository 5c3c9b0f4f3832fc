"""HostMemory: what one mesh needs to share memory with the ranks beside it, made when the first of them connects."""

from __future__ import annotations

import asyncio

from asyncdist.transport.doorbell import Doorbell
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.segment import Segment

__all__ = ["HostMemory"]


class HostMemory:
    """The doorbell of this rank, and the segments it has given numbers so that it can refer to them."""

    __slots__ = ("_doorbell", "_loop", "closed", "fds", "segments")

    def __init__(self, loop: asyncio.AbstractEventLoop, fds: SocketSet) -> None:
        self._loop = loop
        self._doorbell: Doorbell | None = None
        self.fds = fds
        self.segments: dict[int, Segment] = {}
        self.closed = False

    @property
    def doorbell(self) -> Doorbell:
        """The doorbell, made at the first use. Raises OSError without descriptors or memory."""
        if self._doorbell is None:
            self._doorbell = Doorbell(self._loop, self.fds)
        return self._doorbell

    @property
    def shared(self) -> bool:
        """Whether anybody shares memory with us."""
        return self._doorbell is not None and bool(self._doorbell.pollers)

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
