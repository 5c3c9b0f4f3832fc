"""What the ranks of this process have done since they began, in numbers that only grow: for metrics.

The recorder forgets. Where ASYNCDIST_METRICS asks for numbers, its ring adds up what it lets go of, for microseconds an
operation. What has not ended by then is not counted.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, Final

from asyncdist.inspect.recorder import (
    ENDED,
    ENTRIES,
    GROUP,
    ISSUED,
    NBYTES,
    NOTE,
    OPERATION,
    PEER,
    PLACE,
    RECORDER,
    SHAPE,
    Entry,
)
from asyncdist_server.engine.counters import Histogram

SECONDS: Final = (50e-6, 250e-6, 1e-3, 5e-3, 25e-3, 0.1, 0.5, 2.5, 10.0, 60.0, 300.0)
"""Bounds of histograms: from a small message in shared memory to a rank that nobody waits for any more."""
SIZES: Final = {1 << 10: "1KiB", 1 << 16: "64KiB", 1 << 20: "1MiB", 1 << 24: "16MiB", 1 << 28: "256MiB"}
"""Bounds of the size classes, and their names."""
_BOUNDS: Final = tuple(SIZES)
_NAMES: Final = (*SIZES.values(), "more")


def size_class(nbytes: int) -> str:
    """The name of the least bound that `nbytes` does not exceed."""
    return _NAMES[bisect_left(_BOUNDS, nbytes)]


def bytes_of(entry: Entry) -> int:
    """How many bytes of arrays or objects an operation of a group has."""
    if not isinstance(entry[PLACE], tuple):
        return int(entry[NBYTES])
    counts, dtype = entry[SHAPE][1:3]
    return (counts if isinstance(counts, int) else sum(counts)) * int(dtype.itemsize)


class Tally:
    """The sums of one rank."""

    def __init__(self) -> None:
        self._operations: dict[tuple[str, str], dict[str, Any]] = {}
        self._peers: dict[int, dict[str, int]] = {}
        self._waited_for: dict[int, int] = {}
        self._lost: dict[int, None] = {}

    def add(self, entry: Entry) -> None:
        """Count an operation of a group that has ended, or what has become of a rank."""
        if entry[PLACE] is None:
            if entry[OPERATION] == "rank lost":  # each of its groups says so
                self._lost[entry[PEER]] = None
            return
        nbytes, well = bytes_of(entry), not isinstance(entry[NOTE], str)
        key = entry[OPERATION], size_class(nbytes)
        sums = self._operations.get(key)
        if sums is None:
            sums = self._operations[key] = {"seconds": Histogram(SECONDS), "bytes": 0, "failed": 0}
        sums["seconds"].observe(entry[ENDED] - entry[ISSUED])
        if not well:
            sums["failed"] += 1
            return
        sums["bytes"] += nbytes
        if not isinstance(entry[PLACE], tuple):
            peer = self._peers.setdefault(entry[PEER], {"sent": 0, "received": 0})
            peer["received" if "recv" in entry[OPERATION] else "sent"] += nbytes
        elif entry[NOTE] is not None:
            last = entry[GROUP].ranks[entry[NOTE]]
            self._waited_for[last] = self._waited_for.get(last, 0) + 1

    def numbers(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        operations = [
            {
                "operation": operation,
                "size": size,
                **sums,
                "seconds": sums["seconds"].sum,
                "within": sums["seconds"].counts,
            }
            for (operation, size), sums in self._operations.items()
        ]
        return {
            "operations": operations,
            "peers": [{"rank": rank, **moved} for rank, moved in self._peers.items()],
            "waited_for": [{"rank": rank, "times": times} for rank, times in self._waited_for.items()],
            "lost": list(self._lost),
        }


_lock: Final = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_let_go: Final[dict[int, Tally]] = {}
"""By global rank."""


class CountingRing(deque[Entry]):
    """A ring of the recorder that counts what it lets go of."""

    def __init__(self, entries: Iterable[Entry] = (), room: int = ENTRIES) -> None:
        super().__init__((), room)
        for entry in entries:
            self.append(entry)

    def append(self, entry: Entry, /) -> None:
        """Remember `entry`."""
        with _lock:
            if len(self) == self.maxlen:
                oldest = self.popleft()
                if oldest[GROUP] is not None and oldest[ENDED] is not None:
                    _let_go.setdefault(oldest[GROUP].rank, Tally()).add(oldest)
            super().append(entry)


def count_if_wanted(environ: Mapping[str, str]) -> None:
    """Count from now on, if ASYNCDIST_METRICS says so."""
    wanted = environ.get("ASYNCDIST_METRICS", "").strip() not in ("", "0")
    if wanted and not isinstance(RECORDER.entries, CountingRing):
        RECORDER.entries = CountingRing(RECORDER.entries, RECORDER.entries.maxlen or ENTRIES)


def numbers(rank: int) -> dict[str, Any] | None:
    """What global rank `rank` has done since counting began; None where nothing is counted."""
    if not isinstance(RECORDER.entries, CountingRing):
        return None
    with _lock:
        tally = deepcopy(_let_go.get(rank)) or Tally()
        for entry in RECORDER.entries:
            if entry[GROUP] is not None and entry[GROUP].rank == rank and entry[ENDED] is not None:
                tally.add(entry)
    return tally.numbers()
