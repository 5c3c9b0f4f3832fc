"""Connecting a TCPStore: to a daemon, to none, to strangers, with right and wrong tokens."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jobs import free_port
from waiting import eventually

from asyncdist.errors import ClosedError, ConnectTimeoutError, DistStoreError
from asyncdist.store import TCPStore, dialer, store_connection
from asyncdist.store.dialer import SILENT_CLOSES
from asyncdist.testing.store_conformance import task
from asyncdist_server.serving.threaded import ThreadedServer, serve_in_thread
from asyncdist_server.wire.auth import new_token


@contextmanager
def stranger(answer: bytes | None) -> Iterator[int]:
    """A listener that sends `answer` to whoever connects and closes; None accepts and stays silent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        accepted: list[socket.socket] = []
        loop = asyncio.get_running_loop()

        def accept() -> None:
            connection, _ = listener.accept()
            accepted.append(connection)
            if answer is not None:
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)

        loop.add_reader(listener, accept)
        try:
            yield listener.getsockname()[1]
        finally:
            loop.remove_reader(listener)
            for connection in accepted:
                connection.close()


class ImpatientStore(TCPStore):
    """Looks soon what is there."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.dialer.silence_s = 0.05


async def test_a_server_of_http_that_waits_for_a_request_is_told_long_before_the_time_out() -> None:
    """Its own first line, and no store's: such a server says nothing before it has read a line."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 501 Unsupported method\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    said = rf"store 127.0.0.1:{port}: connected, but no store answers there: an HTTP server answered: HTTP/1.0 501 Unsu"
    async with asyncio.timeout(60), server:
        with pytest.raises(DistStoreError, match=said):
            await ImpatientStore.connect("127.0.0.1", port, timeout=1800)


async def test_a_silent_port_is_told_of_and_then_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with stranger(None) as port, pytest.raises(ConnectTimeoutError) as caught:
        await ImpatientStore.connect("127.0.0.1", port, timeout=0.3)
    assert str(caught.value) == f"store 127.0.0.1:{port}: connected, but no store answers there within 0.3 s"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) <= 1  # looking may take longer than there is time
    assert all("connected, but no store answers there, for 0.05 s by now; still trying" in each for each in warnings)


async def test_a_store_that_is_slow_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Who looks in vain what else it may be goes on waiting."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        opening = task(ImpatientStore.connect("127.0.0.1", port, timeout=60))
        await eventually(lambda: "still trying" in caplog.text)
    with serve_in_thread(port=port):
        async with asyncio.timeout(60), await opening as store:
            await store.set("k", "v")


