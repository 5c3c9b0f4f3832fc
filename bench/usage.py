"""What a process uses: peak memory and the segments of shared memory it made."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

RESET_PEAK: Final = "5"
"""What /proc/self/clear_refs takes for: let VmHWM start again from what is resident now."""
_SEGMENT = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) .*/memfd:asyncdist")


def status_bytes(field: str, pid: int | None = None) -> int:
    """Return ``VmHWM`` (peak) or ``VmRSS`` (present resident memory) of a process, this one by default, in bytes.

    0 where the system does not say.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid or os.getpid()}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


class PeakMemory:
    """How much more memory than now was ever resident from here on."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text(RESET_PEAK, encoding="ascii")
        self._begin_bytes = status_bytes("VmHWM")

    def growth_bytes(self) -> int:
        """Return the growth since this object was made."""
        return status_bytes("VmHWM") - self._begin_bytes


def own_segment_bytes() -> int:
    """Return the bytes of shared segments this process may write: those it made itself."""
    total = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            match = _SEGMENT.match(line)
            if match and "w" in match[3]:
                total += int(match[2], 16) - int(match[1], 16)
    return total


def pin_threads(cores: set[int], pid: int | None = None) -> None:
    """Bind every thread of a process (this one by default) to ``cores``."""
    if not hasattr(os, "sched_setaffinity"):
        return
    for thread in os.listdir(f"/proc/{pid or os.getpid()}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
