"""A daemon that is stopped says so to clients that wait: they connect again, or fail with those words."""

from __future__ import annotations

import asyncio

import pytest
from jobs import free_port

from asyncdist.errors import DistStoreError
from asyncdist.store import TCPStore
from asyncdist.testing.store_conformance import expect_pending, task
from asyncdist_server import ServerConfig, StoreServer, serve
from asyncdist_server.engine.session import Session


async def test_a_waiting_client_goes_on_with_the_next_daemon() -> None:
    port = free_port()
    returned = asyncio.Event()
    first = StoreServer(ServerConfig(port=port))
    await first.start()
    async with TCPStore("127.0.0.1", port, on_incarnation_change=returned.set) as store:
        waiting = task(store.get("later"))
        await expect_pending(waiting, store)
        await first.stop()
        async with serve(ServerConfig(port=port)), asyncio.timeout(60):
            await returned.wait()
            await store.set("later", "value")
            assert await waiting == b"value"


async def test_a_call_that_is_given_up_says_that_the_daemon_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.setattr("asyncdist.store.tcp_client.RECONNECT_TIMEOUT_S", 0.2)
    server = StoreServer(ServerConfig(port=port))
    await server.start()
    async with TCPStore("127.0.0.1", port) as store:
        waiting = task(store.get("later"))
        await expect_pending(waiting, store)
        await server.stop()
        said = r"(nothing listens there|it does not answer) \(before: the daemon is stopping\)"
        with pytest.raises(DistStoreError, match=said):
            await waiting


async def test_who_comes_as_the_daemon_stops_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Welcome and farewell arrive together, as they do where a rank goes on to the next world of the same address."""
    port = free_port()
    hello, told = Session._hello, []

    def hello_and_goodbye(session: Session, payload: memoryview, now: float) -> None:
        hello(session, payload, now)
        if not told:
            told.append(session)
            session.say_stopping()

    monkeypatch.setattr(Session, "_hello", hello_and_goodbye)
    async with serve(ServerConfig(port=port)), TCPStore("127.0.0.1", port) as store:
        await store.set("key", "value")
        assert await store.get("key") == b"value"
    assert len(told) == 1
