"""Leases, watches, locks and memberships: kept by every store that offers them, the others say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from store_coordination_checks import COORDINATION_CHECKS, StoreCheck

from asyncdist.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from asyncdist_server.serving.threaded import ThreadedServer

every_check = pytest.mark.parametrize("check", COORDINATION_CHECKS, ids=lambda check: check.__name__)


@every_check
async def test_tcp_store(check: StoreCheck, server: ThreadedServer, namespace: str) -> None:
    async def open_store() -> Store:
        return await TCPStore.connect("127.0.0.1", server.port, namespace=namespace)

    await check(open_store)


@every_check
async def test_hash_store(check: StoreCheck) -> None:
    async with HashStore() as root:

        async def open_store() -> Store:
            return root.clone()

        await check(open_store)


@every_check
async def test_prefix_store(check: StoreCheck) -> None:
    async with HashStore() as root:

        async def open_store() -> Store:
            return PrefixStore("view", root).clone()

        await check(open_store)


async def test_file_store_says_that_it_has_none(tmp_path: Path) -> None:
    async with FileStore(tmp_path / "store") as store:
        view: Any = PrefixStore("p", store)
        for each in (store, view):
            for call in (
                lambda each=each: each.lease(1.0),
                lambda each=each: each.watch(),
                lambda each=each: each.lock("k"),
                lambda each=each: each.join("j", 1),
                lambda each=each: each.hold("k", None),
                lambda each=each: each.set("k", "v", lease=object()),
            ):
                with pytest.raises(NotImplementedError, match="FileStore has no"):
                    call()
