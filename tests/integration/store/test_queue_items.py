"""Items of queues whose takers vanish: a process that dies with its hands full, and one that had just asked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from server_kit import SocketClient

from asyncdist.errors import StoreLimitError
from asyncdist.store import TCPStore
from asyncdist.store.reply import Reply
from asyncdist_server.serving.config import limits_for
from asyncdist_server.serving.threaded import ThreadedServer, serve_in_thread
from asyncdist_server.wire import messages as m

DEADLINE_S = 20.0
SOON_S = 0.2


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist_server.engine.engine.CLIENT_LINGER_S", SOON_S)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)


async def test_an_item_for_a_process_that_vanished_goes_to_another(server: ThreadedServer, namespace: str) -> None:
    async with TCPStore("127.0.0.1", server.port, namespace=namespace) as store:

        async def waits() -> bool:
            return bool(await store.waits())

        with SocketClient(server.port, namespace=namespace) as vanished:
            vanished.send((m.QUEUE_POP, b"q", None))
            await until(waits)
            await store.queue_push("q", "item")
            assert vanished.reply() == (1, m.OK, b"item")  # it never says that it has it
        assert await store.queue_pop("q", timeout=DEADLINE_S) == b"item"


async def test_an_item_that_was_popped_does_not_come_back(server: ThreadedServer, namespace: str) -> None:
    """Not even if its taker is cut off while it does something else."""
    async with TCPStore("127.0.0.1", server.port, namespace=namespace) as store:
        taker = TCPStore("127.0.0.1", server.port, namespace=namespace)
        await store.queue_push("q", "item")
        assert await taker.queue_pop("q") == b"item"
        await asyncio.sleep(0)  # it confirms within that turn of the loop
        taker._abandon()

        async def forgotten() -> bool:
            return (await store.status())["clients_away"] == 0

        await until(forgotten)
        assert await store.queue_len("q") == 0


async def fill(store: TCPStore) -> None:
    for number in itertools.count():
        await store.set(str(number), b"y" * 500)


async def test_an_item_that_nobody_wants_goes_back_although_the_store_is_full(namespace: str) -> None:
    """And although its taker closes at once: it has no time to wait for room."""
    with serve_in_thread(limits=limits_for(4000, memory_bytes=20_000)) as server:
        async with TCPStore("127.0.0.1", server.port, namespace=namespace) as store:
            taker = TCPStore("127.0.0.1", server.port, namespace=namespace)
            await store.queue_push("q", b"x" * 3000)
            popped = taker.ask(m.QUEUE_POP, (b"q",), None)
            assert await popped == b"x" * 3000
            with pytest.raises(StoreLimitError):
                await fill(store)
            assert isinstance(popped, Reply)
            taker._give_back(popped)  # as if its caller had been cancelled
            await taker.close()
            assert await store.queue_len("q") == 1
