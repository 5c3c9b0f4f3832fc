"""Leases, watches, locks and memberships through lost connections and restarted daemons."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from store_proxy import CuttingProxy, cutting_proxy

from asyncdist.errors import DistStoreError, LeaseLostError, StoreTimeoutError, WatchCompactedError
from asyncdist.store import TCPStore
from asyncdist_server import ServerConfig
from asyncdist_server.serving.daemon import StoreServer, serve
from asyncdist_server.wire import messages

DEADLINE_S = 60.0


@contextlib.asynccontextmanager
async def cut_often(port: int) -> AsyncIterator[CuttingProxy]:
    """A way to the daemon that breaks again and again, a few requests after the handshake."""

    def plan(number: int) -> tuple[int | None, int | None]:
        after = 450 + 37 * number % 200
        return after, after

    async with cutting_proxy(port, plan) as proxy:
        yield proxy


async def test_a_watch_through_cut_connections_misses_nothing() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(ServerConfig(port=0)) as server,
        cut_often(server.port) as proxy,
        TCPStore("127.0.0.1", proxy.port) as reader,
    ):
        async with TCPStore("127.0.0.1", server.port) as writer, reader.watch("k/") as watch:
            for index in range(0, 120, 2):  # two at a time: an answer must fit into what a connection lasts for
                await writer.multi_set([f"k/{index % 7}", f"k/{(index + 1) % 7}"], [str(index), str(index + 1)])
                assert [int((await anext(watch)).value) for _ in range(2)] == [index, index + 1]
        assert proxy.cuts > 2


async def test_a_bound_lease_survives_cut_connections_and_not_a_lost_client() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(ServerConfig(port=0)) as server,
        TCPStore("127.0.0.1", server.port) as other,
        contextlib.AsyncExitStack() as closing,
    ):
        async with cut_often(server.port) as proxy:
            store = await TCPStore.connect("127.0.0.1", proxy.port)
            closing.push_async_callback(store.close)
            lease = await store.lease(1.5, bound=True)  # longer than it takes to connect again on a busy machine
            await store.set("k", "v", lease=lease)
            for index in range(60):
                await store.set("n", str(index))
            assert proxy.cuts > 1
            assert await other.check(["k"])
            assert not lease.lost
            watch = await other.watch("k").__aenter__()
        # the proxy is gone, as if the client's host was: the client cannot say goodbye
        assert (await anext(watch)).kind == "expire"
        assert "could not be reached" in await lease.wait_lost()
        with pytest.raises(LeaseLostError):
            await store.set("k", "v", lease=lease)


async def test_locks_through_cut_connections_exclude_each_other() -> None:
    tokens: list[int] = []
    holders: set[int] = set()

    async def work(store: TCPStore, index: int) -> None:
        for _ in range(16):
            async with store.lock("the lock") as token:
                assert not holders
                holders.add(index)
                tokens.append(token)
                await store.add("n", 1)
                holders.discard(index)

    async with (
        asyncio.timeout(DEADLINE_S),
        serve(ServerConfig(port=0)) as server,
        cut_often(server.port) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        stores = [await stack.enter_async_context(TCPStore("127.0.0.1", proxy.port)) for _ in range(3)]
        await asyncio.gather(*(work(store, index) for index, store in enumerate(stores)))
        assert tokens == sorted(set(tokens))
        assert await stores[0].get("n") == b"48"
        assert await stores[0].list_keys("lock/") == []
        assert proxy.cuts > 2


async def test_members_join_through_cut_connections() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(ServerConfig(port=0)) as server,
        cut_often(server.port) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        stores = [await stack.enter_async_context(TCPStore("127.0.0.1", proxy.port)) for _ in range(4)]
        members = await asyncio.gather(*(store.join("j", 4, name=f"m{n}") for n, store in enumerate(stores)))
        for epoch in range(2, 25):
            await asyncio.gather(*(member.rejoin() for member in members))
            assert [member.rank for member in members] == [0, 1, 2, 3]
            assert {member.epoch for member in members} == {epoch}
        for member in members:
            await member.leave()
        assert proxy.cuts > 2


async def test_a_killed_member_is_lost_and_the_others_go_on() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(ServerConfig(port=0)) as server,
        TCPStore("127.0.0.1", server.port) as a,
        cutting_proxy(server.port, lambda _: (None, None)) as proxy,
    ):
        b = await TCPStore.connect("127.0.0.1", proxy.port)
        joins = (a.join("j", 1, 2, name="a", settle=5), b.join("j", 1, 2, name="b", settle=5, grace=0.2))
        first, second = await asyncio.gather(*joins)
        assert first.members == ("a", "b")
        b._abandon()  # as a process that was killed: no goodbye
        event = await anext(first)
        assert (event.kind, event.member) == ("lost", "b")
        settled = await a.join("other", 1, settle=0)
        assert settled.epoch == 1
        await settled.leave()
        await first.leave()
        del second


async def test_a_killed_member_is_replaced_by_one_of_its_name_at_once() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(ServerConfig(port=0)) as server,
        TCPStore("127.0.0.1", server.port) as a,
        TCPStore("127.0.0.1", server.port) as b,
    ):
        killed = await TCPStore.connect("127.0.0.1", server.port)
        await killed.join("j", 1, name="trainer", settle=0, grace=DEADLINE_S)
        killed._abandon()
        first = await a.join("j", 1, name="trainer", settle=0, timeout=DEADLINE_S / 2)
        assert first.epoch == 2
        with pytest.raises(
            StoreTimeoutError, match=r"another process .* is the member trainer, for .* take another name"
        ):
            await b.join("j", 1, name="trainer", settle=0, timeout=0.05)
        waiting = asyncio.ensure_future(b.join("j", 1, name="trainer", settle=0))
        while not await a.waits():
            pass
        assert a._connection is not None
        a._connection._lose(ConnectionResetError("cut by the test"))
        second = await waiting
        assert (second.epoch, second.members) == (3, ("trainer",))
        with pytest.raises(LeaseLostError, match="was replaced: another process joined under its name"):
            await anext(first)
        with pytest.raises(LeaseLostError, match="was replaced: another process joined under its name"):
            await first.rejoin()
        await second.leave()


async def restarted(server: StoreServer) -> StoreServer:
    """Stop a daemon and start one without its data on the same port."""
    port = server.port
    await server.stop()
    fresh = StoreServer(ServerConfig(port=port))
    await fresh.start()
    return fresh


async def test_a_lock_lost_unnoticed_is_not_released_as_if_it_were_held() -> None:
    """The first that the holder hears of it is the answer to its release."""
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(ServerConfig(port=0)) as server,
        TCPStore("127.0.0.1", server.port) as store,
        TCPStore("127.0.0.1", server.port) as other,
    ):
        lock = store.lock("l")
        await lock.acquire()
        assert lock._lease is not None
        assert await other.ask(messages.REVOKE, (lock._lease.id,), DEADLINE_S) is True
        assert not lock.lost
        with pytest.raises(LeaseLostError, match="before it was released"):
            await lock.release()


async def test_a_restart_without_data_is_said_to_everyone() -> None:
    server = StoreServer(ServerConfig(port=0))
    await server.start()
    try:
        async with asyncio.timeout(DEADLINE_S), TCPStore("127.0.0.1", server.port) as store:
            by_time, bound = await store.lease(60.0), await store.lease(60.0, bound=True)
            lock = store.lock("l")
            token = await lock.acquire()
            member = await store.join("j", 1)
            async with store.watch("k") as watch:
                server = await restarted(server)
                with pytest.raises(WatchCompactedError):
                    await anext(watch)
                for lease in (by_time, bound):
                    assert "restarted" in await lease.wait_lost()
            with pytest.raises(LeaseLostError):
                await lock.release()
            with pytest.raises((LeaseLostError, WatchCompactedError)):
                await anext(member)
            with pytest.raises(LeaseLostError):
                await member.rejoin()
            async with store.lock("l") as later:
                assert later > token  # although the daemon has forgotten the earlier one
            async with store.watch("k") as watch:
                await store.set("k", "v")
                assert (await anext(watch)).value == b"v"
    finally:
        await server.stop()


async def test_a_slow_watcher_is_told_and_costs_the_daemon_nothing() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(ServerConfig(port=0)) as server,
        TCPStore("127.0.0.1", server.port) as slow,
        TCPStore("127.0.0.1", server.port) as writer,
    ):
        async with slow.watch("big") as watch:
            value = bytes(1024 * 1024)
            for _ in range(40):
                await writer.set("big", value)
            assert server.engine.memory_bytes < 12 * len(value)
            with pytest.raises(WatchCompactedError):
                await anext(watch)
            await writer.set("small", "")
            assert await writer.num_keys() == 2
        async with slow.watch("big") as watch:
            await writer.set("big", "x")
            assert (await anext(watch)).value == b"x"


async def test_the_first_question_in_a_hang() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(ServerConfig(port=0)) as server,
        TCPStore("127.0.0.1", server.port, namespace="job", rank=3) as store,
    ):
        waiting = asyncio.ensure_future(store.wait(["here", "not/here"]))
        await store.set("here", "")
        async with TCPStore("127.0.0.1", server.port) as tool:
            assert await tool.waits() == []
            (found,) = await tool.waits(all_namespaces=True)
            assert (found.operation, found.keys, found.namespace, found.rank) == ("wait", ("not/here",), "job", 3)
            assert "pid" in found.client
            assert "127.0.0.1" in found.address
            assert 0 <= found.waited < DEADLINE_S
            status = await tool.status()
            assert (status["clients"], status["keys"], status["waiters"]) == (2, 1, 1)
            assert status["connections"] == 2
            assert status["process_bytes"] >= 0
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting


async def test_a_lease_that_was_not_granted_is_none() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        serve(ServerConfig(port=0)) as server,
        TCPStore("127.0.0.1", server.port) as store,
    ):
        server.engine._state.leases.count = 65_536
        with pytest.raises(DistStoreError, match="65536 leases"):
            await store.lease(1.0)
        with pytest.raises(DistStoreError, match="65536 leases"):
            await store.lock("l").acquire()
        server.engine._state.leases.count = 0
        async with store.lock("l"):
            pass
