"""Kills what a launcher that died without a word has left. Run by path; imports nothing of the library.

    python -I -S warden_process.py

Reads lines from its stdin: `+PGID` and `-PGID` add and remove a process group. At end of file, which the kernel
makes however the launcher ended, every group still known is killed. The launcher removes its groups before it goes,
so after an orderly end there is nothing to do. It is in a session of its own and deaf to the signals that end jobs.
"""

from __future__ import annotations

import os
import signal

DEAF_TO = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


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
        try:  # noqa: SIM105 - nothing is imported that is not needed
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass  # already gone


if __name__ == "__main__":
    main()
