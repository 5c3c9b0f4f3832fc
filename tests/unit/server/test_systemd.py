"""What the service manager is told, on a socket of the test's own."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncdist_server.ops.service import Notifier

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="systemd listens on a Unix socket")
DEADLINE_S = 60.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        path = str(tmp_path / "notify")
        sock.bind(path)
        sock.settimeout(DEADLINE_S)
        yield sock, path


def test_states_are_lines_of_one_message(manager: tuple[socket.socket, str]) -> None:
    sock, path = manager
    Notifier({"NOTIFY_SOCKET": path}).send("READY=1", "STATUS=serving")
    assert sock.recv(1000) == b"READY=1\nSTATUS=serving"


@pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux's")
def test_the_socket_may_have_an_abstract_name() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        name = f"asyncdist-test-{os.getpid()}"
        sock.bind("\0" + name)
        sock.settimeout(DEADLINE_S)
        Notifier({"NOTIFY_SOCKET": "@" + name}).send("READY=1")
        assert sock.recv(1000) == b"READY=1"


def test_nobody_listening_is_fine(tmp_path: Path) -> None:
    Notifier({}).send("READY=1")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).send("READY=1")


async def test_signs_of_life_come_from_the_loop_until_closed(manager: tuple[socket.socket, str]) -> None:
    sock, path = manager
    notifier = Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "30000", "WATCHDOG_PID": str(os.getpid())})
    notifier.watch(asyncio.get_running_loop())
    try:
        for _ in range(3):
            assert await asyncio.to_thread(sock.recv, 1000) == b"WATCHDOG=1"
    finally:
        notifier.close()
    assert notifier._timer is None


@pytest.mark.parametrize(
    "environ", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "30000", "WATCHDOG_PID": "1"}]
)
async def test_no_signs_of_life_unless_asked_for(environ: dict[str, str]) -> None:
    notifier = Notifier(environ)
    notifier.watch(asyncio.get_running_loop())
    assert notifier._timer is None


UNIT = Path(__file__).resolve().parents[3] / "server" / "asyncdist-server.service"


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    try:
        subprocess.run(["systemd-analyze", "--version"], capture_output=True, check=True, timeout=DEADLINE_S)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("systemd-analyze is not installed")
    # The program of the unit need not be installed where the test runs.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/asyncdist-server", "/bin/true"))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    complaints = [line for line in found.stderr.splitlines() if UNIT.name in line]
    assert not complaints
