"""A daemon that serves torch, and a process that forks torch jobs, so that torch is imported once for all of them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from daemon_kit import DEADLINE_S, Daemon
from server_kit import SocketClient

from asyncdist_server.wire import messages as m

KITS = Path(__file__).parent


def clean_environment() -> dict[str, str]:
    """This process's environment without what torch or the daemon would read from it."""
    ours = ("ASYNCDIST_", "TORCHELASTIC_", "MASTER_", "TORCH_", "GLOO_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment.pop("RANK", None)
    environment.pop("WORLD_SIZE", None)
    # gloo would take the address of the host's name; and the processes of these tests share a few cores.
    return {**environment, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Jobs:
    """The process that forks."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            [sys.executable, str(KITS / "torch_programs.py")],
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def begin(self, name: str, world_size: int, *arguments: Any) -> None:
        """Start a job."""
        self._errors.seek(0)
        self._errors.truncate()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, world_size, *arguments]) + "\n")
        self._process.stdin.flush()

    def end(self) -> str:
        """Wait for the job, all of whose processes must succeed; returns what they said."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        answer = self._process.stdout.readline() if ready else "nothing in time"
        self._errors.seek(0)
        said = self._errors.read()
        assert answer.strip("[], 0\n") == "", f"{answer}\n{said}"
        return said

    def run(self, name: str, world_size: int, *arguments: Any) -> str:
        """Start a job and wait for it."""
        self.begin(name, world_size, *arguments)
        return self.end()

    def close(self) -> None:
        """End the process, and what it has forked if that hangs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()


def torch_daemon() -> Daemon:
    """A daemon that serves torch."""
    return Daemon("--torch", env=clean_environment())


def until_nothing_is_left(daemon: Daemon) -> None:
    """Wait until the daemon has noticed that the clients of a job are gone, and has removed its keys."""
    deadline = time.monotonic() + DEADLINE_S
    with SocketClient(daemon.port, namespace=f"torch/{daemon.port}") as native:
        while left := native.ask(m.LIST_KEYS, b"", b"")[1]:
            assert time.monotonic() < deadline, left
