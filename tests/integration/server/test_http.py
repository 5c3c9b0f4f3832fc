"""The daemon's HTTP port: alive, ready, and what it counts; read-only, bounded, and not for foreign pages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_kit import SocketClient
from torch_wire_kit import SocketTorchClient
from waiting import eventually

from asyncdist_server import ServerConfig, StoreServer, serve
from asyncdist_server.journal import group_commit
from asyncdist_server.journal.batch import Batch
from asyncdist_server.journal.group_commit import GroupCommit
from asyncdist_server.journal.journal import parse_durability
from asyncdist_server.journal.sqlite_journal import SqliteJournal
from asyncdist_server.logs import LINES_PER_WINDOW
from asyncdist_server.ops import http
from asyncdist_server.ops.http import MAX_HTTP_CONNECTIONS, names_this_host, serve_http
from asyncdist_server.ops.metrics import METRICS, PREFIX
from asyncdist_server.torch.wire import Query
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.auth import ClientHandshake

DEADLINE_S = 60.0
TOKEN = "the-token-of-these-tests-and-43-characters-"


async def ask(address: str, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    """Return status and body of one request on a connection of its own."""
    name, _, port = address.rpartition(":")
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(name.strip("[]"), int(port))
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: {host or address}\r\nConnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


@asynccontextmanager
async def daemon(**changes: Any) -> AsyncIterator[tuple[StoreServer, str]]:
    config = ServerConfig(**{"port": 0, "http_port": 0, **changes})
    async with serve(config) as server, serve_http(server) as address:
        yield server, address


async def samples(address: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return every sample by name and the values of its labels, which are in the order of their names."""
    status, text = await ask(address, "/metrics")
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values = tuple(value for _, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix(PREFIX), values] = sample.value
    return found


async def test_a_daemon_is_ready_from_its_start_to_its_stop() -> None:
    server = StoreServer(ServerConfig(port=0, http_port=0))
    async with serve_http(server) as address:
        assert await ask(address, "/readyz") == (503, '{"status": "starting"}')
        assert (await samples(address))["ready", ()] == 0
        await server.start()
        try:
            assert await ask(address, "/readyz") == (200, '{"status": "ready"}')
            assert (await samples(address))["ready", ()] == 1
        finally:
            await server.stop()
        assert await ask(address, "/readyz") == (503, '{"status": "draining"}')
        assert (await ask(address, "/healthz"))[0] == 200


async def test_a_daemon_that_reads_its_journal_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = StoreServer(ServerConfig(port=0, http_port=0, durability=parse_durability("durable"), data_dir=tmp_path))
    answers = []
    read = GroupCommit.start

    async def asked_meanwhile(gate: GroupCommit) -> Any:
        answers.append(await ask(address, "/readyz"))
        return await read(gate)

    monkeypatch.setattr(GroupCommit, "start", asked_meanwhile)
    async with serve_http(server) as address:
        await server.start()
        await server.stop()
    assert answers == [(503, '{"status": "recovering"}')]


