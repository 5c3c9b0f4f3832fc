"""The daemon on both event loops: many clients, hostile clients, slow clients, and stopping."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from jobs import free_port
from punctual import assert_within, punctual
from server_kit import SocketClient
from waiting import eventually

from asyncdist_server import ServerConfig, StoreServer, serve, serve_in_thread
from asyncdist_server.serving.config import ConfigError, limits_for
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.auth import AuthenticationError, ClientHandshake, Refusal
from asyncdist_server.wire.messages import Encoder, HelloRefused, Limits

TOKEN = "the-token-of-these-tests-and-43-characters-"
DEADLINE_S = 60.0


def config(**changes: Any) -> ServerConfig:
    return ServerConfig(**{"port": 0, **changes})


def client_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


async def test_two_clients_share_a_namespace_and_a_third_does_not() -> None:
    async with serve(config()) as server:

        def work() -> None:
            with (
                SocketClient(server.port, client_id=client_id(1)) as a,
                SocketClient(server.port, client_id=client_id(2)) as b,
                SocketClient(server.port, namespace="other", client_id=client_id(3)) as c,
            ):
                assert a.ask(m.ADD, b"n", 1) == 1
                assert b.ask(m.ADD, b"n", 1) == 2
                assert c.ask(m.ADD, b"n", 1) == 1

        await asyncio.to_thread(work)
        await eventually(lambda: server.connection_count == 0)


async def test_a_time_out_is_the_servers() -> None:
    async with serve(config()) as server:

        def work() -> tuple[Any, float]:
            with SocketClient(server.port) as client:
                client.send((m.WAIT, (b"x",), 60_000), (m.PING,))
                client.reply()
                client.send((m.GET, b"x", 50))
                began = time.monotonic()
                return client.reply(), time.monotonic() - began

        reply, waited_s = await asyncio.to_thread(work)
        assert reply == (3, m.TIMEOUT, (b"x",))
        assert waited_s > 0.045


async def test_the_shortest_time_outs_are_kept_too() -> None:
    """A timer that is due by the time it is set is another kind of handle on uvloop."""
    async with serve(config()) as server:

        def work() -> None:
            with SocketClient(server.port) as client:
                for _ in range(50):
                    client.send((m.GET, b"x", 1))
                    assert client.reply()[1] == m.TIMEOUT

        await asyncio.to_thread(work)


async def test_two_thousand_waiters_are_woken_by_one_set() -> None:
    """From one process, so on fifty connections with forty blocked requests each."""
    async with serve(config()) as server:

        def work() -> None:
            clients = [SocketClient(server.port, client_id=client_id(number)) for number in range(1, 51)]
            try:
                for client in clients:
                    client.send(*[(m.GET, b"go", None)] * 40, (m.PING,))
                for client in clients:
                    assert client.reply() == (41, m.OK, None)
                assert server.engine.waiter_count == 2000
                clients[0].send((m.SET, b"go", b"now"))
                for client in clients:
                    assert {client.reply()[2] for _ in range(40)} == {b"now"}
            finally:
                for client in clients:
                    client.close()

        await asyncio.to_thread(work)
        assert server.engine.waiter_count == 0


async def test_values_of_the_largest_size_pass_both_ways() -> None:
    limits = limits_for(8 * 1024 * 1024)
    async with serve(config(limits=limits)) as server:

        def work() -> None:
            with SocketClient(server.port) as client:
                value = bytes(range(256)) * (limits.value_bytes // 256)
                assert client.ask(m.SET, b"k", value) is None
                assert client.ask(m.GET, b"k", 0) == value
                client.send((m.SET, b"k", value + b"x"), *[(m.GET, b"k", 0)] * 3)
                assert client.reply()[1] == m.LIMIT
                assert all(client.reply()[2] == value for _ in range(3))

        await asyncio.to_thread(work)


async def expect_closed(server: StoreServer, send: bytes, *, token: str | None = None) -> None:
    """Send bytes on a bare socket; the daemon closes that connection and a client that was there is served on."""
    with await asyncio.to_thread(SocketClient, server.port, token, client_id=client_id(99)) as witness:

        def work() -> None:
            with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as bare:
                bare.sendall(send)
                try:
                    while bare.recv(65536):
                        pass
                except ConnectionResetError:
                    pass

        await asyncio.to_thread(work)
        assert await asyncio.to_thread(witness.ask, m.PING) is None


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00\xce\xf7\x85\x3c", b"\xff" * 3000, b"\xadDST" + b"\xff" * 2000]
)
async def test_garbage_costs_only_its_connection(junk: bytes) -> None:
    async with serve(config(token=TOKEN)) as server:
        await expect_closed(server, junk, token=TOKEN)


@pytest.mark.parametrize(
    "send",
    [
        lambda client: client.socket.sendall(b"\xff\xff\xff\xff garbage"),
        lambda client: client.socket.sendall(b"\0\0\0\x05 junk"),
        lambda client: client.socket.sendall((Limits().frame_bytes + 1).to_bytes(4, "big") + bytes(1 << 24)),
        lambda client: client.send((m.SET, "text", b"")),
        lambda client: client.send((99,)),
    ],
    ids=["length", "msgpack", "over the limit", "types", "operation"],
)
async def test_a_broken_frame_is_named_to_its_client_and_costs_only_its_connection(
    send: Callable[[SocketClient], None],
) -> None:
    async with serve(config()) as server:

        def work() -> None:
            with SocketClient(server.port, client_id=client_id(9)) as witness, SocketClient(server.port) as client:
                client.ask(m.SET, b"k", b"v")
                send(client)
                request_id, code, text = client.reply()
                assert (request_id, code) == (0, m.PROTOCOL)
                assert text
                assert client.closed_by_daemon()
                assert witness.ask(m.GET, b"k", 0) == b"v"

        await asyncio.to_thread(work)


async def test_half_a_frame_blocks_nobody_else_and_is_forgotten_with_its_connection() -> None:
    async with serve(config()) as server:

        def work() -> None:
            with SocketClient(server.port) as client, SocketClient(server.port, client_id=client_id(9)) as other:
                client.socket.sendall((1 << 20).to_bytes(4, "big") + bytes(1000))
                while not server.inbound_bytes:
                    time.sleep(0.001)
                assert other.ask(m.PING) is None

        await asyncio.to_thread(work)
        await eventually(lambda: server.connection_count == 0)
        assert server.inbound_bytes == 0


async def test_unfinished_frames_of_all_clients_are_bounded() -> None:
    limits = limits_for(4 * 1024 * 1024, memory_bytes=2 * 1024 * 1024)
    async with serve(config(limits=limits)) as server:

        def work() -> None:
            with SocketClient(server.port) as client:
                begun = (4 * 1024 * 1024).to_bytes(4, "big") + b"\xc6" + (4 * 1024 * 1024 - 5).to_bytes(4, "big")
                client.socket.sendall(begun + bytes(2 * 1024 * 1024 - 4 * 1024))
                with SocketClient(server.port, client_id=client_id(9)) as other:
                    assert other.ask(m.PING) is None
                client.socket.sendall(bytes(64 * 1024))
                assert client.reply()[:2] == (0, m.LIMIT)

        await asyncio.to_thread(work)


def send_for_ever(client: SocketClient, server: StoreServer) -> None:
    """Ask for a MiB, a thousand times in each frame, until that fails; meanwhile the daemon buffers little of it."""
    while True:
        client.send(*[(m.GET, b"k", None)] * 1000)
        assert server.inbound_bytes < 1 << 20


async def test_a_client_that_never_reads_is_cut_off_with_bounded_memory() -> None:
    async with serve(config(stall_timeout_s=0.3)) as server:

        def work() -> None:
            with SocketClient(server.port) as lazy, SocketClient(server.port, client_id=client_id(9)) as other:
                assert lazy.ask(m.SET, b"k", bytes(1 << 20)) is None
                with pytest.raises(ConnectionError):
                    send_for_ever(lazy, server)
                assert other.ask(m.PING) is None

        await asyncio.to_thread(work)
        await eventually(lambda: server.connection_count == 0)


async def test_a_slow_client_gets_everything() -> None:
    async with serve(config(stall_timeout_s=5.0)) as server:

        def work() -> None:
            with SocketClient(server.port) as client:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024)
                value = bytes(1 << 20)
                assert client.ask(m.SET, b"k", value) is None
                client.send(*[(m.GET, b"k", None)] * 50, (m.PING,))
                for number in range(50):
                    assert client.reply() == (2 + number, m.OK, value)
                assert client.reply()[1] == m.OK

        await asyncio.to_thread(work)


async def test_replies_to_blocked_requests_of_a_client_that_does_not_read_are_bounded() -> None:
    limits = limits_for(1024 * 1024)
    async with serve(config(limits=limits, stall_timeout_s=30.0)) as server:

        def work() -> None:
            with SocketClient(server.port) as lazy, SocketClient(server.port, client_id=client_id(9)) as other:
                keys = [b"%d" % number for number in range(40)]
                lazy.send(*[(m.GET, key, None) for key in keys], (m.PING,))
                lazy.reply()
                for key in keys:
                    other.ask(m.SET, key, bytes(1024 * 1024))
                deadline = time.monotonic() + DEADLINE_S
                while server.connection_count == 2 and time.monotonic() < deadline:
                    time.sleep(0.001)
                assert server.connection_count == 1

        await asyncio.to_thread(work)


async def test_a_client_that_says_nothing_is_told_and_closed_in_time() -> None:
    async with serve(config(token=TOKEN, handshake_timeout_s=0.1)) as server:

        def work() -> None:
            with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as bare:
                handshake = ClientHandshake(TOKEN, b"/job")
                bare.sendall(handshake.start()[:20])
                with pytest.raises(AuthenticationError) as refused:
                    handshake.receive(bare.recv(100))
                assert refused.value.refusal is Refusal.TIMEOUT
                assert bare.recv(1) == b""

        await asyncio.to_thread(work)
        await eventually(lambda: server.connection_count == 0)


async def test_a_proven_client_must_say_hello_in_time_too() -> None:
    async with serve(config(handshake_timeout_s=0.1)) as server:

        def work() -> None:
            with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as bare:
                handshake = ClientHandshake(None, b"/job")
                bare.sendall(handshake.start())
                go_on(bare, handshake)
                assert bare.recv(1) == b""

        await asyncio.to_thread(work)


def go_on(bare: socket.socket, handshake: ClientHandshake) -> None:
    """Do the rest of a client's handshake."""
    while not handshake.done:
        bare.sendall(handshake.receive(bare.recv(100)))


