"""TCPStore against a daemon keeps the store's contract, and is refused what it should be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from asyncdist.store import PrefixStore, Store, TCPStore
from asyncdist.testing.store_conformance import STORE_CHECKS, StoreCheck
from asyncdist_server.threaded import ThreadedServer, serve_in_thread

namespaces = (f"test-{index}" for index in itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    with serve_in_thread() as running:
        yield running


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_tcp_store_conforms(check: StoreCheck, server: ThreadedServer) -> None:
    namespace = next(namespaces)

    async def open_store() -> Store:
        return await TCPStore.connect("127.0.0.1", server.port, namespace=namespace)

    await check(open_store)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_prefix_store_over_tcp_conforms(check: StoreCheck, server: ThreadedServer) -> None:
    namespace = next(namespaces)
    opened: list[TCPStore] = []

    async def open_store() -> Store:
        opened.append(await TCPStore.connect("127.0.0.1", server.port, namespace=namespace))
        return PrefixStore("job", opened[-1])

    await check(open_store)
    for store in opened:
        await store.close()