async def test_a_store_that_was_there_before_is_not_asked_whether_it_is_another_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Thousands of clients that wait for their daemon do not connect twice."""
    with serve_in_thread() as server:
        store = await ImpatientStore.connect("127.0.0.1", server.port, timeout=60)
    async with asyncio.timeout(60), store:
        with socket.create_server(("127.0.0.1", server.port)) as silent:
            getting = task(store.get("k"))
            await eventually(lambda: "still trying" in caplog.text)
            silent.accept()[0].close()
            silent.setblocking(False)
            getting.cancel()
            with pytest.raises(BlockingIOError):
                silent.accept()
        await asyncio.wait([getting])


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address on Linux only")
async def test_an_address_that_does_not_answer_is_not_waited_for_while_there_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_connection, "CONNECT_S", 0.05)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.2", 0)))
        port = listener.getsockname()[1]
        stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=0))
        for _ in range(4):  # more than it takes: it answers no more
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        async with asyncio.timeout(60):
            for turn in range(3):
                stream = await store_connection.open_stream("127.0.0.1,127.0.0.2", port, None, turn=turn)
                assert stream.socket.getpeername()[0] == "127.0.0.2"
                stream.close()


async def test_token_and_tls_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token, other = new_token(), new_token()
    with serve_in_thread(token=token) as server:
        monkeypatch.setenv("ASYNCDIST_TOKEN", token)
        async with TCPStore("127.0.0.1", server.port) as store:
            await store.set("k", "v")
        async with await TCPStore.connect("127.0.0.1", server.port) as store:
            assert await store.get("k") == b"v"
        monkeypatch.delenv("ASYNCDIST_TOKEN")
        (tmp_path / "token").write_text(token)
        monkeypatch.setenv("ASYNCDIST_TOKEN_FILE", str(tmp_path / "token"))
        async with TCPStore("127.0.0.1", server.port) as store:
            assert await store.get("k") == b"v"
        monkeypatch.setenv("ASYNCDIST_TOKEN", other)
        async with TCPStore("127.0.0.1", server.port, token=token) as store:  # what is given counts
            assert await store.get("k") == b"v"
        with pytest.raises(DistStoreError, match="the server requires a token, and none was given"):
            await TCPStore.connect("127.0.0.1", server.port, token=None)
        with pytest.raises(DistStoreError, match="tokens of client and server differ"):
            await TCPStore.connect("127.0.0.1", server.port)
        monkeypatch.setenv("ASYNCDIST_TOKEN", token)
        monkeypatch.setenv("ASYNCDIST_TLS_CA", "system")
        with pytest.raises(DistStoreError, match="the client came with TLS and the server has none"):
            await TCPStore.connect("127.0.0.1", server.port)
        async with TCPStore("127.0.0.1", server.port, tls=None) as store:
            assert await store.get("k") == b"v"


async def test_variables_that_cannot_be_followed_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_TOKEN", "short")
    with pytest.raises(ValueError, match="the token has 5 characters"):
        TCPStore("127.0.0.1", 29500)
    monkeypatch.delenv("ASYNCDIST_TOKEN")
    monkeypatch.setenv("ASYNCDIST_TOKEN_FILE", "/nonexistent/token")
    with pytest.raises(OSError, match="ASYNCDIST_TOKEN_FILE"):
        TCPStore("127.0.0.1", 29500)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\xa1\x02\x00\x00", b"\x00" * 500],
    ids=["http", "ssh", "torch", "zeros"],
)
async def test_stranger_is_refused_at_once(answer: bytes) -> None:
    with stranger(answer) as port, pytest.raises(DistStoreError, match="protocol") as caught:
        async with asyncio.timeout(60):
            await TCPStore.connect("127.0.0.1", port)
    assert f"store 127.0.0.1:{port}: " in str(caught.value)


async def test_who_always_closes_is_tried_until_the_time_out() -> None:
    with stranger(b"") as port, pytest.raises(ConnectTimeoutError) as caught:
        await TCPStore.connect("127.0.0.1", port, timeout=0.6)
    assert re.search(
        r"within 0.6 s: it closed the connection during the handshake \d+ times in a row: "
        r"a proxy whose daemon is away, or no asyncdist store",
        str(caught.value),
    )


async def test_a_process_shakes_hands_only_so_often_at_once(
    server: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands that went on in step would all last longer than the daemon allows, and begin again."""
    monkeypatch.setattr(dialer, "MAX_HANDSHAKES", 8)
    monkeypatch.setattr(dialer, "_turns", weakref.WeakKeyDictionary())
    under_way: list[int] = [0]
    most = 0
    prove = dialer.prove

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal most
        under_way[0] += 1
        most = max(most, under_way[0])
        try:
            return await prove(*arguments, **options)
        finally:
            under_way[0] -= 1

    monkeypatch.setattr(dialer, "prove", counted)
    stores = await asyncio.gather(*(TCPStore.connect("127.0.0.1", server.port, timeout=60) for _ in range(50)))
    for store in stores:
        await store.close()
    assert 1 < most <= 8