@punctual
@pytest.mark.parametrize(
    ("server_token", "client_token", "refusal"),
    [
        (TOKEN, "one-more-token-of-these-tests-of-43-symbols", Refusal.WRONG_TOKEN),
        (TOKEN, None, Refusal.TOKEN_REQUIRED),
        (None, TOKEN, Refusal.NO_TOKEN),
    ],
)
async def test_tokens_that_differ_are_named_on_both_sides_at_once(
    caplog: pytest.LogCaptureFixture, server_token: str | None, client_token: str | None, refusal: Refusal
) -> None:
    async with serve(config(token=server_token)) as server:

        def work() -> float:
            began = time.perf_counter()
            with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as bare:
                handshake = ClientHandshake(client_token, b"/job")
                bare.sendall(handshake.start())
                with pytest.raises(AuthenticationError) as refused:
                    go_on(bare, handshake)
                assert refused.value.refusal is refusal
                bare.sendall(refused.value.farewell)
                waited_s = time.perf_counter() - began
                assert bare.recv(1) == b""
            return waited_s

        waited_s = await asyncio.to_thread(work)
        await eventually(lambda: server.connection_count == 0)
    assert "token" in caplog.text
    assert_within(0.05, waited_s)


async def test_connections_at_the_limit_and_one_past_it() -> None:
    async with serve(config(limits=Limits(connections=2))) as server:

        def work() -> None:
            with SocketClient(server.port, client_id=client_id(1)), SocketClient(server.port, client_id=client_id(2)):
                with pytest.raises((AuthenticationError, OSError)) as refused:
                    SocketClient(server.port, client_id=client_id(3))
                if isinstance(refused.value, AuthenticationError):
                    assert refused.value.refusal is Refusal.TOO_MANY_CONNECTIONS

        await asyncio.to_thread(work)
        await eventually(lambda: server.connection_count == 0)
        with await asyncio.to_thread(SocketClient, server.port, client_id=client_id(3)):
            pass


