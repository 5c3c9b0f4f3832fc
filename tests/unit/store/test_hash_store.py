"""HashStore, and PrefixStore over it, keep the store's contract."""

from __future__ import annotations

import asyncio

import pytest

from asyncdist.errors import StoreTimeoutError
from asyncdist.store import HashStore, PrefixStore, Store
from asyncdist.testing.store_conformance import STORE_CHECKS, StoreCheck


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_hash_store_conforms(check: StoreCheck) -> None:
    first = HashStore()

    async def open_store() -> Store:
        return first.clone()

    await check(open_store)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_prefix_store_conforms(check: StoreCheck) -> None:
    first = HashStore()
    await first.multi_set(["job/", "jobs/x", "other"], ["", "", ""])

    async def open_store() -> Store:
        return PrefixStore("inner", PrefixStore("job", first.clone()))

    await check(open_store)


async def test_time_outs_expire_in_order_on_one_timer() -> None:
    async with HashStore() as store:
        ended: list[str] = []

        async def wait(key: str, timeout_s: float) -> None:
            with pytest.raises(StoreTimeoutError):
                await store.get(key, timeout=timeout_s)
            ended.append(key)

        await asyncio.gather(wait("late", 0.03), wait("soon", 0.01), wait("at once", 0))
        assert ended == ["at once", "soon", "late"]


async def test_another_loop_is_refused() -> None:
    store = HashStore()
    await store.set("k", "v")

    def use_elsewhere() -> None:
        async def get() -> None:
            await store.get("k")

        asyncio.run(get())

    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(use_elsewhere)
