"""Meshes for tests: several ranks in one loop over real sockets, and what they heard."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from waiting import PATIENCE_S

from asyncdist.errors import PeerLostError
from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.mesh import Mesh
from asyncdist.transport.protocol.frame import pack_key
from asyncdist.transport.protocol.operations import Receive, SendOp

WORLD_ID = b"a world of tests"
SECRET = b"secret"


def open_fds() -> dict[int, str]:
    """Descriptors of this process and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


class Done:
    """A sink for one operation: a future of the bytes received, of True for a send, or an error."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.calls = 0
        self.data = bytearray()

    def message_sent(self, token: Any) -> None:
        self._end(True)

    def message_received(self, token: Any, receive: Receive) -> None:
        self._end(bytes(self.data))

    def message_failed(self, token: Any, error: BaseException) -> None:
        self.calls += 1
        assert self.calls == 1
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # not every test asks

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        self.data = bytearray(nbytes)
        return memoryview(self.data)

    def _end(self, value: Any) -> None:
        self.calls += 1
        assert self.calls == 1
        if not self.future.done():
            self.future.set_result(value)


class Rank:
    """One mesh and everything its owner was told."""

    def __init__(self, rank: int, size: int, resolve: Any, config: TransportConfig, **identity: Any) -> None:
        self.lost: dict[int, PeerLostError] = {}
        self.left: list[int] = []
        self.controls: list[tuple[int, bytes]] = []
        self.rank = rank
        self.mesh = Mesh(
            rank, size, identity.get("world_id", WORLD_ID), identity.get("secret", SECRET), resolve, self, config
        )

    def peer_connected(self, rank: int) -> None:
        """Nothing to be told."""

    def peer_lost(self, rank: int, error: PeerLostError) -> None:
        assert rank not in self.lost
        self.lost[rank] = error

    def peer_left(self, rank: int) -> None:
        assert rank not in self.left
        self.left.append(rank)

    def control_received(self, rank: int, payload: bytes) -> None:
        self.controls.append((rank, payload))

    def send(self, rank: int, data: bytes, tag: int = 0, channel: int = 0) -> asyncio.Future[Any]:
        done = Done()
        op = SendOp(pack_key(1, tag, 0, 0, channel), memoryview(data), b"", done, None)
        if self.mesh.post_send(rank, op):
            done.message_sent(None)
        return done.future

    def receive(self, rank: int | None, tag: int = 0, ranks: Sequence[int] = ()) -> asyncio.Future[Any]:
        done = Done()
        receive = Receive(pack_key(1, tag, 0, 0, 0), None, done, None)
        if self.mesh.post_receive_any(ranks, receive) if rank is None else self.mesh.post_receive(rank, receive):
            done.message_received(None, receive)
        return done.future


async def received(future: asyncio.Future[Any]) -> bytes:
    """The bytes of a receive, in time."""
    async with asyncio.timeout(PATIENCE_S):
        return bytes(await future)


class World:
    """Ranks that find each other through `addresses`; `resolved` records every look-up."""

    def __init__(self, size: int, transport: str, **config: Any) -> None:
        self.addresses: dict[int, PeerAddress] = {}
        self.resolved: list[tuple[int, list[int]]] = []
        self.config = TransportConfig(transport=transport, **config)
        self.ranks: list[Rank] = []
        self.size = size
        self.ips = [f"127.0.0.{number + 1}" for number in range(self.config.interfaces)]

    def add(self, rank: int, **identity: Any) -> Rank:
        async def resolve(ranks: Sequence[int]) -> dict[int, PeerAddress]:
            self.resolved.append((rank, sorted(ranks)))
            return {peer: self.addresses[peer] for peer in ranks if peer in self.addresses}

        added = Rank(rank, self.size, resolve, self.config, **identity)
        self.ranks.append(added)
        return added

    async def listen(self) -> None:
        for rank in self.ranks:
            self.addresses[rank.rank] = await rank.mesh.listen(self.ips)


@contextlib.asynccontextmanager
async def world(size: int, transport: str = "unix", **config: Any) -> AsyncIterator[World]:
    """`size` listening ranks; afterwards all are closed and no descriptor is left."""
    before = open_fds()
    made = World(size, transport, **config)
    for rank in range(size):
        made.add(rank)
    try:
        await made.listen()
        yield made
    finally:
        await asyncio.gather(*(rank.mesh.close(PATIENCE_S) for rank in made.ranks))
    left = {fd: what for fd, what in open_fds().items() if before.get(fd) != what and "eventpoll" not in what}
    assert not left, f"descriptors left open: {left}"
