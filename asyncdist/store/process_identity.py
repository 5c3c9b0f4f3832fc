"""Who a process is, such that another process can tell whether it still runs."""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessIdentity", "is_gone", "this_process"]


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of some host; `start` (ticks since boot, 0 if unknown) tells it from a later one with its pid."""

    host: str
    pid: int
    start: int


def this_process() -> ProcessIdentity:
    """Return the identity of the calling process."""
    pid = os.getpid()
    state = read_state(pid)
    return ProcessIdentity(this_host(), pid, state[1] if state else 0)


def is_gone(process: ProcessIdentity) -> bool:
    """Return whether `process` is known to have ended; False for one of another host, which cannot be known."""
    if process.host != this_host():
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    state = read_state(process.pid)
    if state is None:
        return False
    letter, start = state
    return letter in "ZX" or (process.start != 0 and start != process.start)


@functools.cache
def this_host() -> str:
    """Name the set of processes whose pids mean the same to each other: one boot of one host, one pid namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # no Linux: the host name alone, as other programs' pid files do
    return " ".join(parts)


def read_state(pid: int) -> tuple[str, int] | None:
    """Return the state letter and start time of `pid`, or None where /proc does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return fields[0], int(fields[19])
