"""Whether the kernel has ended processes for want of memory, which tells a worker nothing but SIGKILL."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["VMSTAT", "oom_kills"]

VMSTAT: Final = Path("/proc/vmstat")
"""Counts them for the whole host, those of containers and other control groups among them."""


def oom_kills(vmstat: Path = VMSTAT) -> int:
    """How many processes the kernel has ended so since the host came up; 0 where it does not say."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
