"""TCPStore as torch's scripts make it: one of them runs the daemon, the others find it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from datetime import timedelta
from typing import Any

import pytest
from cancel_sweep import at_every_await
from jobs import free_port

from asyncdist.errors import ConnectTimeoutError, DistError, DistStoreError, StoreTimeoutError
from asyncdist.store import PrefixStore, TCPStore
from asyncdist_server.serving.threaded import ThreadedServer

HOST = "127.0.0.1"


def daemons() -> int:
    return sum(thread.name == "asyncdist-store" for thread in threading.enumerate())


async def test_torchs_first_example() -> None:
    before = daemons()
    async with TCPStore(HOST, 0, 1, True, timedelta(seconds=30)) as store:
        assert store.port > 0
        assert repr(store) == f"TCPStore('127.0.0.1', {store.port})"
        await store.add("first_key", 1)
        await store.add("first_key", 6)
        assert await store.get("first_key") == b"7"
        assert await store.num_keys() == 1
        assert daemons() == before + 1
    assert daemons() == before
    with pytest.raises(ConnectTimeoutError):
        await TCPStore.connect(HOST, store.port, timeout=0.05)


async def test_a_master_waits_for_its_workers_and_they_for_it() -> None:
    port = free_port()
    workers = [asyncio.ensure_future(TCPStore.connect(HOST, port, 3, timeout=10)) for _ in range(2)]
    async with TCPStore(host_name=HOST, port=port, world_size=3, is_master=True, timeout=10, use_libuv=False) as store:
        assert await store.num_keys() == 0
        for worker in await asyncio.gather(*workers):
            await worker.set("key", "value")
            assert await store.get("key") == b"value"
            await worker.close()


async def test_workers_that_do_not_come_are_counted() -> None:
    before = daemons()
    for limit_s in (0.5, 5, 40):  # on a busy machine the one that comes may come too late
        port = free_port()
        opening = asyncio.ensure_future(TCPStore.connect(HOST, port, 3, True, timeout=limit_s))
        worker = asyncio.ensure_future(TCPStore.connect(HOST, port, 3, timeout=limit_s))
        with pytest.raises(StoreTimeoutError) as caught:
            await opening
        assert daemons() == before
        with contextlib.suppress(DistError):
            await (await worker).close()
        if "1 of 3" not in str(caught.value):
            break
    assert f"2 of 3 stores, this one among them, opened within {limit_s:g} s" in str(caught.value)


async def test_nobody_is_waited_for_where_that_is_not_asked() -> None:
    for options in ({"wait_for_workers": False}, {"world_size": None}, {"world_size": -1}):
        arguments: dict[str, Any] = {"world_size": 5, **options}
        async with TCPStore(HOST, 0, is_master=True, **arguments) as store:
            await store.set("key", "value")


async def test_a_taken_port_is_said_or_shared(server: ThreadedServer) -> None:
    with pytest.raises(DistStoreError, match=rf"cannot host the store at 127.0.0.1:{server.port}: .*multi_tenant=True"):
        await TCPStore.connect(HOST, server.port, is_master=True)
    async with TCPStore(HOST, server.port, 1, True, multi_tenant=True, namespace="shared") as store:
        await store.set("key", "value")
    async with TCPStore(HOST, server.port, namespace="shared") as store:  # that daemon was not the master's to end
        assert await store.get("key") == b"value"


async def test_cancelling_the_opening_leaves_no_daemon() -> None:
    before = daemons()
    port = free_port()
    opening = asyncio.ensure_future(TCPStore.connect(HOST, port, 2, True))
    probe = await TCPStore.connect(HOST, port, timeout=10)  # it serves already, and waits
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert daemons() == before
    await probe.close()


async def test_cancelling_it_at_every_await_from_one_on_leaves_no_daemon() -> None:
    async def open_and_close() -> None:
        async with TCPStore(HOST, 0, 1, True):
            pass

    before = daemons()
    async for _cut, error in at_every_await(open_and_close, again=True):
        assert error is None or isinstance(error, asyncio.CancelledError)
        assert daemons() == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"port": 0}, ValueError, r"port must be in 1\.\.65535"),
        ({"port": 65536, "is_master": True}, ValueError, r"port must be in 0\.\.65535"),
        ({"port": "1"}, TypeError, "needs a host"),
        ({"world_size": 2.0}, TypeError, "world_size must be int or None, not float"),
        ({"world_size": True}, TypeError, "not bool"),
        ({"master_listen_fd": 3}, NotImplementedError, "port=0 picks a free port"),
        ({"is_master": True, "tls": ssl.create_default_context()}, TypeError, "TLSConfig"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TCPStore(HOST, **{"port": 29500, **options})


async def test_an_address_off_loopback_needs_a_token() -> None:
    with pytest.raises(ValueError, match="token"):
        await TCPStore.connect("0.0.0.0", 0, is_master=True)
    async with TCPStore("0.0.0.0", 0, is_master=True, token="a-secret-of-some-length-0123456789") as store:
        await store.barrier("all", 1)


async def test_barriers() -> None:
    async with TCPStore(HOST, 0, is_master=True) as store, PrefixStore("part", store) as part:
        first = asyncio.ensure_future(part.barrier("key", 2))
        await store.barrier("key", 1)  # another key
        await asyncio.wait_for(asyncio.gather(first, part.barrier("key", 2, timedelta(seconds=10))), 10)
        assert store.has_extended_api()
