"""What the kernel says of another process."""

from __future__ import annotations

import os


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or by a debugger."""
    import psutil  # needed by few programs, and reads /proc as it is imported

    try:
        state: str = psutil.Process(pid).status()
    except (OSError, psutil.Error):  # it has just gone, or is not to be seen from here
        return False
    return state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def session_of(pid: int) -> int:
    """The session that a process is in; 0 where it is not to be seen."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0