async def test_requests_connections_and_contents_are_counted() -> None:
    async with daemon() as (server, address):

        def work() -> SocketClient:
            client = SocketClient(server.port)
            client.ask(m.SET, b"key", bytes(1000))
            client.ask(m.QUEUE_PUSH, b"queue", b"item")
            client.ask(m.GRANT, 7, 60_000, False)
            client.send((m.GET, b"key", 0), (m.GET, b"none", 0), (m.ADD, b"key", 1))
            assert [client.reply()[1] for _ in range(3)] == [m.OK, m.TIMEOUT, m.INVALID]
            revision, _ = client.ask(m.WATCH, b"", None, None)
            client.ask(m.SET, b"key", bytes(1000))  # an event
            client.send((m.WAIT, (b"never",), None), (m.WATCH, b"other", None, None), (m.PING,))
            next_revision = client.reply()[2][0]
            assert next_revision > revision
            client.reply()
            client.send((m.WATCH, b"other", next_revision, None), (m.SET, b"key", bytes(1000)))
            client.reply()  # the daemon does not know yet that it came
            return client

        client = await asyncio.to_thread(work)
        found = await samples(address)
        expected = {
            ("operations_total", ("set", "ok")): 3,
            ("operations_total", ("get", "ok")): 1,
            ("operations_total", ("get", "timeout")): 1,
            ("operations_total", ("add", "invalid")): 1,
            ("connections", ("native",)): 1,
            ("connections_opened_total", ("native",)): 1,
            ("connections_half_open", ()): 0,
            ("connection_limit", ()): server.config.limits.connections,
            ("clients", ()): 1,
            ("keys", ()): 1,
            ("queues", ()): 1,
            ("leases", ()): 1,
            ("namespaces", ()): 1,
            ("memory_limit_bytes", ()): server.config.limits.memory_bytes,
        }
        assert {name: found.get(name) for name in expected} == expected
        assert found["waiters", ()] == server.engine.waiter_count == 2
        assert sum(value for (name, _), value in found.items() if name == "memory_bytes") == server.engine.memory_bytes
        assert found["memory_bytes", ("data",)] > 1000
        assert found["memory_bytes", ("waiters",)] > 0
        assert found["memory_bytes", ("replies",)] > 0
        assert found["memory_bytes", ("events",)] > 0
        assert found["process_resident_memory_bytes", ()] > 1 << 20
        client.close()
        await eventually(lambda: server.connection_count == 0)
        found = await samples(address)
        assert found["connections", ("native",)] == 0
        assert found["clients_away", ()] == 1
        assert found["operations_total", ("wait", "disconnected")] == 1
        assert found["blocked_seconds_count", ("wait",)] == 1


async def test_the_oldest_wait_for_a_key_is_told_but_no_watch() -> None:
    async with daemon() as (server, address):

        def watch() -> SocketClient:
            client = SocketClient(server.port)
            revision, _ = client.ask(m.WATCH, b"prefix", None, None)
            client.send((m.WATCH, b"prefix", revision, None))
            return client

        watcher = await asyncio.to_thread(watch)
        await eventually(lambda: server.engine.waiter_count >= 1)
        assert (await samples(address))["oldest_wait_seconds", ()] == 0
        waiter = await asyncio.to_thread(SocketClient, server.port, client_id=b"another-01234567")
        try:
            waiter.send((m.GET, b"never", None))
            await eventually(lambda: server.engine.waiter_count >= 2)
            began = asyncio.get_running_loop().time()
            await eventually(lambda: asyncio.get_running_loop().time() > began + 0.02)
            assert 0.02 <= (await samples(address))["oldest_wait_seconds", ()] < DEADLINE_S
        finally:
            waiter.close()
            watcher.close()


async def test_latencies_are_of_some_requests_of_every_millisecond() -> None:
    async with daemon() as (server, address):

        def work() -> int:
            began, count = time.monotonic(), 0
            with SocketClient(server.port) as client:
                while count < 100 or time.monotonic() < began + 0.02:  # several ticks
                    client.ask(m.PING)
                    count += 1
            return count

        count = await asyncio.to_thread(work)
        found = await samples(address)
        assert 1 <= found["operation_seconds_count", ("ping",)] <= count
        assert 0 < found["operation_seconds_sum", ("ping",)] < DEADLINE_S
        assert found["operation_seconds_bucket", ("+Inf", "ping")] == found["operation_seconds_count", ("ping",)]


async def test_refused_and_dropped_connections_are_counted_by_reason() -> None:
    async with daemon(token=TOKEN, torch=True) as (server, address):

        def refused() -> None:
            for words in (ClientHandshake(None, b"/job").start(), b"GET / HTTP/1.1\r\n\r\n"):
                with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as stranger:
                    stranger.sendall(words)
                    while stranger.recv(1000):
                        pass

        await asyncio.to_thread(refused)

        def misbehave() -> None:
            with SocketClient(server.port, TOKEN) as client:
                client.socket.sendall(b"\xff" * 100)
                while client.socket.recv(1000):
                    pass

        await asyncio.to_thread(misbehave)

        def torch() -> None:
            with SocketTorchClient(server.port) as client:
                client.send(Query.SET, b"k", b"v")
                assert client.get(b"k") == b"v"

        await asyncio.to_thread(torch)
        await eventually(lambda: server.connection_count == 0)
        found = await samples(address)
        assert found["connections_refused_total", ("not_a_store",)] == 1
        assert found["connections_refused_total", ("token_required",)] == 1
        assert found["connections_dropped_total", ("protocol",)] == 1
        assert found["connections_opened_total", ("native",)] == 1
        assert found["connections_opened_total", ("torch",)] == 1
        assert found["connections", ("torch",)] == 0