async def test_clients_that_a_busy_daemon_has_let_go_do_not_come_back_in_step() -> None:
    held_s, count = 0.4, 30
    came_s: list[float] = []
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
        listener.setblocking(False)
        open_ones: list[socket.socket] = []

        def accept() -> None:
            connection, _ = listener.accept()
            came_s.append(loop.time())
            open_ones.append(connection)
            loop.call_later(held_s, connection.close)

        loop.add_reader(listener, accept)
        port = listener.getsockname()[1]
        tries = [asyncio.create_task(TCPStore.connect("127.0.0.1", port)) for _ in range(count)]
        try:
            await eventually(lambda: len(came_s) >= 2 * count)
        finally:
            loop.remove_reader(listener)
            for one in tries:
                one.cancel()
            await asyncio.gather(*tries, return_exceptions=True)
            for connection in open_ones:
                connection.close()
    again_s = sorted(came_s)[count : 2 * count]
    assert again_s[-1] - again_s[0] > held_s / 2


async def test_a_daemon_that_comes_up_behind_a_proxy_is_found() -> None:
    """What listens in front of a daemon that is not there yet takes connections and closes them without a word."""
    proxied: list[int] = []
    tries = 0
    enough = asyncio.Event()
    carrying: set[asyncio.Task[None] | None] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
        writer.close()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        carrying.add(asyncio.current_task())
        if not proxied:
            await reader.read(1)
            writer.close()
            if tries == 2 * SILENT_CLOSES:
                enough.set()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", proxied[0])
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True)

    async with await asyncio.start_server(carry, "127.0.0.1", 0) as proxy:
        connecting = task(TCPStore.connect("127.0.0.1", proxy.sockets[0].getsockname()[1]))
        await asyncio.wait([task(enough.wait()), connecting], return_when=asyncio.FIRST_COMPLETED)
        assert enough.is_set(), "it gave up"
        with serve_in_thread() as server:
            proxied.append(server.port)
            async with await connecting as store:
                await store.set("k", "v")
    await asyncio.wait([one for one in carrying if one is not None], timeout=30)


async def test_closed_port_is_tried_until_the_time_out() -> None:
    with pytest.raises(ConnectTimeoutError, match=r"within 1 s: nothing listens there"):
        await TCPStore.connect("127.0.0.1", free_port(), timeout=1)


async def test_daemon_that_starts_later_is_found() -> None:
    port = free_port()
    connecting = task(TCPStore.connect("127.0.0.1", port))
    await asyncio.sleep(0.05)  # at least one refusal
    with serve_in_thread(port=port):
        async with await connecting as store:
            await store.set("k", "v")


@pytest.mark.parametrize(
    ("server_token", "client_token", "message"),
    [
        (True, "other", "tokens of client and server differ"),
        (True, None, "the server requires a token"),
        (False, "other", "server was started without one"),
    ],
)
async def test_wrong_token_is_refused_at_once(server_token: bool, client_token: str | None, message: str) -> None:
    with serve_in_thread(token=new_token() if server_token else None) as server:
        token = new_token() if client_token else None
        with pytest.raises(DistStoreError, match=message):
            async with asyncio.timeout(60):
                await TCPStore.connect("127.0.0.1", server.port, token=token)


async def test_right_token_is_accepted() -> None:
    token = new_token()
    with serve_in_thread(token=token) as server:
        async with TCPStore("127.0.0.1", server.port, token=token, rank=3) as store:
            assert await store.add("n", 1) == 1


async def test_host_may_be_a_name(server: ThreadedServer) -> None:
    async with TCPStore("localhost", server.port) as store:
        assert await store.check([])


async def test_unknown_host_is_given_up_in_time() -> None:
    with pytest.raises(ConnectTimeoutError, match=r"store no\.such\.host\.invalid:1: could not connect"):
        await TCPStore.connect("no.such.host.invalid", 1, timeout=0.2)


async def test_closing_while_connecting_ends_both() -> None:
    with stranger(None) as port:
        store = TCPStore("127.0.0.1", port)
        connecting = task(store.__aenter__())
        setting = task(store.set("k", "v"))
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await store.close()
        for each in (connecting, setting):
            with pytest.raises(ClosedError):
                await each


async def test_use_without_connecting_first_connects(server: ThreadedServer, namespace: str) -> None:
    store = TCPStore("127.0.0.1", server.port, namespace=namespace)
    assert await store.add("n", 1) == 1
    await store.close()
