"""TCPStore against a daemon keeps the store's contract, and is refused what it should be."""

from __future__ import annotations

import pytest

from asyncdist.store import PrefixStore, Store, TCPStore
from asyncdist.testing.store_conformance import STORE_CHECKS, StoreCheck
from asyncdist_server.threaded import ThreadedServer


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
