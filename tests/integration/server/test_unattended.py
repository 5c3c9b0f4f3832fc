"""The daemon where nobody looks at it: standard input, output and error closed, full, or read by nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from daemon_kit import DEADLINE_S, environment
from jobs import free_port
from server_kit import SocketClient

from asyncdist_server.wire import messages as m


@contextmanager
def unread_pipe() -> Iterator[int]:
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


def connect(port: int, process: subprocess.Popen[bytes]) -> SocketClient:
    """Connect as soon as the daemon serves, which nothing else tells."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return SocketClient(port)
        except ConnectionRefusedError:
            assert process.poll() is None, f"it ended with {process.returncode}"
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("redirection", "unread"),
    [
        ("<&-", ()),
        (">&-", ()),
        ("<&- >&- 2>&-", ()),
        (">/dev/full 2>/dev/full", ()),
        ("", ("stdout",)),
        ("", ("stdout", "stderr")),
    ],
)
def test_it_serves_and_ends_in_order(redirection: str, unread: tuple[str, ...]) -> None:
    port = free_port()
    command = f"exec {sys.executable} -m asyncdist_server --port {port} {redirection}"
    with unread_pipe() as pipe:
        process = subprocess.Popen(["sh", "-c", command], env=environment(), **dict.fromkeys(unread, pipe))
    try:
        for _ in range(2):  # the second gets the descriptor that the first one had
            with connect(port, process) as client:
                client.ask(m.SET, b"k", b"v")
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
