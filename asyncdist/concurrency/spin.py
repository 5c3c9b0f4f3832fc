"""Spinning: how long a task may look for what it awaits before it goes to sleep, and when it stops trying.

What looks: `transport.spin` at shared memory and sockets of this host, `store.reply` for the daemon's replies,
`gpu.cuda_events` at the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Final, Protocol

DEFAULT_SPIN_US: Final = 20.0
"""As long as being woken takes: looking longer could cost more than sleeping at once would have."""
MAX_SPIN_US: Final = 1000.0
"""Longest look that may be asked for: timers and other connections of the loop wait meanwhile."""
TURN_S: Final = 1e-3
"""A task whose works are always done when it looks gives the loop a turn this often, or timers would starve."""
CATCH: Final = 5
"""How much longer than the limit one look may take, after a wait or a look that was over within that time. Two ranks
that answer each other at once would never meet otherwise: whoever looks for 20 us gives up just before the other, who
has to be woken first, replies. Once both look, a wait is shorter than the limit, unless the work itself is longer.
"""
PATIENCE: Final = 4
"""Looks in vain after which one stops looking at every await."""
MAX_SKIPPED: Final = 64
"""Awaits without a look between two that try again, at most: the others may have begun to answer quickly."""


class Pending(Protocol):
    """What is awaited."""

    _done: bool


class Spins(Protocol):
    """Who looks for the end of an operation."""

    def look(self, work: Pending) -> bool:
        """Look until `work` is done, for a while; whether it is. If not, `woken` is to be called when it is."""

    def woken(self) -> None:
        """The work of the last look came when we had given up."""

    def turn_due(self) -> bool:
        """Whether the task that has just been served should let the loop turn before it goes on."""


class MeshSpins(Spins, Protocol):
    """Who looks for what other ranks of a mesh send."""

    def glance(self, work: Pending) -> None:
        """Look once, if that can pay: for whoever looks elsewhere too."""

    def catch_up(self) -> None:
        """Between calls: take what has come, and send what had no room."""


class Persistence:
    """How often one that spins still looks, after looks in vain, and when it lets the loop turn after others."""

    __slots__ = ("_last_turn_s", "_misses", "_skip", "_skipped")

    def __init__(self) -> None:
        self._misses = self._skip = self._skipped = 0
        self._last_turn_s = 0.0

    def _skips(self) -> bool:
        """Whether this await goes without a look. To be asked only where `_skip` is not 0."""
        if self._skipped < self._skip:
            self._skipped += 1
            return True
        self._skipped = 0
        return False

    def _missed(self) -> bool:
        """A look was in vain: False. A look that was not sets `_misses` and `_skip` to 0."""
        self._misses += 1
        if self._misses >= PATIENCE:
            self._skip = min(2 * self._skip + 1, MAX_SKIPPED)
        return False

    def turn_due(self) -> bool:
        """Whether the task that has just been served should let the loop turn before it goes on."""
        now_s = perf_counter()
        if now_s - self._last_turn_s < TURN_S:
            return False
        self._last_turn_s = now_s
        return True


def spin_us_from_environ(environ: Mapping[str, str]) -> float:
    """Read ASYNCDIST_SPIN_US: microseconds, 0 to never spin. Raises ValueError."""
    text = environ.get("ASYNCDIST_SPIN_US", "").strip()
    if not text:
        return DEFAULT_SPIN_US
    try:
        limit_us = float(text)
    except ValueError:
        limit_us = -1.0
    if not 0 <= limit_us <= MAX_SPIN_US:
        raise ValueError(f"ASYNCDIST_SPIN_US={text!r}: give microseconds from 0 (never spin) to {MAX_SPIN_US:g}")
    return limit_us
