"""Where a process listens to be asked, and what a store says of it."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import replace

import msgpack
import pytest

import asyncdist as dist
from asyncdist.inspect.ask import Answer, EndpointAddress, ask_all, endpoints_here
from asyncdist.transport.addresses import LocalAddress
from asyncdist.transport.config import TransportConfig
from asyncdist.world.inspection import Inspection, worlds_of
from asyncdist_server.wire.auth import new_token

TOKEN = new_token()
LOOPBACK = LocalAddress(("127.0.0.1",))
ADVERTISED = LocalAddress(("127.0.0.1",), (("192.0.2.7", 0),))
"""Other hosts reach it by another address."""


def opened(
    reachable: LocalAddress, token: str | None = TOKEN, environ: Mapping[str, str] | None = None
) -> Inspection | None:
    environ = environ or {}
    return Inspection.open("default", 3, 4, token, reachable, TransportConfig.from_environ(environ), environ)


def endpoint_of(inspection: Inspection) -> EndpointAddress:
    host, pid, name, endpoints = inspection.address
    return EndpointAddress(host, pid, name, tuple(endpoints))


async def test_other_hosts_ask_by_tcp() -> None:
    inspection = opened(ADVERTISED)
    assert inspection is not None
    endpoint = endpoint_of(inspection)
    ((ip, port),) = endpoint.tcp
    assert ip == "192.0.2.7"
    here = replace(endpoint, unix=b"", tcp=(("127.0.0.1", port),))
    assert await ask_all([here, endpoint], TOKEN) == {here: Answer([]), endpoint: Answer([])}
    inspection.close()
    assert (await ask_all([here], TOKEN))[here].state == "gone"


@pytest.mark.parametrize(
    ("reachable", "token", "environ", "by_tcp"),
    [
        (LOOPBACK, TOKEN, {}, False),
        (ADVERTISED, None, {}, False),
        (ADVERTISED, TOKEN, {"ASYNCDIST_PORT_RANGE": "21000-21008"}, True),
        (ADVERTISED, TOKEN, {"ASYNCDIST_PORT_RANGE": "21000-21007"}, False),  # four ranks may need them
        (ADVERTISED, TOKEN, {"ASYNCDIST_PORT_RANGE": "21000-21002", "LOCAL_WORLD_SIZE": "1"}, True),
    ],
    ids=["loopback", "no token", "enough ports", "too few ports", "one rank"],  # the token is another in each worker
)
def test_a_port_is_taken_where_others_need_it_and_ranks_do_not(
    reachable: LocalAddress, token: str | None, environ: dict[str, str], by_tcp: bool
) -> None:
    inspection = opened(reachable, token, environ)
    assert inspection is not None
    assert bool(endpoint_of(inspection).tcp) is by_tcp
    if by_tcp and environ:
        assert endpoint_of(inspection).tcp[0][1] in range(21000, 21009)
    inspection.close()


def test_worlds_of_a_process_share_an_endpoint_until_the_last_is_closed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shares_an_endpoint(folder)


def shares_an_endpoint(folder: str) -> None:
    environ = {"ASYNCDIST_SOCKET_DIR": folder}
    one, other = opened(LOOPBACK, environ=environ), opened(LOOPBACK, environ=environ)
    assert one is other is not None
    one.close()
    (endpoint,) = (endpoint for endpoint in endpoints_here(folder) if endpoint.unix.startswith(b"/"))
    assert endpoint == EndpointAddress(socket.gethostname(), os.getpid(), endpoint_of(one).unix)
    one.close()
    assert not os.listdir(folder)


def test_it_is_turned_off_by_a_word_and_others_are_refused() -> None:
    assert opened(LOOPBACK, environ={"ASYNCDIST_INSPECT": "OFF"}) is None
    with pytest.raises(ValueError, match="ASYNCDIST_INSPECT='no': use on or off"):
        opened(LOOPBACK, environ={"ASYNCDIST_INSPECT": "no"})


async def test_a_store_knows_the_worlds_that_met_in_it() -> None:
    store = dist.HashStore()
    async with dist.init_process_group(store=store, rank=0, world_size=1, group_name="a/b"):
        (world,) = await worlds_of(store)
        assert (world.name, world.size, world.formed, world.ended) == ("a/b", 1, True, {})
        assert world.endpoints[0].pid == os.getpid()
        answer = (await ask_all(world.endpoints.values(), None))[world.endpoints[0]]
        assert [(one["rank"], one["world"]["name"]) for one in answer.documents] == [(0, "a/b")]
        assert answer.documents[0]["loop_turns"]
    assert await worlds_of(store) == []


async def test_hostile_keys_make_no_world_and_no_endpoint() -> None:
    store = dist.HashStore()
    endpoint = ["h", 1, b"\0name", [["127.0.0.1", 5], ["a.name", 5], ["::1", 1 << 16], 7]]
    await store.set("world/good/0/terms", msgpack.packb({"world_size": 2}))
    await store.set("world/good/0/info/0", msgpack.packb({"endpoint": endpoint}))
    await store.set("world/good/0/info/2", msgpack.packb({"endpoint": endpoint}))
    for odd in ([1, 2, 3, 4], "endpoint", ["h", 1, "text", []], ["h", 1, b"relative", []], ["h", 1, b"/a\0b", []], {}):
        await store.set("world/good/0/info/1", msgpack.packb({"endpoint": odd}))
        (world,) = await worlds_of(store)
        assert world.endpoints[0] == EndpointAddress("h", 1, b"\0name", (("127.0.0.1", 5),))
        assert (world.endpoints[1].unix, world.endpoints[1].tcp, len(world.endpoints)) == (b"", (), 2)
    for number, odd in enumerate((1 << 40, -1, True, "1", None)):
        await store.set(f"world/{number}/0/terms", msgpack.packb({"world_size": odd}))
        await store.set(f"world/{number}/0/info/0", b"\xc1")
    await store.set("world/none/0/info/0", msgpack.packb({}))
    await store.set(f"world/long/{'1' * 5000}/info/0", b"")
    assert [world.name for world in await worlds_of(store)] == ["good"]
