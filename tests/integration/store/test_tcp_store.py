"""TCPStore against a daemon keeps the store's contract, and is refused what it should be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from daemon_process import DaemonProcess

from asyncdist.errors import StoreTimeoutError
from asyncdist.store import PrefixStore, Store, TCPStore
from asyncdist.testing.store_conformance import STORE_CHECKS, StoreCheck
from asyncdist_server.serving.threaded import ThreadedServer


@pytest.fixture
async def daemon_process() -> AsyncIterator[int]:
    """The port of a daemon that runs while its client looks for its replies."""
    async with DaemonProcess() as daemon:
        yield daemon.port


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_tcp_store_conforms(check: StoreCheck, server: ThreadedServer, namespace: str) -> None:

    async def open_store() -> Store:
        return await TCPStore.connect("127.0.0.1", server.port, namespace=namespace)

    await check(open_store)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_prefix_store_over_tcp_conforms(check: StoreCheck, server: ThreadedServer, namespace: str) -> None:
    opened: list[TCPStore] = []

    async def open_store() -> Store:
        opened.append(await TCPStore.connect("127.0.0.1", server.port, namespace=namespace))
        return PrefixStore("job", opened[-1])

    await check(open_store)
    for store in opened:
        await store.close()


async def test_replies_that_are_looked_for_are_those_that_were_asked_for(daemon_process: int) -> None:
    """One thing at a time, then waits that nobody answers yet, many tasks at once, and one thing at a time again."""
    async with TCPStore("127.0.0.1", daemon_process) as store:
        for number in range(300):
            await store.set("key", str(number))
            assert await store.get("key") == str(number).encode()
            assert await store.add("counter", 2) == 2 * number + 2
        waits = [asyncio.ensure_future(store.get(f"late/{number}")) for number in range(20)]
        for number in range(20):
            with pytest.raises(StoreTimeoutError):
                await store.get("never", timeout=0.001)
            await store.set(f"late/{number}", str(number))
        assert await asyncio.gather(*waits) == [str(number).encode() for number in range(20)]

        async def alone(name: int) -> None:
            for number in range(50):
                await store.set(f"task/{name}", str(number))
                assert await store.get(f"task/{name}") == str(number).encode()

        await asyncio.gather(*map(alone, range(20)))
        await alone(99)


async def test_who_is_cancelled_while_it_asks_alone_leaves_the_store_usable(daemon_process: int) -> None:
    async with TCPStore("127.0.0.1", daemon_process) as store:
        for number in range(200):
            await store.set("key", str(number))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await store.get("absent")
            assert await store.get("key") == str(number).encode()
