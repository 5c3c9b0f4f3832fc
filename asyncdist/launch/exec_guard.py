"""Becomes a worker that cannot outlive its launcher. Run by path; imports nothing of the library.

    python -I -S exec_guard.py LAUNCHER_PID COMMAND [ARGS...]

On Linux the kernel is asked to kill this process when the launcher dies (the request survives exec). A launcher that
died before the question was asked is noticed by its pid being our parent's no longer. Only stdlib, and as little of
it as possible: this runs once per worker, before the worker's own interpreter starts.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_NOT_FOUND = 127  # the shell's codes for a command that is not there, or that may not be run
EXIT_NOT_EXECUTABLE = 126


def die_with_parent(launcher_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies; end it at once if that has happened already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:
        os._exit(128 + signal.SIGKILL)


def main(argv: list[str]) -> None:
    """Guard this process, then replace it by `argv[1:]`."""
    die_with_parent(int(argv[0]))
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        sys.stderr.write(f"asyncdist run: cannot start {argv[1]!r}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE)


if __name__ == "__main__":
    main(sys.argv[1:])
