"""Closing a store whose connection is broken: what was issued, and items that have arrived, are worth a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from cancel_sweep import Cut, cancelling_at

from asyncdist.errors import ClosedError
from asyncdist.store import TCPStore
from asyncdist.store.dialer import Trouble
from asyncdist_server.serving.threaded import ThreadedServer

DEADLINE_S = 20.0
SOON_S = 0.2


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist_server.engine.engine.CLIENT_LINGER_S", SOON_S)


async def opened(server: ThreadedServer, namespace: str) -> TCPStore:
    return await TCPStore.connect("127.0.0.1", server.port, namespace=namespace)


def cut(store: TCPStore) -> None:
    """As if the connection had been reset."""
    assert store._connection is not None
    store._connection._lose(ConnectionResetError("cut"))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - of the daemon
            await asyncio.sleep(0.01)


async def all_forgotten(other: TCPStore) -> None:
    async def none_away() -> bool:
        return (await other.status())["clients_away"] == 0

    await until(none_away)


@pytest.mark.parametrize("turns", [0, 1])
async def test_an_item_is_confirmed_by_closing_although_the_connection_was_cut(
    server: ThreadedServer, namespace: str, turns: int
) -> None:
    """Before the client could say that it has the item, and while that is on its way and may be lost."""
    async with await opened(server, namespace) as other:
        taker = await opened(server, namespace)
        await other.queue_push("q", "item")
        assert await taker.queue_pop("q") == b"item"
        for _ in range(turns):
            await asyncio.sleep(0)
        cut(taker)
        await taker.close()
        await all_forgotten(other)
        assert await other.queue_len("q") == 0


async def test_what_was_issued_is_done_although_the_connection_is_cut(server: ThreadedServer, namespace: str) -> None:
    async with await opened(server, namespace) as other:
        for turns in (0, 1):
            store = await opened(server, namespace)
            adding = store.add("n", 1)
            for _ in range(turns):  # it is sent, and its answer lost
                await asyncio.sleep(0)
            cut(store)
            await store.close()
            assert await adding == turns + 1
        assert await other.get("n") == b"2"


async def test_a_second_cut_is_survived_too(
    server: ThreadedServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await opened(server, namespace) as other:
        store = await opened(server, namespace)
        dial, dialled = store._dial, 0

        async def dial_and_cut(trouble: Trouble) -> None:
            nonlocal dialled
            await dial(trouble)
            dialled += 1
            if dialled == 1:
                cut(store)

        monkeypatch.setattr(store, "_dial", dial_and_cut)
        adding = store.add("n", 1)
        cut(store)
        await store.close()
        assert dialled == 2
        assert await adding == 1
        assert await other.get("n") == b"1"


async def test_nothing_at_stake_is_not_worth_a_connection(server: ThreadedServer, namespace: str) -> None:
    async with await opened(server, namespace) as other:
        store = await opened(server, namespace)
        await other.queue_push("q", "item")
        assert await store.queue_pop("q") == b"item"
        await store.set("key", "value")  # its answer shows that the daemon knows of the item
        cut(store)
        connector = store._connector
        assert connector is not None
        await store.close()
        assert connector.cancelled()
        assert store._connection is None
        await all_forgotten(other)  # it is away at first: it took no leave
        assert await other.queue_len("q") == 0


async def test_closing_gives_up_a_daemon_that_is_away_in_time(
    server: ThreadedServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nobody can tell it: the item goes to somebody else as well."""
    monkeypatch.setattr("asyncdist.store.tcp_client.CLOSE_TIMEOUT_S", SOON_S)
    async with await opened(server, namespace) as other:
        store = await opened(server, namespace)
        await other.queue_push("q", "item")
        assert await store.queue_pop("q") == b"item"
        store.dialer.port = 1  # nothing listens there
        adding = store.add("n", 1)
        cut(store)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await store.close()
        assert SOON_S * 0.9 < loop.time() - began_s < SOON_S + 2.0
        with pytest.raises(ClosedError):
            await adding
        assert await other.queue_pop("q", timeout=DEADLINE_S) == b"item"


@pytest.mark.parametrize("again", [False, True])
async def test_closing_can_be_cancelled_while_it_connects(again: bool, server: ThreadedServer, namespace: str) -> None:
    store = await opened(server, namespace)
    adding = store.add("n", 1)
    store.dialer.port = 1
    cut(store)
    closing = asyncio.ensure_future(cancelling_at(Cut(1, again=again), store.close()))
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(ClosedError):
        await adding
    async with asyncio.timeout(DEADLINE_S):
        await store.close()  # may be called twice, also then
