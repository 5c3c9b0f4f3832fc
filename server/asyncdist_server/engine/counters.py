"""What a running daemon counts, in plain numbers that cost the requests next to nothing. No clock and no I/O.

Metrics are made of these at each scrape, see `http`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

REPLAYED: Final = 14
"""Beside the reply codes: answered from memory, the request was applied on an earlier connection."""
DISCONNECTED: Final = 15
"""Beside the reply codes: blocked, and never answered because its client was gone."""
RESULTS: Final = 16
"""Places in a list of results; reply codes are smaller."""

_REPLIES: Final = ("ok", "timeout", "limit", "invalid", "cancelled", "protocol", "refused", "compacted", "lease_lost")
RESULT_NAMES: Final[Mapping[int, str]] = {
    **dict(enumerate(_REPLIES)),
    REPLAYED: "replayed",
    DISCONNECTED: "disconnected",
}
"""The reply codes of `messages`, in their order, and the two results above."""

LATENCY_BOUNDS_S: Final = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3, 500e-3, 2.5)
"""From one request alone on a quiet machine to a disk that makes everybody wait."""
BLOCKED_BOUNDS_S: Final = (1e-3, 10e-3, 100e-3, 1.0, 10.0, 60.0, 300.0, 1800.0)
"""From a race between two ranks to the default time-out of a collective."""
COMMIT_BOUNDS_S: Final = (250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3, 500e-3, 2.5)
"""From a disk with a memory of its own to one that makes everybody wait."""
COMMIT_BOUNDS_BYTES: Final = (1024.0, 8192.0, 65536.0, 524288.0, 4194304.0, 33554432.0)
"""From one small change alone to a burst of large ones."""


class Histogram:
    """How many values fell up to each bound, and beyond the last one."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Counters:
    """The counts of one engine and of the connections to it; all of them only grow."""

    __slots__ = ("blocked", "closed", "dropped", "latencies", "opened", "refused", "results")

    def __init__(self, operations: Iterable[int]) -> None:
        self.results: dict[int, list[int]] = {operation: [0] * RESULTS for operation in operations}
        """By operation, how many requests had each result."""
        self.latencies = {operation: Histogram(LATENCY_BOUNDS_S) for operation in self.results}
        """By operation, seconds from the arrival of a request to its reply's way out; of samples, see `Connection`."""
        self.blocked = {operation: Histogram(BLOCKED_BOUNDS_S) for operation in self.results}
        """By operation, seconds for which a request that was blocked waited."""
        self.opened: dict[str, int] = {}
        """By protocol, connections that have proven themselves."""
        self.closed: dict[str, int] = {}
        """By protocol, those of them that are gone."""
        self.refused: dict[str, int] = {}
        """By reason, connections refused before that."""
        self.dropped: dict[str, int] = {}
        """By reason, connections that the daemon ended later."""

    def finished(self, operation: int, code: int, waited_s: float) -> None:
        """Note the answer to a request that was blocked."""
        self.results[operation][code] += 1
        self.blocked[operation].observe(waited_s)


def count(counts: dict[str, int], reason: str) -> None:
    """Add one to the count of `reason`."""
    counts[reason] = counts.get(reason, 0) + 1
