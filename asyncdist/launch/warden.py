"""The launcher's side of the warden, the small process that outlives a killed launcher by a moment."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["Warden"]

_SCRIPT: Final = Path(__file__).with_name("warden_process.py")
_EXIT_TIMEOUT_S: Final = 5.0


class Warden:
    """Knows the workers' process groups and kills them if this process ends without `close`.

    The parent-death signal of Linux reaches a worker but not the processes it started, and macOS has none; end of
    file on a pipe is seen everywhere and cannot be faked by a launcher that is still alive.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, process_group: int) -> None:
        """Kill this group if the launcher dies."""
        self._tell(f"+{process_group}\n")

    def remove(self, process_group: int) -> None:
        """Forget this group; call it before its leader is reaped, for then the number may be given to a stranger."""
        self._tell(f"-{process_group}\n")

    def close(self) -> None:
        """Let the warden end and reap it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # A warden somebody killed is a protection lost, not a reason to end the job.
        with contextlib.suppress(OSError):
            self._process.stdin.write(line.encode())