async def test_a_client_that_connects_anew_ends_its_old_connection() -> None:
    async with serve(config()) as server:

        def work() -> None:
            with SocketClient(server.port) as old:
                old.ask(m.ADD, b"n", 1)
                with SocketClient(server.port, pending=(1,)) as new:
                    assert new.welcome.resumed
                    assert old.reply()[:2] == (0, m.REFUSED)
                    assert old.closed_by_daemon()
                    assert new.ask(m.ADD, b"n", 1) == 1

        await asyncio.to_thread(work)


async def test_another_protocol_version_is_refused_by_name() -> None:
    async with serve(config()) as server:

        class LaterEncoder(Encoder):
            def hello(self, hello: m.Hello) -> bytes:
                return self.frame((m.PROTOCOL_VERSION + 1, b"something new"))

        def work() -> None:
            class LaterClient(SocketClient):
                def _handshake(self, token: str | None, namespace: str) -> None:
                    super()._handshake(token, namespace)
                    self.encoder = LaterEncoder()

            with pytest.raises(HelloRefused, match="store protocol 2"):
                LaterClient(server.port)

        await asyncio.to_thread(work)


async def test_stopping_sends_what_was_answered_and_ends_everyone() -> None:
    server = StoreServer(config(drain_timeout_s=0.3))
    await server.start()
    port = server.port
    client = await asyncio.to_thread(SocketClient, port)
    silent = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
    try:
        await asyncio.to_thread(client.ask, m.SET, b"k", b"v")
        await server.stop()
        assert await asyncio.to_thread(client.reply) == (0, m.STOPPING, "the daemon is stopping")
        assert await asyncio.to_thread(client.closed_by_daemon)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), DEADLINE_S)
    finally:
        client.close()
        silent.close()


