"""Launchers see each other's connections."""

from __future__ import annotations

import asyncio

import pytest
from store_proxy import cutting_proxy

from asyncdist.errors import LeaseLostError, StoreTimeoutError
from asyncdist.launch.rendezvous.links import Presence, beside
from asyncdist.store import HashStore, TCPStore
from asyncdist_server import serve_in_thread

GRACE_S = 0.3
DEADLINE_S = 60.0


async def test_members_without_a_connection_are_expelled() -> None:
    """Those that went before somebody looked, and those that go then; a member that left is none."""
    async with HashStore() as store, store.clone() as other:
        joins = [store.join("j", 3, name="a"), other.join("j", 3, name="b"), store.join("j", 3, name="never seen")]
        own, peer, _ = await asyncio.gather(*joins)
        mine, theirs = Presence(store, "j", "a"), Presence(other, "j", "b")
        await mine.show()
        await theirs.show()
        killed: asyncio.Queue[str] = asyncio.Queue()
        async with asyncio.timeout(DEADLINE_S), beside(mine.watch(killed.put_nowait)):
            assert await killed.get() == "never seen"
            assert (await anext(own)).member == "never seen"
            theirs.end()
            assert await killed.get() == "b"
            assert (await anext(own)).member == "b"
            assert (await anext(peer)).member == "never seen"
            with pytest.raises(LeaseLostError, match="expelled"):
                await anext(peer)
        await own.leave()


async def test_who_was_taken_for_gone_shows_itself_again() -> None:
    async with HashStore() as store:
        presence = Presence(store, "j", "a")
        await presence.show()
        async with (
            asyncio.timeout(DEADLINE_S),
            store.watch("job/j/here/") as watch,
            beside(presence.watch(pytest.fail)),
        ):
            await asyncio.sleep(0)
            await store.delete_key("job/j/here/a")
            assert [(await anext(watch)).kind for _ in range(2)] == ["delete", "set"]


async def test_a_connection_that_breaks_and_is_made_anew_is_no_loss() -> None:
    server = await asyncio.to_thread(serve_in_thread)
    try:
        async with (
            cutting_proxy(server.port, lambda number: (3000 if number == 1 else None, None)) as proxy,
            await TCPStore.connect("127.0.0.1", server.port) as store,
            await TCPStore.connect("127.0.0.1", proxy.port) as other,
        ):
            for each, name in ((store, "a"), (other, "b")):
                await Presence(each, "j", name, GRACE_S).show()
            async with beside(Presence(store, "j", "a", GRACE_S).watch(pytest.fail)):
                await other.set("large", b"x" * 4000)
                assert proxy.cuts == 1
                with pytest.raises(StoreTimeoutError):
                    await store.get("never", timeout=2 * GRACE_S)
                assert await store.check(["job/j/here/b"])
    finally:
        await asyncio.to_thread(server.close)
