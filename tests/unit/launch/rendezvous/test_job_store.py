"""Which addresses a launcher that hosts the store binds."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from typing import Any

import pytest
from jobs import free_port

from asyncdist.errors import LaunchError
from asyncdist.launch.config import Endpoint, LaunchConfig
from asyncdist.launch.rendezvous import job_store
from asyncdist_server import serve_in_thread
from asyncdist_server.serving.user_token import find_user_token
from asyncdist_server.wire.auth import new_token

ALL = ""


@pytest.mark.parametrize(
    ("host", "found", "nodes", "bound"),
    [
        ("machine", ["127.0.1.1"], 1, "127.0.1.1"),
        ("machine", ["127.0.1.1"], 2, ALL),
        ("machine", ["::1"], 1, "::1"),
        ("machine", ["::1"], 2, ALL),
        ("machine", ["::1", "10.0.0.1"], 2, "10.0.0.1"),
        ("machine", ["fd00::1"], 2, "fd00::1"),
        ("localhost", ["::1", "127.0.0.1"], 2, "127.0.0.1"),
        ("localhost", ["::1"], 2, "::1"),
        ("::1", ["::1"], 2, "::1"),
        ("127.0.0.1", ["127.0.0.1"], 2, "127.0.0.1"),
        ("127.0.0.1,other", ["127.0.0.1"], 2, ALL),
        ("192.0.2.1,192.0.2.1", ["192.0.2.1"], 2, "192.0.2.1"),
    ],
)
def test_the_address_that_is_bound(
    host: str, found: list[str], nodes: int, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node resolves this machine's own name to an address of this machine, of either family."""

    def resolve(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET6 if ":" in each else socket.AF_INET, 0, 0, "", (each, 0)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert asyncio.run(job_store._bind_address(Endpoint(host, 1), nodes)) == bound


def test_all_addresses_are_served_with_a_token_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def bind_all(*_: Any) -> str:
        return ALL

    async def host() -> None:
        endpoint = Endpoint("localhost", 0)
        with pytest.raises(LaunchError, match="a token is needed"):
            await job_store._host_if_ours(endpoint, None, None, 2)
        server = await job_store._host_if_ours(endpoint, "a-token-of-this-test-and-long", None, 2)
        assert server is not None
        try:
            await job_store.probe_store(Endpoint("localhost", server.port), "a-token-of-this-test-and-long")
        finally:
            await asyncio.to_thread(server.close)

    monkeypatch.setattr(job_store, "_bind_address", bind_all)
    asyncio.run(host())


def test_a_store_without_a_token_does_not_pass_for_that_of_another_launcher() -> None:
    """On loopback it may be another user's; one that is named by ASYNCDIST_STORE is taken."""
    with serve_in_thread() as squatter:
        there = Endpoint("127.0.0.1", squatter.port)
        for rank in (0, 1):
            config = LaunchConfig(command=("x",), nnodes=2, node_rank=rank, endpoint=there)
            with pytest.raises(LaunchError, match="it may belong to another user"):
                asyncio.run(job_store.find_or_host(config))
        named = asyncio.run(job_store.find_or_host(LaunchConfig(command=("x",), store=there)))
        assert (named.token, named.hosted) == (None, None)


def test_launchers_on_loopback_have_their_users_token() -> None:
    async def both() -> None:
        config = LaunchConfig(command=("x",), nnodes=2, node_rank=0, endpoint=Endpoint("127.0.0.1", 0))
        first = await job_store.find_or_host(config)
        assert first.hosted is not None
        try:
            second = await job_store.find_or_host(dataclasses.replace(config, node_rank=1, endpoint=first.endpoint))
            assert first.token == second.token == find_user_token() is not None
        finally:
            await asyncio.to_thread(first.hosted.close)

    asyncio.run(both())


def test_launchers_that_come_later_agree_on_the_key_of_the_run_and_runs_differ() -> None:
    token = new_token()

    def config(port: int, node_rank: int) -> LaunchConfig:
        place = Endpoint("127.0.0.1", port)
        return LaunchConfig(command=("true",), nnodes=2, node_rank=node_rank, endpoint=place, job_id="job", token=token)

    async def keys_of_a_run(port: int) -> list[str | None]:
        found: list[str | None] = []
        hosted = None
        for node_rank in (0, 1, 1):  # the third is one that was started again
            place = await job_store.find_or_host(config(port, node_rank))
            hosted = hosted or place.hosted
            store = await job_store.open_store(place, 10.0)
            place = await job_store.with_run_token(place, store, config(port, node_rank))
            await store.close()
            await job_store.probe_store(place.endpoint, place.run_token)
            found.append(place.run_token)
        assert hosted is not None
        await asyncio.to_thread(hosted.close)
        return found

    async def runs() -> list[list[str | None]]:
        return [await keys_of_a_run(free_port()) for _ in range(2)]

    first, second = asyncio.run(runs())
    assert len({*first, *second}) == 2
    assert first[0] != second[0]
