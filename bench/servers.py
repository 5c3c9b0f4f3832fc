"""The store servers under test, each in a process of its own on a loopback port.

``python -m bench.servers`` is torch's TCPStore server: it prints its port and serves until its parent goes.
"""

from __future__ import annotations

import importlib
import re
import shutil
import signal
import socket
import sys
import time

from bench.process import Child
from bench.runner import ROOT, BenchError, unused_port

LOCALHOST = "127.0.0.1"
START_TIMEOUT_S = 30.0
POLL_S = 0.02


class ServerProcess:
    """A running server: its child process and its host:port."""

    def __init__(self, child: Child, address: str) -> None:
        self.child = child
        self.address = address

    def close(self) -> None:
        self.child.stop()


def asyncdist_server(core: int | None, *arguments: str) -> ServerProcess:
    """Start ``python -m asyncdist_server`` on any free port and read the port from its ready line."""
    options = ["--host", LOCALHOST, "--port", "0", "--insecure-no-auth"]
    command = [sys.executable, "-m", "asyncdist_server", *options, *arguments]
    child = Child(command, core=core, ready_line=True)
    line = child.read_line()
    ports: list[str] = re.findall(r":(\d{2,5})\b", line) or re.findall(r"\b(\d{2,5})\b", line)
    if not ports:
        return _give_up(child, f"asyncdist-server printed no port: {line!r}")
    return ServerProcess(child, f"{LOCALHOST}:{ports[0]}")


def asyncdist_torch_server(core: int | None) -> ServerProcess:
    """Start asyncdist's daemon for torch's clients."""
    return asyncdist_server(core, "--torch")


def torch_store_server(core: int | None) -> ServerProcess:
    """Start torch's TCPStore server (libuv, the default)."""
    child = Child(
        [sys.executable, "-m", "bench.servers"], environment={"PYTHONPATH": str(ROOT)}, core=core, ready_line=True
    )
    line = child.read_line()
    if not line.isdigit():
        return _give_up(child, "the torch store did not start")
    return ServerProcess(child, f"{LOCALHOST}:{line}")


def redis_server(core: int | None, *arguments: str) -> ServerProcess:
    """Start redis-server without persistence."""
    program = shutil.which("redis-server")
    assert program is not None
    port = unused_port()
    command = [program, "--bind", LOCALHOST, "--port", str(port), "--save", "", "--appendonly", "no", *arguments]
    child = Child(command, core=core)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and child.process.poll() is None:
        try:
            socket.create_connection((LOCALHOST, port), timeout=1.0).close()
        except OSError:
            time.sleep(POLL_S)
        else:
            return ServerProcess(child, f"{LOCALHOST}:{port}")
    return _give_up(child, "redis-server did not start")


def _give_up(child: Child, message: str) -> ServerProcess:
    tail = child.output_tail()
    child.stop()
    raise BenchError(f"{message} {tail}".strip())


def main() -> None:
    """Serve a torch TCPStore until killed."""
    distributed = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
