"""The doorbell: how ranks that share memory wake each other's event loops. Linux only.

A rank has one eventfd, which all its peers hold, and one page that they can read: its `asleep` word. A rank that has
put something into shared memory looks at that word and rings only if it is set; a task that looks anyway (spinning in
`Work.__await__`) clears it until its loop turns. A ring too many is harmless, one too few costs `RECHECK_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Final

from asyncdist.concurrency.spin import Pending
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.shared_memory.fence import ORDERED, PAIR, RECHECK_S, fence
from asyncdist.transport.shared_memory.segment import PAGE_BYTES, AttachedSegment, Segment

ASLEEP: Final = 0
"""The word of a rank's page that is not 0 while it sleeps."""
AWAKE: Final = memoryview(bytes(8)).cast("Q")
"""The page of a peer that nobody need ring any more."""


class Doorbell:
    """What the peers of this rank ring. Pollers are called, in turn, whenever there may be something to see.

    A poller takes what is there, returns whether there was anything, and must not raise. `on_end` is called when no
    loop hears the bell any more: it is closed, or its loop was closed, or both are garbage; then perhaps in another
    thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fds: SocketSet, on_end: Callable[[], None]) -> None:
        self._loop = loop
        self._fds = fds
        self.rings = 0
        self._pollers: tuple[tuple[Callable[[], bool], Callable[[], bool]], ...] = ()
        self.awake = False
        """Whether no peer need ring until the loop turns."""
        self.page = Segment(PAGE_BYTES, fds, "asyncdist-doorbell")
        try:
            self.eventfd = fds.add_fd(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        except BaseException:
            self.page.release()
            raise
        self._words = self.page.view.cast("Q")
        self._words[ASLEEP] = 1
        loop.add_reader(self.eventfd, _Heard(self._rung, on_end))
        self._handle = loop.call_later(RECHECK_S, self._recheck)

    def add(self, poller: Callable[[], bool], look: Callable[[], bool] | None = None) -> None:
        """Call `poller` from now on.

        A poller with a `look` comes before those without. A task that looks again and again calls `look` instead, which
        may leave to the next call of `poller` what can wait until then.
        """
        if look is None:
            self._pollers = (*self._pollers, (poller, poller))
        else:
            self._pollers = ((poller, look), *self._pollers)

    def remove(self, poller: Callable[[], bool]) -> None:
        """Call `poller` no more, after the round of calls that may be under way."""
        self._pollers = tuple(pair for pair in self._pollers if pair[0] != poller)

    def silence(self) -> None:
        """Call no poller any more."""
        self._pollers = ()

    def poll(self) -> bool:
        """Take what is there; whether there was anything."""
        found = False
        for poller, _ in self._pollers:
            found |= poller()
        return found

    def poll_for(self, work: Pending) -> None:
        """Take what is there, until `work` is done; to be called again soon, or followed by the loop's turn."""
        for _, look in self._pollers:
            if look() and work._done:
                return

    def stay_awake(self) -> None:
        """No peer need ring until the loop turns, as this task looks by itself, now and with its next operations."""
        if not self.awake:
            self.awake = True
            self._words[ASLEEP] = 0
            self._loop.call_soon(self._fall_asleep)  # before the loop can go to sleep

    def _fall_asleep(self) -> None:
        """From now on peers ring. What came just before is taken here, so that it is not slept upon."""
        self.awake = False
        if self.eventfd >= 0:
            self._words[ASLEEP] = 1
            fence()
            self.poll()

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._handle.cancel()
        self.silence()
        if self.eventfd >= 0:
            self._loop.remove_reader(self.eventfd)
            self._fds.close_fd(self.eventfd)
            self.eventfd = -1
            self._words.release()
            self.page.release()

    def _rung(self) -> None:
        try:
            os.eventfd_read(self.eventfd)
        except (BlockingIOError, InterruptedError):
            return
        self.rings += 1
        self.poll()

    def _recheck(self) -> None:
        self._handle = self._loop.call_later(RECHECK_S, self._recheck)
        self.poll()


class _Heard:
    """What a loop calls when it hears the doorbell. Only that keeps it: it goes when the bell is heard no more."""

    def __init__(self, rung: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._rung = rung
        self._on_end = on_end

    def __call__(self) -> None:
        self._rung()

    def __del__(self) -> None:
        self._on_end()


class Ringer:
    """A peer's doorbell, to ring. Takes both descriptors."""

    def __init__(self, fds: SocketSet, eventfd: int, page: AttachedSegment) -> None:
        self._fds = fds
        self._eventfd = fds.add_fd(eventfd)
        self._page = page
        self.words = page.view.cast("Q")
        """The peer's page: to see in it that the peer is awake takes no call."""

    def ring(self) -> None:
        """Wake the peer if it sleeps; what it is to see must be in place."""
        # That, before this look: either we see it asleep, or it sees what is there. A fence, without its call.
        with PAIR:
            pass
        if not ORDERED:
            with PAIR:
                pass
        if self.words[ASLEEP]:
            self.knock()

    def knock(self) -> None:
        """Wake the peer, which has been seen asleep after a fence behind what it is to see."""
        with contextlib.suppress(BlockingIOError):  # its counter is full, so it is rung enough
            os.eventfd_write(self._eventfd, 1)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self._eventfd >= 0:
            self._fds.close_fd(self._eventfd)
            self._eventfd = -1
            self.words.release()
            self.words = AWAKE
            self._page.release()
