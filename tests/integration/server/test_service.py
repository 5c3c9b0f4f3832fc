"""The daemon as a service: its log, what it tells systemd, and how it ends while clients are still reading."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon_kit import DEADLINE_S, Daemon, environment
from server_kit import SocketClient

from asyncdist_server.logs import LINES_PER_WINDOW
from asyncdist_server.wire import messages as m

LARGE_BYTES = 16 << 20
"""More than all buffers between a daemon and a client that does not read."""


def readiness(daemon: Daemon) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/readyz", timeout=DEADLINE_S) as answer:
            return answer.status, json.load(answer)["status"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["status"]


def refuses(daemon: Daemon) -> bool:
    try:
        socket.create_connection(("127.0.0.1", daemon.port), DEADLINE_S).close()
    except (ConnectionRefusedError, ConnectionResetError):  # reset: it came in the instant in which listening ended
        return True
    return False


def slow_reader(daemon: Daemon) -> SocketClient:
    """A client to whom the daemon has more to say than it reads."""
    client = SocketClient(daemon.port)
    client.ask(m.SET, b"large", bytes(LARGE_BYTES))
    client.send((m.GET, b"large", 0))
    client.socket.recv(1)  # it is on its way
    return client


def events(errors: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in errors.splitlines()]


def test_log_lines_are_json_on_demand(start: Callable[..., Daemon]) -> None:
    daemon = start("--log-format", "json")
    with socket.create_connection(("127.0.0.1", daemon.port), DEADLINE_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while stranger.recv(1000):
            pass
        peer = "{}:{}".format(*stranger.getsockname())
    code, _, errors = daemon.end()
    assert code == 0
    told = {event["event"]: event for event in events(errors)}
    assert list(told) == ["ready", "connection_refused", "signal", "draining", "stopped"]
    assert told["ready"]["address"] == f"127.0.0.1:{daemon.port}"
    assert told["connection_refused"]["peer"] == peer
    assert told["connection_refused"]["level"] == "warning"
    assert told["signal"]["signal"] == "SIGTERM"
    assert told["stopped"]["cut"] == 0


def test_a_dropped_client_is_told_by_job_and_rank(start: Callable[..., Daemon]) -> None:
    daemon = start("--log-format", "json")
    with SocketClient(daemon.port, namespace="job-1.0") as client:
        client.socket.sendall(b"\xff" * 10)
        while client.socket.recv(1000):
            pass
    (told,) = [event for event in events(daemon.end()[2]) if event["event"] == "connection_dropped"]
    assert told["job"] == "job-1.0"
    assert "frame of" in told["reason"]


def test_a_flood_of_strangers_writes_few_lines(start: Callable[..., Daemon]) -> None:
    daemon = start("--log-level", "warning", "--log-format", "json")
    count = 10 * LINES_PER_WINDOW
    began = time.monotonic()
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", daemon.port), DEADLINE_S) as stranger:
            stranger.sendall(b"junk")
            while stranger.recv(1000):
                pass
    windows = int(time.monotonic() - began) + 2
    told = events(daemon.end()[2])
    written = [event for event in told if event["event"] == "connection_refused"]
    assert LINES_PER_WINDOW <= len(written) <= LINES_PER_WINDOW * windows
    suppressed = sum(event["lines"] for event in told if event["event"] == "lines_suppressed")
    assert len(written) + suppressed == count


def test_a_drain_waits_for_who_still_reads_and_says_so(start: Callable[..., Daemon]) -> None:
    daemon = start("--http-port", "0", "--drain-timeout", str(DEADLINE_S), "--log-format", "json")
    with slow_reader(daemon) as client:
        assert readiness(daemon) == (200, "ready")
        daemon.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DEADLINE_S
        while (found := readiness(daemon)) != (503, "draining"):
            assert found == (200, "ready")
            assert time.monotonic() < deadline
        while not refuses(daemon):
            assert time.monotonic() < deadline
        read = 1
        while data := client.socket.recv(1 << 20):
            read += len(data)
        assert read > LARGE_BYTES
    assert daemon.process.wait(DEADLINE_S) == 0
    assert daemon.process.stderr is not None
    assert events(daemon.process.stderr.read())[-1]["cut"] == 0


def test_a_second_signal_ends_a_drain_at_once(start: Callable[..., Daemon]) -> None:
    daemon = start("--http-port", "0", "--drain-timeout", "600", "--log-format", "json")
    with slow_reader(daemon):
        daemon.process.send_signal(signal.SIGTERM)
        while readiness(daemon)[0] == 200:
            pass
        code, _, errors = daemon.end()
    assert code == 0
    told = events(errors)
    assert [event.get("second") for event in told if event["event"] == "signal"] == [None, True]
    assert told[-1]["cut"] == 1


def test_a_drain_ends_by_itself(start: Callable[..., Daemon]) -> None:
    daemon = start("--log-format", "json", env=environment(ASYNCDIST_SERVER_DRAIN_TIMEOUT="0.05"))
    with slow_reader(daemon):
        code, _, errors = daemon.end()
    assert code == 0
    assert events(errors)[-1]["cut"] == 1


def test_who_waits_is_told_and_who_does_not_as_well(start: Callable[..., Daemon]) -> None:
    daemon = start()
    with SocketClient(daemon.port) as waits, SocketClient(daemon.port, client_id=b"another-01234567") as idle:
        waits.send((m.GET, b"never", None), (m.PING,))
        waits.reply()
        idle.ask(m.PING)
        daemon.process.send_signal(signal.SIGTERM)
        assert waits.reply() == (0, m.STOPPING, "the daemon is stopping")
        assert idle.reply() == (0, m.STOPPING, "the daemon is stopping")
        assert idle.closed_by_daemon()
        assert waits.closed_by_daemon()


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="systemd listens on a Unix socket")
def test_systemd_is_told_from_ready_to_stopping(start: Callable[..., Daemon], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(DEADLINE_S)
        env = environment(NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="60000")
        daemon = start(env=env)
        told: list[str] = []
        while told.count("WATCHDOG=1") < 3 or not any("READY=1" in state for state in told):
            told.append(manager.recv(1000).decode())
        assert f"READY=1\nSTATUS=serving on 127.0.0.1:{daemon.port}" in told
        daemon.process.send_signal(signal.SIGTERM)
        while not told[-1].startswith("STOPPING=1"):
            told.append(manager.recv(1000).decode())
        assert daemon.process.wait(DEADLINE_S) == 0


def run_while_it_starts(*lines: str) -> subprocess.CompletedProcess[str]:
    """Run a daemon whose start is these lines, and never ends."""
    program = (
        "import asyncio, os, signal\n"
        "from asyncdist_server.serving.config import ServerConfig\n"
        "from asyncdist_server.serving.daemon import StoreServer\n"
        "from asyncdist_server.ops.service import run_until_signalled\n"
        "async def start(self):\n"
        + "".join(f"    {line}\n" for line in (*lines, "await asyncio.Event().wait()"))
        + "StoreServer.start = start\n"
        "asyncio.run(run_until_signalled(ServerConfig(port=0)))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=DEADLINE_S
    )


def test_a_signal_before_it_serves_ends_it_quietly(tmp_path: Path) -> None:
    """The signal comes while the store is being started; here a start that never ends."""
    done = run_while_it_starts("os.kill(os.getpid(), signal.SIGTERM)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_hangup_ends_no_daemon_that_has_nothing_to_reload(start: Callable[..., Daemon]) -> None:
    """As `systemctl reload` and many a script for rotating logs send it."""
    daemon = start("--log-format", "json")
    daemon.process.send_signal(signal.SIGHUP)
    with SocketClient(daemon.port) as client:
        assert client.ask(m.SET, b"key", b"value") is None
    code, _, errors = daemon.end()
    assert code == 0
    assert "nothing_to_reload" in [event["event"] for event in events(errors)]


STRAY = ("SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGWINCH", "SIGHUP")


@pytest.mark.parametrize("name", STRAY)
def test_no_stray_signal_ends_a_daemon(start: Callable[..., Daemon], name: str) -> None:
    """One without a journal, which does nothing on any of them; by default most end a process."""
    daemon = start("--log-format", "json")
    daemon.process.send_signal(getattr(signal, name))
    with SocketClient(daemon.port) as client:
        assert client.ask(m.SET, b"key", b"value") is None
    code, _, errors = daemon.end()
    assert code == 0
    told = [event["signal"] for event in events(errors) if event["event"] == "signal_ignored"]
    assert told == ([name] if name.startswith("SIGUSR") else [])


def test_a_request_for_a_backup_before_the_journal_is_read_ends_no_daemon() -> None:
    done = run_while_it_starts(
        "os.kill(os.getpid(), signal.SIGUSR1)", "await asyncio.sleep(0)", "os.kill(os.getpid(), signal.SIGTERM)"
    )
    assert done.returncode == 0, done.stderr
