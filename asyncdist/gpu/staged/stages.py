"""Stages: the page-locked buffers of a group's messages, each given back once nothing uses it any more.

A buffer has holders: the transfer that took it, a copy on the GPU's queue, a message that leaves from it or arrives in
it. A transfer may fail long before the other two have ended.
"""

from __future__ import annotations

import asyncio
from typing import Final

from asyncdist.cuda import Pinned, Runtime, Stream
from asyncdist.errors import ClosedError
from asyncdist.gpu.closing import close_all, close_behind
from asyncdist.gpu.threads import Helpers, made_in_thread

__all__ = ["Stages"]

STAGES_KEPT: Final = 8
"""Buffers kept for later messages: 32 MiB of page-locked memory at most."""


class Stages:
    """Buffers of `nbytes`. All methods are called on the loop's thread; page-locking and freeing happen in others."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runtime: Runtime, helpers: Helpers, nbytes: int) -> None:
        self.device = 0
        """A GPU that is used here: other ones must not be touched."""
        self._loop = loop
        self._runtime = runtime
        self._helpers = helpers
        self._nbytes = nbytes
        self._free: list[Pinned] = []
        self._holders: dict[Pinned, int] = {}
        self._posted: set[Pinned] = set()
        self._closed = False

    @property
    def used(self) -> int:
        """Buffers that have a holder."""
        return len(self._holders)

    async def take(self) -> Pinned:
        """A buffer that the caller holds. Cancelling loses none, also if it is being made."""
        if self._free:
            buffer = self._free.pop()
        else:
            on = self._runtime, self.device
            buffer = await made_in_thread(self._loop, self._runtime.pinned, self._nbytes, on=on, discard=close_all)
        self._holders[buffer] = 1
        return buffer

    def hold(self, buffer: Pinned, *, posted: bool = False) -> None:
        """One more uses a buffer; with `posted` the transport, which tells of its end unless its group is dropped.

        Raises ClosedError once the buffer was freed, as the group has ended.
        """
        if buffer not in self._holders:
            raise ClosedError("the group's messages have ended")
        self._holders[buffer] += 1
        if posted:
            self._posted.add(buffer)

    def told(self, buffer: Pinned) -> None:
        """The transport is through with a buffer."""
        self._posted.discard(buffer)
        self.drop(buffer)

    def drop(self, buffer: Pinned) -> None:
        """One who held a buffer does no longer; the last one gives it back."""
        holders = self._holders.get(buffer)
        if holders is None:  # it was freed as the group ended
            return
        if holders > 1:
            self._holders[buffer] = holders - 1
            return
        del self._holders[buffer]
        self._give(buffer)

    def close(self, streams: list[Stream], *, dropped: bool) -> None:
        """Close `streams` once the GPU is through with them, and then free buffers.

        What the transport uses is freed when that tells of its end; now, if its group was `dropped`. Idempotent.
        """
        self._closed = True
        buffers, self._free = self._free, []
        for buffer in list(self._holders):
            if dropped or buffer not in self._posted:
                del self._holders[buffer]
                self._posted.discard(buffer)
                buffers.append(buffer)
        if streams or buffers:
            self._helpers.start(close_behind, self._runtime, self.device, streams, buffers)

    def _give(self, buffer: Pinned) -> None:
        if self._closed or len(self._free) >= STAGES_KEPT:
            self._helpers.start(close_behind, self._runtime, self.device, (), (buffer,))
        else:
            self._free.append(buffer)
