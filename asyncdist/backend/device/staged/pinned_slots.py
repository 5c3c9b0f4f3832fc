"""PinnedSlots: page-locked buffers of one size, a few of them, allocated in a thread when they are first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncdist.backend.device.threads import Helpers, in_thread
from asyncdist.cuda.interface import Pinned, Runtime

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
        self._taken = 0
        self._allocating: asyncio.Future[Pinned] | None = None
        self._closed = False

    @property
    def taken(self) -> int:
        """Buffers in use."""
        return self._taken

    def take(self) -> Pinned | None:
        """A buffer; None if none is free, and then `available` follows."""
        if self._free:
            self._taken += 1
            return self._free.pop()
        if self._left and self._allocating is None and not self._closed:
            self._left -= 1
            self._allocating = in_thread(self._loop, self._allocate, on=(self._runtime, self._device))
            self._allocating.add_done_callback(self._allocated)
        return None

    def give(self, buffer: Pinned) -> None:
        """Take one back, which nothing uses any more."""
        self._taken -= 1
        if self._closed:
            self._helpers.start(self._release, buffer)
            return
        self._free.append(buffer)
        self._available(None)

    def close(self) -> None:
        """Free what is not in use now, and the rest when it is given back. Idempotent."""
        self._closed = True
        free, self._free = self._free, []
        for buffer in free:
            self._helpers.start(self._release, buffer)

    def _allocate(self) -> Pinned:
        """In a thread of its own, whose current device would be the first: CUDA would open a context there as well."""
        self._runtime.set_device(self._device)
        return self._runtime.pinned(self.nbytes)

    def _release(self, buffer: Pinned) -> None:
        self._runtime.set_device(self._device)
        buffer.close()

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
        self._free.append(future.result())
        if self._closed:
            self.close()
        else:
            self._available(None)
