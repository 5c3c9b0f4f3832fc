"""A daemon with a token and those who have none: refused at once, in time, in number, and before anything is parsed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from punctual import assert_within, punctual
from server_kit import SocketClient
from torch_wire_kit import VALIDATE, blob, number
from waiting import eventually

from asyncdist.errors import DistStoreError
from asyncdist.store import TCPStore
from asyncdist_server import ServerConfig, serve
from asyncdist_server.engine import session
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.replies import SMALL_BYTES
from asyncdist_server.serving.config import limits_for
from asyncdist_server.torch.wire import Query
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.auth import (
    HANDSHAKE_TIMEOUT_S,
    ClientHandshake,
    Refusal,
    refusal_message,
    store_context,
)
from asyncdist_server.wire.messages import Encoder, FrameReader, Hello

TOKEN = "the-token-of-these-tests-and-43-characters-"
OTHER_TOKEN = "one-more-token-of-these-tests-of-43-symbols"
DEADLINE_S = 60.0
AT_ONCE_S = 0.05


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of whatever looks at what a client says, in the order of their calls."""
    calls: list[str] = []

    def spy(owner: Any, name: str) -> None:
        genuine = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return genuine(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    for name in ("parse_store_context", "decode_hello", "decode_requests"):
        spy(session, name)
    spy(FrameReader, "feed")
    spy(StoreEngine, "open")
    spy(StoreEngine, "request")
    spy(msgpack, "unpackb")
    return calls


def behind_the_handshake() -> bytes:
    """A hello and requests, as a client sends them that expects to be let in."""
    encoder = Encoder()
    return encoder.hello(Hello(b"c" * 16)) + encoder.requests(0, [(1, m.SET, b"k", b"v"), (2, m.PING)])


FORGED = b"\xadDST\0\x01\x03\0" + bytes(32)
"""A proof that is none."""


def no_token(port: int) -> bytes:
    """Say that there is no token, and all the rest at once."""
    hello = ClientHandshake(None, store_context("job", 1)).start()
    return talk(port, hello + FORGED + behind_the_handshake())


def wrong_token(port: int) -> bytes:
    """Have a token, another one, and not care that the server's proof is wrong."""
    hello = ClientHandshake(OTHER_TOKEN, store_context("job", 1)).start()
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        connection.sendall(hello)
        connection.recv(4096)
        connection.sendall(FORGED + behind_the_handshake())
        return rest(connection)


def lying_about_having_one(port: int) -> bytes:
    """The flag of a client that has a token, the key of one that has none."""
    hello = bytearray(ClientHandshake(None, store_context("job", 1)).start())
    hello[7] = 1
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        connection.sendall(bytes(hello))
        connection.recv(4096)
        connection.sendall(FORGED + behind_the_handshake())
        return rest(connection)


def talk(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        connection.sendall(data)
        return rest(connection)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the daemon closes."""
    said = b""
    try:
        while more := connection.recv(4096):
            said += more
    except ConnectionResetError:
        pass
    return said


async def test_an_honest_client_with_another_token_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It sees first that the tokens differ, and says so before it goes."""
    async with asyncio.timeout(DEADLINE_S), serve(ServerConfig(port=0, token=TOKEN)) as server:
        with pytest.raises(DistStoreError, match="the tokens of client and server differ"):
            await TCPStore.connect("127.0.0.1", server.port, token=OTHER_TOKEN)
        await eventually(lambda: server.engine.counters.refused)
        assert server.engine.counters.refused == {"wrong_token": 1}
        (line,) = [record.getMessage() for record in caplog.records if "connection_refused" in record.getMessage()]
        assert "peer=127.0.0.1:" in line
        assert "the tokens of client and server differ" in line


async def test_who_takes_the_daemons_proof_and_goes_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(DEADLINE_S), serve(ServerConfig(port=0, token=TOKEN)) as server:
        for hello in (b"", ClientHandshake(OTHER_TOKEN, store_context("job", 1)).start()):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(hello)
            if hello:
                await reader.readexactly(len(ClientHandshake(TOKEN, b"").start()))
            writer.close()
            await writer.wait_closed()
        await eventually(lambda: not server.connection_count and server.engine.counters.refused)
        assert server.engine.counters.refused == {"proof_not_answered": 1}
        assert "left without its own" in caplog.text


@punctual
@pytest.mark.parametrize(
    ("attempt", "refusal"),
    [
        (no_token, Refusal.TOKEN_REQUIRED),
        (wrong_token, Refusal.WRONG_TOKEN),
        (lying_about_having_one, Refusal.WRONG_TOKEN),
    ],
)
async def test_who_has_not_the_token_is_refused_at_once_and_nothing_is_parsed(
    parsed: list[str], attempt: Callable[[int], bytes], refusal: Refusal
) -> None:
    async with serve(ServerConfig(port=0, token=TOKEN)) as server:

        def timed() -> tuple[float, bytes]:
            began = time.perf_counter()
            said = attempt(server.port)
            return time.perf_counter() - began, said

        took_s, said = await asyncio.to_thread(timed)
    assert said == refusal_message(refusal)
    assert parsed == []
    assert_within(AT_ONCE_S, took_s)


async def test_the_spy_sees_what_is_parsed_of_a_client_that_has_it(parsed: list[str]) -> None:
    """That the test above can fail."""
    async with serve(ServerConfig(port=0, token=TOKEN)) as server:
        with await asyncio.to_thread(SocketClient, server.port, TOKEN) as client:
            await asyncio.to_thread(client.ask, m.PING)
    order = list(dict.fromkeys(parsed))
    assert order[0] == "parse_store_context"
    assert {"feed", "decode_hello", "open", "decode_requests", "request", "unpackb"} <= set(order)


async def test_a_client_that_proves_itself_in_time_stays_and_one_that_does_not_goes() -> None:
    """At the limit and past it: the time ends the one handshake, and never a session."""
    assert ServerConfig().handshake_timeout_s == HANDSHAKE_TIMEOUT_S == 5.0
    limit_s = 0.3
    async with serve(ServerConfig(port=0, token=TOKEN, handshake_timeout_s=limit_s)) as server:

        def work() -> float:
            with SocketClient(server.port, TOKEN) as prompt:
                began = time.monotonic()
                with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as late:
                    late.sendall(ClientHandshake(TOKEN, b"/").start())
                    said = rest(late)
                waited_s = time.monotonic() - began
                assert said.endswith(refusal_message(Refusal.TIMEOUT))
                assert prompt.ask(m.PING) is None
                return waited_s

        assert await asyncio.to_thread(work) >= limit_s - 0.01


async def test_half_open_connections_at_the_limit_and_one_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one past it takes the place of the oldest, which is told."""
    monkeypatch.setattr("asyncdist_server.serving.daemon.MAX_HALF_OPEN", 3)
    async with serve(ServerConfig(port=0, token=TOKEN)) as server:

        def work() -> None:
            silent = [socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) for _ in range(2)]
            try:
                with SocketClient(server.port, TOKEN) as third:  # proven, so no longer half open
                    silent.append(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S))
                    assert third.ask(m.PING) is None
                    wait_until(lambda: server.half_open_count == 3)
                    with SocketClient(server.port, TOKEN, client_id=b"another-client-x") as fourth:
                        assert fourth.ask(m.PING) is None
                    assert rest(silent[0]) == refusal_message(Refusal.TOO_MANY_CONNECTIONS)
            finally:
                for connection in silent:
                    connection.close()

        await asyncio.to_thread(work)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has one address")
async def test_a_flood_from_one_address_replaces_its_own_connections_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist_server.serving.daemon.MAX_HALF_OPEN", 5)
    async with serve(ServerConfig(port=0, token=TOKEN)) as server:

        def silent(host: str) -> socket.socket:
            return socket.create_connection(("127.0.0.1", server.port), DEADLINE_S, source_address=(host, 0))

        def work() -> None:
            with contextlib.ExitStack() as stack:
                slow = [stack.enter_context(silent("127.0.0.2")) for _ in range(2)]
                flood = [stack.enter_context(silent("127.0.0.3")) for _ in range(20)]
                slow.append(stack.enter_context(silent("127.0.0.4")))
                for connection in flood[:18]:
                    assert rest(connection) == refusal_message(Refusal.TOO_MANY_CONNECTIONS)
                for connection in slow:  # in their own time
                    handshake = ClientHandshake(TOKEN, store_context("job"))
                    connection.sendall(handshake.start())
                    while not handshake.done:
                        connection.sendall(handshake.receive(connection.recv(1000)))

        await asyncio.to_thread(work)


@pytest.mark.parametrize("torch", [False, True], ids=["native", "torch"])
async def test_what_a_client_did_not_finish_is_gone_with_its_connection(torch: bool) -> None:
    """Although the client is remembered for a while. Buffers are freed at once, not when garbage is collected."""
    size = 8 * 1024 * 1024
    async with serve(ServerConfig(port=0, torch=torch)) as server:

        def work() -> None:
            if torch:
                with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as connection:
                    connection.sendall(VALIDATE + bytes([Query.SET]) + blob(b"k") + number(2 * size) + bytes(size))
                    wait_until(lambda: server.inbound_bytes > size)
            else:
                with SocketClient(server.port) as client:
                    begun = (2 * size).to_bytes(4, "big") + b"\xc6" + (2 * size - 5).to_bytes(4, "big")
                    client.socket.sendall(begun + bytes(size))
                    wait_until(lambda: server.inbound_bytes > size)
            wait_until(lambda: server.connection_count == 0)

        gc.disable()
        try:
            tracemalloc.start()
            for _ in range(3):
                await asyncio.to_thread(work)
            held_bytes, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
        assert peak_bytes > size  # it was held
        assert held_bytes < size
        assert server.inbound_bytes == 0
        assert torch or server.engine.statistics()["clients_away"] == 1


@pytest.mark.parametrize("torch", [False, True], ids=["native", "torch"])
async def test_what_many_clients_did_not_finish_is_bounded_together(torch: bool) -> None:
    """Each sends less than one frame, or one value, may have."""
    half, memory_bytes, clients = 512 * 1024, 4 << 20, 24
    limits = limits_for(2 * half, memory_bytes=memory_bytes)
    async with serve(ServerConfig(port=0, torch=torch, limits=limits)) as server:

        def work() -> None:
            with contextlib.ExitStack() as stack:
                for number_ in range(clients):
                    if torch:
                        sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S))
                        start = VALIDATE + bytes([Query.SET]) + blob(b"k") + number(2 * half)
                    else:
                        client = SocketClient(server.port, client_id=b"client-%09d" % number_)
                        sock, start = stack.enter_context(client).socket, (2 * half).to_bytes(4, "big")
                    with contextlib.suppress(OSError):
                        sock.sendall(start + bytes(half))
                wait_until(lambda: server.engine.counters.dropped.get("memory", 0) >= clients - memory_bytes // half)
                assert server.inbound_bytes <= memory_bytes + clients * SMALL_BYTES

        await asyncio.to_thread(work)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what the daemon's loop, another thread's, brings about."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
