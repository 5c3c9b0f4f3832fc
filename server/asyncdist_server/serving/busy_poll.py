"""Busy polling: a daemon that has just answered looks for the next request for a moment instead of sleeping.

To be woken takes a process about as long as the daemon needs to answer. So for some microseconds after an answer the
loop turns without sleeping, each time offering its core to other threads. Where that is mostly in vain, because
clients ask seldom or are many, it is tried less and less often; a daemon that is asked nothing sleeps.

A daemon that is bound to one core may have clients on it. Looking can only take their time then: they run as soon as
they have an answer, and the next request is there when the daemon gets its core back. That shows in how often it is
taken away. One that is not bound goes on looking, for that is how the system sees that two could run, and parts them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Final

if sys.platform == "linux":
    import resource

DEFAULT_BUSY_POLL_US: Final = 50.0
"""Longer than a client of this host needs from an answer to its next request, shorter than being woken twice."""
MAX_BUSY_POLL_US: Final = 1000.0
"""Longest time that may be asked for: this much processor time may be added to each answer."""
PATIENCE: Final = 4
"""Polls in vain after which not every answer is followed by one."""
MAX_SKIPPED: Final = 256
"""Answers without a poll between two that try again, at most: clients may have begun to ask quickly."""
CAUGHT: Final = 32
"""Requests that came while it looked, before it is seen how often the core was taken away meanwhile."""
SHARED_SKIPPED: Final = 4096
"""Answers without a poll where that was half as often, or more: a hundred times those that it takes to see it."""


class BusyPoll:
    """Of one loop; `answered()` is to be called whenever requests have been run."""

    __slots__ = (
        "_asked",
        "_caught",
        "_clock",
        "_duration_s",
        "_loop",
        "_misses",
        "_polling",
        "_skip",
        "_skipped",
        "_taken",
        "_times_taken",
        "_until_s",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        duration_us: float,
        times_taken: Callable[[], int],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._loop = loop
        self._duration_s = duration_us * 1e-6
        self._times_taken = times_taken
        self._clock = clock
        self._polling = False
        self._asked = False  # since it was looked last
        self._until_s = 0.0
        self._caught = 0
        self._taken = 0  # how often the core had been taken away when the first of those came
        self._misses = 0
        self._skip = 0
        self._skipped = 0

    def answered(self) -> None:
        """Poll from now on, if that can pay."""
        if self._polling:
            self._asked = True
        elif self._skipped < self._skip:
            self._skipped += 1
        else:
            self._skipped = 0
            self._polling = True
            self._asked = False
            self._until_s = self._clock() + self._duration_s
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """Have the loop look at its sockets: it does not sleep while this is due in its next turn."""
        if self._asked:
            self._asked = False
            self._misses = self._skip = 0
            if self._shares_its_core():
                self._polling = False
                self._skip = SHARED_SKIPPED
                return
            self._until_s = self._clock() + self._duration_s
        elif self._clock() >= self._until_s:
            self._polling = False
            self._misses += 1
            if self._misses >= PATIENCE:
                self._skip = min(2 * self._skip + 1, MAX_SKIPPED)
            return
        os.sched_yield()
        self._loop.call_soon(self._poll)

    def _shares_its_core(self) -> bool:
        """Whether the core was taken away for about every other of the last requests; most calls only count."""
        if self._caught == 0:
            self._taken = self._times_taken()
        self._caught += 1
        if self._caught <= CAUGHT:
            return False
        self._caught = 0
        return self._times_taken() - self._taken >= CAUGHT // 2


def _times_taken() -> int:
    """Return how often the kernel has given this thread's core to another thread while it could have run."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw if sys.platform == "linux" else 0


def _never() -> int:
    """Return nothing: threads that share the core will be moved to another."""
    return 0


def busy_poll(loop: asyncio.AbstractEventLoop, duration_us: float) -> BusyPoll | None:
    """Return one, or None where `duration_us` is 0 or no client could ask meanwhile, for want of another core."""
    several = (os.cpu_count() or 1) > 1 and hasattr(os, "sched_yield")
    bound = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1
    return BusyPoll(loop, duration_us, _times_taken if bound else _never) if several and duration_us > 0 else None