async def test_who_comes_while_it_stops_is_not_refused_for_being_too_many() -> None:
    """The next world of a rank that hosts the store may begin before the last one's store has ended."""
    server = StoreServer(config())
    await server.start()
    server._stopping = True
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as late:
        while await asyncio.to_thread(late.recv, 1000):
            pass
    await server.stop()
    assert not server.engine.counters.refused


async def test_localhost_is_served_on_all_its_addresses_with_one_port() -> None:
    async with serve(config(host="localhost")) as server:
        with await asyncio.to_thread(SocketClient, server.port) as client:
            assert await asyncio.to_thread(client.ask, m.PING) is None


async def test_a_taken_port_is_an_error_and_leaves_nothing() -> None:
    async with serve(config()) as server:
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {server.port}"):
            await StoreServer(config(port=server.port)).start()


async def test_a_bind_beyond_loopback_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 without a token"):
        await StoreServer(config(host="0.0.0.0")).start()


def test_a_store_in_a_thread_serves_and_closes_twice() -> None:
    server = serve_in_thread(token=TOKEN)
    with SocketClient(server.port, TOKEN) as client:
        assert server.address == f"127.0.0.1:{server.port}"
        assert client.ask(m.ADD, b"n", 1) == 1
        server.close()
        assert client.reply() == (0, m.STOPPING, "the daemon is stopping")
        assert client.closed_by_daemon()
    server.close()


def test_a_forked_child_keeps_neither_the_port_nor_a_client() -> None:
    ready, wait = os.pipe()
    with serve_in_thread(token=TOKEN) as server, SocketClient(server.port, TOKEN) as client:
        child = os.fork()
        if child == 0:
            os.close(wait)
            os.read(ready, 1)  # until the parent has looked
            os._exit(0)
        try:
            server.close()
            assert client.reply() == (0, m.STOPPING, "the daemon is stopping")
            assert client.closed_by_daemon()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", server.port))
        finally:
            os.close(wait)
            os.close(ready)
            os.waitpid(child, 0)


async def test_of_many_that_want_one_port_one_gets_it_and_the_others_hear_that_it_is_in_use() -> None:
    for _ in range(20):
        port = free_port()
        servers = [StoreServer(config(port=port)) for _ in range(4)]
        outcomes = await asyncio.gather(*(server.start() for server in servers), return_exceptions=True)
        errors = [outcome for outcome in outcomes if outcome is not None]
        assert len(errors) == 3
        assert all(isinstance(error, OSError) and error.errno == errno.EADDRINUSE for error in errors)
        for server in servers:
            await server.stop()


def test_a_store_in_a_thread_raises_where_it_is_started() -> None:
    with serve_in_thread() as server, pytest.raises(OSError, match="cannot listen"):
        serve_in_thread(port=server.port)
    with pytest.raises(ConfigError, match="characters"):
        serve_in_thread(token="short")
    with pytest.raises(ConfigError, match="without a token"):
        serve_in_thread("0.0.0.0")


async def test_a_timer_that_fires_late_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that was stopped ends no lease that was kept alive meanwhile."""
    server = StoreServer(config())
    late: list[float] = []
    for expiring in (server.engine, server.torch):
        monkeypatch.setattr(expiring, "expire", lambda now, late_s=0.0: late.append(late_s))
    now_s = asyncio.get_running_loop().time()
    for timer_at in (now_s - 3, now_s + 3):
        server._timer_at = timer_at
        server._expire()
    assert late == pytest.approx([3, 3, 0, 0], abs=0.5)
