"""The daemon as a process of its own, for tests that start and stop it."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys

import forked

DEADLINE_S = 60.0
READY = re.compile(r"asyncdist-server ready on 127\.0\.0\.1:(\d+)(?: \(http 127\.0\.0\.1:(\d+)\))?\n")


def environment(**changes: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCDIST_")}
    return {**clean, **changes}


class Daemon:
    """A daemon process that has said it is ready."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, descriptors: int | None = None) -> None:
        limited = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh"] if descriptors else []
        start = subprocess.Popen if limited else forked.Popen
        self.process = start(
            [*limited, sys.executable, "-m", "asyncdist_server", "--port", "0", *arguments],
            env=env or environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        line = self.process.stdout.readline() if ready else ""
        match = READY.fullmatch(line)
        if match is None:
            self.process.kill()
            raise AssertionError(f"no ready line but {line!r}, {self.process.communicate()}")
        self.port = int(match[1])
        self.http_port = int(match[2]) if match[2] else None

    def end(self, signal_number: int = signal.SIGTERM) -> tuple[int, str, str]:
        self.process.send_signal(signal_number)
        output, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, output, errors
