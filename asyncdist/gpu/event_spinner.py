"""EventSpinner: looking at the GPU for some microseconds before whoever awaits an operation goes to sleep.

A small operation may be over before the loop has turned once. So whoever awaits one looks first, as `transport.spin`
does at the memory that ranks share, and only while that has helped lately: for at most ASYNCDIST_SPIN_US (20), or five
times that where ranks have to hear from each other between two events.
"""

from __future__ import annotations

from threading import get_ident
from time import perf_counter

from asyncdist.concurrency.spin import CATCH, MAX_SKIPPED, PATIENCE, TURN_S, Pending
from asyncdist.gpu.cuda_events import Completions
from asyncdist.transport.spin import Spinner

__all__ = ["EventSpinner"]


class EventSpinner:
    """Looks on behalf of one `Completions`. Calls come from tasks of its loop.

    `messages` looks for what other ranks say, where operations wait for that too.
    """

    __slots__ = ("_completions", "_last_turn_s", "_limit_s", "_messages", "_misses", "_skip", "_skipped", "_thread")

    def __init__(self, completions: Completions, limit_us: float, messages: Spinner | None = None) -> None:
        self._completions = completions
        self._messages = messages
        self._limit_s = (limit_us if messages is None else CATCH * limit_us) * 1e-6
        self._thread = get_ident()
        self._misses = 0
        self._skip = 0
        self._skipped = 0
        self._last_turn_s = 0.0

    def look(self, work: Pending) -> bool:
        """Look until `work` is done, for a while; whether it is."""
        if self._skipped < self._skip:
            self._skipped += 1
            return False
        if get_ident() != self._thread:  # elsewhere asyncio refuses to wait
            return False
        self._skipped = 0
        look, messages = self._completions.look, self._messages
        look()
        until_s = 0.0
        while not work._done:
            now_s = perf_counter()
            if not until_s:
                until_s = now_s + self._limit_s
            elif now_s >= until_s:
                self._misses += 1
                if self._misses >= PATIENCE:
                    self._skip = min(2 * self._skip + 1, MAX_SKIPPED)
                return False
            if messages is not None:
                messages.glance(work)
            look()
        self._misses = self._skip = 0
        return True

    def woken(self) -> None:
        """The operation of the last look has ended since."""

    def turn_due(self) -> bool:
        """Whether the task that has just been served should let the loop turn before it goes on."""
        now_s = perf_counter()
        if now_s - self._last_turn_s < TURN_S:
            return False
        self._last_turn_s = now_s
        return True
