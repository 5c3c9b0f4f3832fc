"""HostClocks: how far the clocks of other hosts are ahead, found as NTP does it.

A rank asks one rank of each other host that it is connected to what time it is there: at once, and every minute. It
asks a few times, and the shortest round trip counts: it cannot be further off than half of that. No connection is made
for it, and ranks of one host share its clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from asyncdist.inspect.recorder import Compared
from asyncdist.world.control import Clock, ControlMessage

SAMPLES: Final = 5
AGAIN_S: Final = 60.0
"""Clocks that nobody sets drift apart by a millisecond in that time."""


class HostClocks:
    """`host_of` says on which host a rank is, None if that is not known; `send` returns whether the rank is there."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host_of: Callable[[int], str | None],
        send: Callable[[int, ControlMessage], bool],
    ) -> None:
        self.compared: Compared = {}
        self._loop = loop
        self._host_of = host_of
        self._send = send
        self._asked: dict[int, float] = {}
        """When a rank was asked that has not answered yet."""
        self._samples: dict[int, list[tuple[float, float]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def connected(self, rank: int, own_host: str) -> None:
        """Compare clocks with the host of `rank`, unless it is this one, or another rank there has been asked."""
        host = self._host_of(rank)
        if host not in (None, own_host, *map(self._host_of, self._samples)):
            self._samples[rank] = []
            self._ask(rank)
            # In virtual time all have one clock, and a timer would be something that can still happen in a deadlock.
            if self._timer is None and not getattr(self._loop, "virtual_time", False):
                self._timer = self._loop.call_later(AGAIN_S, self._ask_all)

    def heard(self, rank: int, message: Clock) -> None:
        """A rank asks, or answers."""
        now_s = time.time()
        if message.answered_s is None:
            self._send(rank, Clock(message.asked_s, now_s))
        elif self._asked.get(rank) == message.asked_s:
            del self._asked[rank]
            bound_s = max(0.0, now_s - message.asked_s) / 2
            samples = self._samples[rank]
            samples.append((bound_s, message.answered_s - message.asked_s - bound_s))
            if len(samples) < SAMPLES:
                self._ask(rank)
            else:
                self.compared[rank] = min(samples)
                samples.clear()

    def stop(self) -> None:
        """Ask no more."""
        self._samples.clear()
        self._asked.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _ask(self, rank: int) -> None:
        self._asked[rank] = time.time()
        if not self._send(rank, Clock(self._asked[rank], None)):  # it has gone: another one of its host may come
            del self._asked[rank], self._samples[rank]

    def _ask_all(self) -> None:
        for rank, samples in list(self._samples.items()):
            samples.clear()
            self._ask(rank)
        self._timer = self._loop.call_later(AGAIN_S, self._ask_all)
