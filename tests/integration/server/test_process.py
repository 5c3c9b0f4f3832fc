"""The daemon as people start it: a process, its ready line, its refusals, its signals."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from daemon_kit import DEADLINE_S, Daemon, environment
from punctual import assert_within, punctual
from server_kit import SocketClient

from asyncdist_server.serving.daemon import version
from asyncdist_server.serving.sockets import SPARE_DESCRIPTORS
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.auth import AuthenticationError, Refusal, new_token


def run_daemon(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Start a daemon that must refuse to run."""
    return forked.run([sys.executable, "-m", "asyncdist_server", *arguments], DEADLINE_S, env or environment())


@punctual
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_code_0_and_tells_blocked_clients(
    start: Callable[..., Daemon], signal_number: int
) -> None:
    daemon = start()
    with SocketClient(daemon.port) as client:
        assert client.ask(m.SET, b"k", b"v") is None
        client.send((m.GET, b"never", None))
        began = time.monotonic()
        code, output, errors = daemon.end(signal_number)
        assert code == 0, errors
        assert output == ""
        assert "Traceback" not in errors
        assert client.reply() == (0, m.STOPPING, "the daemon is stopping")
        assert client.closed_by_daemon()
        assert_within(3, time.monotonic() - began)


def test_health_is_served_over_http(start: Callable[..., Daemon]) -> None:
    daemon = start("--http-port", "0")
    with SocketClient(daemon.port) as client:
        client.ask(m.SET, b"k", b"v")
        with urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/healthz", timeout=DEADLINE_S) as answer:
            health = json.load(answer)
    assert answer.status == 200
    assert health["status"] == "ok"
    assert (health["keys"], health["connections"]) == (1, 1)
    assert daemon.end()[0] == 0


