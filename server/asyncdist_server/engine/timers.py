"""What becomes due by itself: blocked requests, leases, holds, histories, rounds. No clock and no I/O.

A lease that is kept alive again and again only moves its `deadline`. Its entry in the heap stays where it is, comes up
too early, and is then put back. So keeping a lease alive needs no search.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from asyncdist_server.engine.namespace import Namespace

FLOAT_ERROR_MS: Final = 1e-6
"""By how much a sum of times in whole milliseconds may seem to be more, after a century of monotonic time."""
COMPACT_AFTER: Final = 1024
"""Dead entries are swept from the heap when there are more of them than this and than live ones."""


def in_whole_ms(deadline: float) -> float:
    """Return the first whole millisecond that is not before `deadline`: timers that count in them fire early else.

    Never less than `deadline`, or a timer would find that nothing is due, and come again and again.
    """
    return max(deadline, math.ceil(deadline * 1000 - FLOAT_ERROR_MS) / 1000)


def left_s(time_s: float, since: float, age: float) -> float:
    """Return what is left of `time_s` that began when the store was `since` seconds old, at the age of `age`."""
    return min(max(time_s - (age - since), 0.0), time_s)


class HasDeadline(Protocol):
    """What `Timers` need. A deadline, once set, only moves to later times or to None."""

    armed: bool
    """Whether the heap has an entry."""
    deadline: float | None
    done: bool
    """Whether the deadline counts no longer."""


T = TypeVar("T", bound=HasDeadline)


class Timed:
    """A part of a namespace that has a deadline."""

    __slots__ = ("armed", "deadline", "done", "namespace")

    def __init__(self, namespace: Namespace, deadline: float | None = None) -> None:
        self.namespace = namespace
        self.deadline = deadline
        self.armed = False
        self.done = False

    def fire(self, now: float) -> None:
        """Do what is due now that the deadline has come."""
        raise NotImplementedError


class Timers(Generic[T]):
    """Things that become due, soonest first; of equal deadlines the one that was armed first."""

    __slots__ = ("_dead", "_order", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, T]] = []
        """Empty when nothing is due ever."""
        self._order = 0  # breaks ties, so that two things are never compared
        self._dead = 0

    def arm(self, timed: T) -> None:
        """Make `timed` due at its deadline, if it has one."""
        if not timed.armed and timed.deadline is not None:
            timed.armed = True
            self._order += 1
            heapq.heappush(self.heap, (timed.deadline, self._order, timed))

    def end(self, timed: T) -> None:
        """Note that `timed` never becomes due again."""
        if timed.done:
            return
        timed.done = True
        self._dead += timed.armed
        if self._dead > COMPACT_AFTER and self._dead > len(self.heap) // 2:
            self.heap = [entry for entry in self.heap if not entry[2].done]
            heapq.heapify(self.heap)
            self._dead = 0

    def next(self) -> float | None:
        """Return when `take_due` may have something to do next."""
        heap = self.heap
        while heap and (heap[0][2].done or heap[0][2].deadline is None):
            _, _, timed = heapq.heappop(heap)
            timed.armed = False
            self._dead -= timed.done
        return heap[0][0] if heap else None

    def take_due(self, now: float) -> T | None:
        """Remove and return one thing whose deadline is not after `now`, None if there is none."""
        while (soonest := self.next()) is not None and soonest <= now:
            _, _, timed = heapq.heappop(self.heap)
            timed.armed = False
            if timed.deadline is not None and timed.deadline <= now:
                return timed
            self.arm(timed)
        return None
