"""`Store.clone`: further clients of the same data, on the same event loop or another one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import asyncdist as dist
from asyncdist import blocking
from asyncdist_server.serving.threaded import ThreadedServer


def make(kind: str, path: Path, server: ThreadedServer, namespace: str) -> dist.Store:
    if kind == "hash":
        return dist.HashStore(timeout=7)
    if kind == "file":
        return dist.FileStore(path / "store", timeout=7)
    store = dist.TCPStore("127.0.0.1", server.port, timeout=7, namespace=namespace)
    return dist.PrefixStore("view", dist.PrefixStore("below", store)) if kind == "prefix" else store


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
async def test_a_clone_has_a_life_of_its_own(kind: str, tmp_path: Path, server: ThreadedServer, namespace: str) -> None:
    first = make(kind, tmp_path, server, namespace)
    if kind == "prefix":
        first = first.clone()  # for this one's TCPStore must be opened
    async with first:
        async with first.clone() as other:
            assert other.timeout == 7
            await first.set("key", "value")
            assert await other.get("key") == b"value"
        with pytest.raises(dist.ClosedError):
            await other.get("key")
        with pytest.raises(dist.ClosedError):
            other.clone()
        assert await first.get("key") == b"value"
        last = first.clone()
    async with last:
        assert await last.get("key") == b"value"


@pytest.mark.parametrize("kind", ["file", "tcp"])
async def test_a_clone_may_belong_to_another_event_loop(
    kind: str, tmp_path: Path, server: ThreadedServer, namespace: str
) -> None:
    async with make(kind, tmp_path, server, namespace) as first:

        async def there() -> None:
            async with first.clone() as other:
                await other.set("key", "from there")

        await asyncio.to_thread(asyncio.run, there())
        assert await first.get("key") == b"from there"


def test_clones_of_blocking_stores(server: ThreadedServer, namespace: str) -> None:
    with blocking.TCPStore("127.0.0.1", server.port, namespace=namespace) as first:
        with blocking.PrefixStore("view", first) as view, view.clone() as other:
            view.set("key", "value")
            assert other.get("key") == b"value"
        assert first.get("view/key") == b"value"