async def test_every_metric_has_its_type_and_help() -> None:
    async with daemon() as (_, address):
        _, text = await ask(address, "/metrics")
    for metric in METRICS:
        if metric.name.startswith("journal"):
            continue  # in memory mode there is none
        name = PREFIX + metric.name + ("_total" if metric.kind == "counter" else "")
        assert f"# HELP {name} {metric.about}\n# TYPE {name} {metric.kind}\n" in text


async def test_a_turn_that_answers_nothing_takes_no_sample_of_its_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's proof and its first request may come within a millisecond, the tick of uvloop's clock."""

    class Still:
        def __init__(self, loop: Any) -> None:
            self._loop, self._now = loop, loop.time()

        def time(self) -> float:
            return float(self._now)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._loop, name)

    accept = StoreServer._accept

    def accept_at_one_instant(server: StoreServer) -> Any:
        connection: Any = accept(server)
        connection._loop = Still(connection._loop)
        return connection

    monkeypatch.setattr(StoreServer, "_accept", accept_at_one_instant)
    async with daemon() as (server, address):

        def work() -> None:
            with SocketClient(server.port) as client:
                client.ask(m.SET, b"k", b"v")

        await asyncio.to_thread(work)
        assert (await samples(address))["operation_seconds_count", ("set",)] == 1


async def test_a_journal_is_measured(tmp_path: Path) -> None:
    async with daemon(durability=parse_durability("durable"), data_dir=tmp_path / "data") as (server, address):

        def work() -> None:
            with SocketClient(server.port) as client:
                client.ask(m.SET, b"k", b"v")

        await asyncio.to_thread(work)
        found = await samples(address)
        assert found["journal_commits_total", ()] >= 1
        assert found["journal_commit_seconds_count", ()] == found["journal_commits_total", ()]
        assert found["journal_commit_bytes_sum", ()] > 0
        assert found["journal_bytes", ()] > 0
        assert found["journal_waiting_connections", ()] == 0
        assert found["journal_failed", ()] == 0
        # The answer's time includes the commit it waited for.
        assert found["operation_seconds_sum", ("set",)] > 0


@pytest.mark.parametrize("durability", ["durable", "relaxed:1"])
async def test_a_journal_that_is_stuck_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """Ready is who serves, which a durable daemon does not then: every answer waits for the disk."""
    monkeypatch.setattr(group_commit, "SLOW_COMMIT_S", 0.05)
    hangs, goes_on = threading.Event(), threading.Event()
    write = SqliteJournal.write

    def stuck(journal: SqliteJournal, batch: Batch) -> None:
        hangs.set()
        goes_on.wait(DEADLINE_S)
        write(journal, batch)

    async with daemon(durability=parse_durability(durability), data_dir=tmp_path / "data") as (server, address):
        assert "journal_stuck_s" not in json.loads((await ask(address, "/readyz"))[1])
        assert (await samples(address))["journal_stuck_seconds", ()] == 0
        monkeypatch.setattr(SqliteJournal, "write", stuck)
        coming = asyncio.ensure_future(asyncio.to_thread(SocketClient, server.port))
        try:
            await asyncio.to_thread(hangs.wait, DEADLINE_S)
            await eventually(lambda: server.gate is not None and server.gate.stuck_s > 0)
            serves = durability != "durable"
            for path, expected in (("/readyz", 200 if serves else 503), ("/healthz", 200)):
                status, body = await ask(address, path)
                assert status == expected
                assert json.loads(body)["journal_stuck_s"] >= 0.05
            found = await samples(address)
            assert found["journal_stuck_seconds", ()] >= 0.05
            assert found["ready", ()] == serves
        finally:
            goes_on.set()
            (await coming).close()
        await eventually(lambda: server.gate is not None and not server.gate.stuck_s)
        assert "journal_stuck_s" not in json.loads((await ask(address, "/healthz"))[1])
        assert await ask(address, "/readyz") == (200, '{"status": "ready"}')


async def test_a_flood_of_nonsense_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each was a traceback."""
    async with daemon() as (_, address):
        for _ in range(2 * LINES_PER_WINDOW):
            assert (await ask(address, "/healthz", host="\r\nContent-Length: nonsense"))[0] == 400
    refused = [record for record in caplog.records if "http_refused" in record.getMessage()]
    assert refused
    assert "Content-Length" in refused[0].getMessage()
    assert all(record.exc_info is None for record in caplog.records)
    windows = 1 + sum("lines_suppressed" in record.getMessage() for record in caplog.records)
    assert windows > 1
    assert len(refused) <= windows * LINES_PER_WINDOW