def test_a_token_of_the_environment_or_a_file_is_required_of_clients(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    token = new_token()
    (tmp_path / "token").write_text(token + "\n")
    for daemon in (
        start(env=environment(ASYNCDIST_TOKEN=token)),
        start("--token-file", str(tmp_path / "token")),
        start(env=environment(ASYNCDIST_SERVER_TOKEN_FILE=str(tmp_path / "token"))),
    ):
        with SocketClient(daemon.port, token) as client:
            client.ask(m.PING)
        _, _, errors = daemon.end()
        assert token not in errors


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_changed_token_is_read_on_a_signal(start: Callable[..., Daemon], tmp_path: Path, how: str) -> None:
    path, old, new = tmp_path / "token", new_token(), new_token()
    path.write_text(old + "\n")
    if how == "option":
        daemon = start("--token-file", str(path))
    else:
        daemon = start(env=environment(ASYNCDIST_TOKEN_FILE=str(path)))

    def admits(token: str) -> bool:
        try:
            SocketClient(daemon.port, token, client_id=b"another-01234567").close()
        except AuthenticationError as error:
            return error.refusal is not Refusal.WRONG_TOKEN
        return True

    with SocketClient(daemon.port, old) as before:
        path.write_text(new + "\n")
        assert admits(old)
        daemon.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + DEADLINE_S
        while not admits(new):
            assert time.monotonic() < deadline
        path.write_text(f"{new}\n{old}\n")  # both, until everybody has the new one
        daemon.process.send_signal(signal.SIGHUP)
        while not admits(old):
            assert time.monotonic() < deadline
        assert admits(new)
        path.write_text(new + "\n")
        daemon.process.send_signal(signal.SIGHUP)
        while admits(old):
            assert time.monotonic() < deadline
        for break_it in (lambda: path.write_text("short"), path.unlink):
            break_it()
            daemon.process.send_signal(signal.SIGHUP)
            assert admits(new)
            assert not admits(old)
        before.ask(m.PING)
    code, _, errors = daemon.end()
    assert code == 0
    assert "token_read" in errors
    assert f"{path}: the token has 5 characters" in errors
    assert f"No such file or directory: '{path}'" in errors
    assert old not in errors
    assert new not in errors


def test_a_token_in_the_environment_stays_until_the_next_start(start: Callable[..., Daemon], tmp_path: Path) -> None:
    token = new_token()
    (tmp_path / "token").write_text(new_token())
    daemon = start(env=environment(ASYNCDIST_TOKEN=token, ASYNCDIST_TOKEN_FILE=str(tmp_path / "token")))
    daemon.process.send_signal(signal.SIGHUP)
    with SocketClient(daemon.port, token) as client:
        client.ask(m.PING)
    code, _, errors = daemon.end()
    assert code == 0
    assert "nothing_to_reload" in errors


def test_options_come_from_the_environment(start: Callable[..., Daemon]) -> None:
    daemon = start(env=environment(ASYNCDIST_SERVER_MAX_VALUE_BYTES="4"))
    with SocketClient(daemon.port) as client:
        assert client.welcome.limits.value_bytes == 4
        assert client.ask(m.SET, b"k", b"1234") is None
        client.send((m.SET, b"k", b"12345"))
        assert client.reply()[1] == m.LIMIT


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_listening_beyond_loopback_needs_a_token(host: str) -> None:
    refused = run_daemon("--host", host, "--port", "0")
    assert refused.returncode == 1
    assert "without a token" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_listening_beyond_loopback_is_allowed_with_a_token_or_on_demand() -> None:
    for arguments, env in (
        (["--insecure-no-auth"], environment()),
        ([], environment(ASYNCDIST_TOKEN=new_token())),
    ):
        process = forked.Popen(
            [sys.executable, "-m", "asyncdist_server", "--host", "0.0.0.0", "--port", "0", *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("asyncdist-server ready on 0.0.0.0:")
        finally:
            process.terminate()
            process.communicate(timeout=DEADLINE_S)


def test_wrong_settings_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            (["--port", str(port)], {}, f"127.0.0.1 port {port}"),
            (["--port", "0"], {"ASYNCDIST_TOKEN": "short"}, "5 characters"),
            (["--port", "0", "--token-file", str(tmp_path / "token")], {}, "5 characters"),
            (["--port", "0", "--max-key-bytes", "9000"], {}, "at most 8192 bytes"),
            (["--port", "0", "--max-value-bytes", "0"], {}, "must be positive"),
            (["--port", "0", "--max-value-bytes", str(2**32)], {}, "4 GiB"),
            (["--port", "0", "--http-port", str(port)], {}, f"cannot serve HTTP on 127.0.0.1 port {port}"),
            (["--port", "0", "--host", "nowhere.invalid"], {}, "cannot listen on nowhere.invalid"),
            (["--port", "0", "--drain-timeout", "-1"], {}, "the drain time-out must be"),
        ]
        for arguments, changes, text in cases:
            refused = run_daemon(*arguments, env=environment(**changes))
            assert refused.returncode != 0
            assert text in refused.stderr
            assert "Traceback" not in refused.stderr


def test_a_misspelt_variable_is_told(start: Callable[..., Daemon]) -> None:
    daemon = start(env=environment(ASYNCDIST_SERVER_PROT="29501", ASYNCDIST_SERVER_BACKUP_TIMEOUT="5"))
    _, _, errors = daemon.end()
    (line,) = [line for line in errors.splitlines() if "unknown_variable" in line]
    assert "variable=ASYNCDIST_SERVER_PROT" in line


@pytest.mark.parametrize(("more", "told"), [(SPARE_DESCRIPTORS - 1, True), (SPARE_DESCRIPTORS, False)])
def test_too_few_descriptors_for_the_connections_are_told(start: Callable[..., Daemon], more: int, told: bool) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("nothing limits them here")
    wanted = hard - more
    _, _, errors = start("--max-connections", str(wanted)).end()
    assert ("few_descriptors" in errors) is told
    assert (f"{wanted - 1} connections are let in, not --max-connections {wanted}" in errors) is told
    assert f"version={version()}" in errors


def test_out_of_descriptors_it_says_so_and_is_healthy(start: Callable[..., Daemon]) -> None:
    daemon = start("--http-port", "0", descriptors=256)
    clients = [SocketClient(daemon.port, client_id=b"client-%09d" % number) for number in range(128)]
    try:
        for _ in range(64):  # more than there are descriptors, if all of them were kept
            with pytest.raises(AuthenticationError, match="reached its limit of connections"):
                SocketClient(daemon.port)
        with urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/readyz", timeout=DEADLINE_S) as answer:
            assert answer.status == 200
        clients.pop().close()
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                clients.append(SocketClient(daemon.port))
                break
            except AuthenticationError:
                assert time.monotonic() < deadline
    finally:
        for client in clients:
            client.close()
    assert 'reason="too many connections"' in daemon.end()[2]


def test_strangers_who_do_not_read_that_they_are_refused_keep_no_descriptors(start: Callable[..., Daemon]) -> None:
    daemon = start("--http-port", "0", descriptors=256)
    with contextlib.ExitStack() as held:
        for number in range(128):
            held.enter_context(SocketClient(daemon.port, client_id=b"client-%09d" % number))
        strangers = [held.enter_context(socket.create_connection(("127.0.0.1", daemon.port))) for _ in range(300)]
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                stranger.recv(1)  # refused by now, and still there: it may read on
        with urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/readyz", timeout=DEADLINE_S) as answer:
            assert answer.status == 200


def test_a_store_in_a_thread_leaves_descriptors_to_the_rest_of_its_process() -> None:
    program = (
        "import os\n"
        "from asyncdist_server import serve_in_thread\n"
        "with serve_in_thread() as server:\n"
        "    print(server.port, flush=True)\n"
        "    input()\n"
        "    for _ in range(32):\n"
        "        os.open(os.devnull, os.O_RDONLY)\n"
    )
    command = ["sh", "-c", 'ulimit -n 128 && exec "$@"', "sh", sys.executable, "-c", program]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, env=environment())
    with process, contextlib.ExitStack() as clients:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for number in range(64):
            clients.enter_context(SocketClient(port, client_id=b"client-%09d" % number))
        for _ in range(64):
            with pytest.raises(AuthenticationError, match="reached its limit of connections"):
                SocketClient(port)
        _, errors = process.communicate("\n", timeout=DEADLINE_S)
    assert process.returncode == 0, errors


def test_it_loads_neither_numpy_nor_asyncdist_nor_http_unasked(start: Callable[..., Daemon]) -> None:
    """The modules of a daemon that has served a client, and those of a bare import."""
    program = (
        "import sys, asyncdist_server\n"
        "bare = [name for name in sys.modules if name.startswith(('asyncio', 'msgpack', 'asyncdist_server.'))]\n"
        "from asyncdist_server import serve_in_thread\n"
        "import asyncdist_server.cli\n"
        "from server_kit import SocketClient\n"
        "with serve_in_thread() as server, SocketClient(server.port) as client: client.ask(19)\n"
        "banned = {'numpy', 'asyncdist', 'aiohttp', 'prometheus_client', 'rich'} & set(sys.modules)\n"
        "print(bare, sorted(banned))"
    )
    kits = str(Path(__file__).parents[2] / "kits")
    env = environment(PYTHONPATH=kits)
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert result.stdout == "[] []\n"


def test_without_aiohttp_the_http_port_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ImportError('not here')\n")
    command = [sys.executable, "-m", "asyncdist_server", "--port", "0", "--http-port", "0"]
    env = environment(PYTHONPATH=str(tmp_path))
    refused = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert refused.returncode == 1
    assert "asyncdist[server]" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(("option", "text"), [("-h", "ASYNCDIST_SERVER_"), ("--version", "asyncdist-server, version ")])
def test_it_says_what_it_is(option: str, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "asyncdist_server", option], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0
    assert text in done.stdout
