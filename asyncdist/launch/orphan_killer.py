"""A small process that outlives a killed launcher by a moment, and kills the workers that the launcher has left.

    python -I -S orphan_killer.py

The process reads lines from its stdin: `+PGID` and `-PGID` add and remove a process group. At end of file, which the
kernel makes however the launcher ended, it kills every group still known. A launcher removes its groups before it goes,
so after an orderly end there is nothing to kill. The process is in a session of its own and deaf to the signals that
end jobs. It runs this file by path and imports nothing of the library, and nothing else that it does not need.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["OrphanKiller"]

DEAF_TO = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")

_EXIT_TIMEOUT_S = 5.0


class OrphanKiller:
    """The launcher's side: the process groups of the workers are killed if this process ends without `close`.

    The parent-death signal of Linux reaches a worker but not the processes that the worker started, and macOS has none.
    End of file on a pipe is seen everywhere, and a launcher that is still alive cannot cause it.
    """

    def __init__(self) -> None:
        import subprocess

        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
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
        """Let the process end and reap it."""
        import subprocess

        assert self._process.stdin is not None
        try:  # noqa: SIM105 - contextlib is not imported, see above
            self._process.stdin.close()
        except OSError:
            pass
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:  # noqa: SIM105
            self._process.stdin.write(line.encode())
        except OSError:
            pass  # this process was killed: a protection is lost, but that is no reason to end the job


def main() -> None:
    """Follow the list until end of file, then kill."""
    for name in DEAF_TO:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    groups: set[int] = set()
    pending = b""
    while data := os.read(0, 65536):
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        try:  # noqa: SIM105
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass  # already gone


if __name__ == "__main__":
    main()
