"""PinnedSlots: page-locked buffers of one size, a few of them, allocated in a thread when they are first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncdist.cuda.interface import Pinned, Runtime
from asyncdist.gpu.closing import close_all
from asyncdist.gpu.threads import Helpers, in_thread

__all__ = ["PinnedSlots"]


class PinnedSlots:
    """At most `count` buffers of `nbytes`. `available()` is called, from the loop, when there may be one to take.

    Page-locking takes the driver milliseconds, so it is never done on the loop, and buffers are kept until `close`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runtime: Runtime,
        device: int,
        nbytes: int,
        count: int,
        helpers: Helpers,
        available: Callable[[BaseException | None], object],
    ) -> None:
        self.nbytes = nbytes
        self._loop = loop
        self._runtime = runtime
        self._device = device
        self._left = count
        self._helpers = helpers
        self._available = available
        self._free: list[Pinned] = []
        self._taken: set[Pinned] = set()
        self._allocating: asyncio.Future[Pinned] | None = None
        self._closed = False

    @property
    def taken(self) -> int:
        """Buffers in use."""
        return len(self._taken)

    def take(self) -> Pinned | None:
        """A buffer; None if none is free, and then `available` follows."""
        if self._free:
            buffer = self._free.pop()
            self._taken.add(buffer)
            return buffer
        if self._left and self._allocating is None and not self._closed:
            self._left -= 1
            on = self._runtime, self._device
            self._allocating = in_thread(self._loop, self._runtime.pinned, self.nbytes, on=on, discard=close_all)
            self._allocating.add_done_callback(self._allocated)
        return None

    def give(self, buffer: Pinned) -> None:
        """Take one back, which nothing uses any more."""
        if self._closed:
            return
        self._taken.remove(buffer)
        self._free.append(buffer)
        self._available(None)

    def close(self) -> list[Pinned]:
        """Let there be no more; returns all there are, to be closed once nothing uses them."""
        self._closed = True
        buffers = [*self._free, *self._taken]
        self._free.clear()
        self._taken.clear()
        return buffers

    def _allocated(self, future: asyncio.Future[Pinned]) -> None:
        self._allocating = None
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            fewer = bool(self._free or self._taken)  # it goes on with those that there are
            self._left = 0 if fewer else self._left + 1
            if not fewer:
                self._available(error)
            return
        if self._closed:
            self._helpers.start(future.result().close)
            return
        self._free.append(future.result())
        self._available(None)