async def test_a_mistake_of_ours_is_told_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with daemon() as (server, address):
        monkeypatch.setattr(server.engine, "statistics", lambda: 1 / 0)
        assert (await ask(address, "/healthz"))[0] == 500
    assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_nothing_can_be_changed(method: str) -> None:
    async with daemon() as (_, address):
        assert (await ask(address, "/metrics", method))[0] == 405
        assert (await ask(address, "/other"))[0] == 404
        assert await ask(address, "/healthz", "HEAD") == (200, "")


async def test_an_answer_that_takes_for_ever_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "END_S", 0.1)
    asked = asyncio.Event()

    async def answer(request: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    async with http.serve_routes({"/": answer}, "127.0.0.1", 0, logging.Logger("silent", logging.CRITICAL)) as address:
        asking = asyncio.ensure_future(ask(address, "/"))
        await asked.wait()
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 10
    await asyncio.wait([asking])
    assert asking.exception() is not None


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:29501", 200),
        ("127.0.0.1:29501", 200),
        ("[::1]:29501", 200),
        ("attacker.example", 421),
        ("attacker.example:29501", 421),
        ("localhost.attacker.example", 421),
        ("10.0.0.1", 421),
    ],
)
async def test_on_loopback_a_request_must_name_this_host(host: str, status: int) -> None:
    async with daemon() as (_, address):
        assert (await ask(address, "/metrics", host=host))[0] == status


def test_from_elsewhere_any_name_will_do() -> None:
    class Transport(asyncio.BaseTransport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return ("10.0.0.7", 29501)

    assert names_this_host("store:29501", Transport())
    assert names_this_host("store:29501", None)


@pytest.mark.parametrize("beyond", [0, 1])
async def test_who_holds_connections_keeps_nobody_away(beyond: int) -> None:
    """At the bound all stay; one beyond it is served, and the one is cut that was silent for longest."""
    async with daemon() as (server, address):
        port = int(address.rpartition(":")[2])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_HTTP_CONNECTIONS - 1 + beyond)]
        try:
            held.append(held.pop(0))
            held[-1][1].write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")  # the first one: it is not silent
            async with asyncio.timeout(DEADLINE_S):
                assert await held[-1][0].readline() == b"HTTP/1.1 200 OK\r\n"
            assert await ask(address, "/readyz") == (200, '{"status": "ready"}')
            silent = held[0][0]
            if beyond:
                with contextlib.suppress(ConnectionResetError):
                    async with asyncio.timeout(DEADLINE_S):
                        assert await silent.read() == b""
                assert not held[1][0].at_eof()
            held[beyond][1].write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(DEADLINE_S):
                assert await held[beyond][0].readline() == b"HTTP/1.1 200 OK\r\n"
            client = await asyncio.to_thread(SocketClient, server.port)
            client.close()
        finally:
            for _, writer in held:
                writer.close()


async def test_health_has_numbers_for_people() -> None:
    async with daemon() as (_, address):
        status, body = await ask(address, "/healthz")
    assert status == 200
    assert json.loads(body).items() >= {"status": "ok", "keys": 0, "connections": 0}.items()
