"""Two ranks agree to share memory when both can, and on a plain stream when either cannot, whatever the reason."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from mesh_world import Rank, World, open_fds, received, world

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.connections.shm import Pairing, ShmConnection
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.host_memory import MIN_RING_BYTES, RING_BYTES, HostMemory
from asyncdist.transport.shared_memory.ring import half_bytes
from asyncdist.transport.shared_memory.segment import (
    READY,
    SEGMENT,
    SETUP,
    AttachedSegment,
    Parcel,
    ParcelReader,
    Segment,
)


class Side:
    """One end of a socket pair, as the pairing sees it."""

    def __init__(self, sock: socket.socket, transport: str = "auto", limit_bytes: int = 32 << 20) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fds = SocketSet(lambda: None)
        self.memory = HostMemory(asyncio.get_running_loop(), self.fds, limit_bytes)
        context: Any = SimpleNamespace(config=TransportConfig(transport=transport), memory=self.memory)
        self.pairing = Pairing(context)
        self.reader = ParcelReader()

    def hear(self) -> bool | None:
        parcel = self.reader.read(self.sock)
        assert parcel is not None
        return self.pairing.take(self.sock, parcel)

    def close(self) -> None:
        self.reader.close()
        self.pairing.close()
        self.memory.close()
        self.sock.close()


@contextlib.asynccontextmanager
async def sides(**second: Any) -> AsyncIterator[tuple[Side, Side]]:
    gc.collect()  # what earlier tests left in cycles must not go meanwhile
    before = open_fds()
    left, right = socket.socketpair()
    pair = Side(left), Side(right, **second)
    yield pair
    for side in pair:
        side.close()
    assert open_fds() == before


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """This process can open nothing more."""
    used = set(open_fds())
    fillers = [os.dup(0) for _ in range(max(used) - len(used) + 1)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max([*used, *fillers]) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


async def test_both_are_ready() -> None:
    async with sides() as (one, two):
        for side in (one, two):
            side.pairing.offer(side.sock)
        assert one.hear() is None
        assert two.hear() is None
        assert one.hear() is True
        assert two.hear() is True
        reader, writer = one.pairing.rings()[0], two.pairing.rings()[1]
        writer.write([b"hello"], lambda: None)
        buffer = memoryview(bytearray(10))
        assert reader.read_into(buffer) == 5
        del reader, writer
        assert one.pairing.peer_is_here


@pytest.mark.parametrize("second", [{"transport": "unix"}, {"limit_bytes": 0}])
async def test_one_refuses(second: dict[str, Any]) -> None:
    async with sides(**second) as (one, two):
        one.pairing.offer(one.sock)
        two.pairing.offer(two.sock)
        assert two.hear() is False
        assert one.hear() is False
        assert "the peer cannot" in one.pairing.refusal
        assert "ASYNCDIST_SHM_BYTES" in two.pairing.refusal or "the transport is unix here" in two.pairing.refusal
        one.sock.send(b"frame")
        assert two.sock.recv(10) == b"frame", "nothing else of the pairing follows"


async def test_descriptors_that_do_not_arrive_are_a_refusal() -> None:
    async with sides() as (one, two):
        one.pairing.offer(one.sock)
        two.pairing.offer(two.sock)
        with no_descriptors_left():
            assert two.hear() is None
        assert "Too many open files" in two.pairing.refusal
        assert one.hear() is None
        assert one.hear() is False
        assert two.hear() is False, "the other was ready; both know that this one is not"


async def test_descriptors_that_cannot_be_mapped_are_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sides() as (one, two):
        one.pairing.offer(one.sock)
        two.pairing.offer(two.sock)

        def full(fd: int, _size: int, _fds: object = None) -> None:
            os.close(fd)
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr("asyncdist.transport.connections.shm.AttachedSegment", full)
        assert two.hear() is None
        monkeypatch.undo()
        assert one.hear() is None
        assert one.hear() is False
        assert two.hear() is False


@pytest.mark.parametrize(
    "problem", ["short ring", "long ring", "no eventfd", "no segment", "twice", "early", "segment"]
)
async def test_what_no_peer_says(problem: str) -> None:
    async with sides() as (one, two):
        one.pairing.offer(one.sock)
        two.pairing.offer(two.sock)
        other = Segment(half_bytes(2 * RING_BYTES if problem == "long ring" else MIN_RING_BYTES // 2), one.fds)
        page, bell = one.memory.doorbell.page.fd, one.memory.doorbell.eventfd
        right = half_bytes(RING_BYTES)
        said = {
            "short ring": (SETUP, other.size, (other.fd, page, bell)),
            "long ring": (SETUP, other.size, (other.fd, page, bell)),
            "no eventfd": (SETUP, right, (one.pairing.half.fd, page, 0)),  # type: ignore[union-attr]
            "no segment": (SETUP, right, (0, page, bell)),
            "twice": (SETUP, right, (one.pairing.half.fd, page, bell)),  # type: ignore[union-attr]
            "early": (READY, 0, ()),
            "segment": (SEGMENT, right, (page,)),
        }
        kind, size, fds = said[problem]
        if problem == "twice":
            assert two.hear() is None
        with pytest.raises(RemoteProtocolError):
            two.pairing.take(two.sock, Parcel(kind, 1, size, tuple(map(os.dup, fds))))
        other.release()


async def test_rings_become_shorter_as_memory_runs_out_and_it_comes_back() -> None:
    memory = HostMemory(asyncio.get_running_loop(), SocketSet(lambda: None))
    rings = []

    def take_all() -> None:
        while True:
            rings.append(memory.new_ring())

    with pytest.raises(OSError, match="ASYNCDIST_SHM_BYTES"):
        take_all()
    sizes = [ring.size for ring in rings]
    assert sizes[:8] == [half_bytes(RING_BYTES)] * 8
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == half_bytes(MIN_RING_BYTES)
    assert 35 < len(rings) < 50
    assert sum(sizes) <= 16 << 20, "the other half is for groups"
    assert memory.new_segment(15 << 20)
    for ring in rings:
        memory.free_ring(ring)
    again = memory.new_ring()
    assert again.size == half_bytes(RING_BYTES)
    memory.free_ring(again)
    memory.close()
    for ring in rings:
        ring.release()


async def mixed(first: str, second: str) -> AsyncIterator[list[Rank]]:
    made = World(2, first)
    made.add(0)
    made.config = TransportConfig(transport=second)
    made.add(1)
    await made.listen()
    yield made.ranks
    await asyncio.gather(*(rank.mesh.close(5) for rank in made.ranks))


@pytest.mark.parametrize(("second", "label"), [("unix", "unix"), ("tcp", "tcp"), ("auto", "shm")])
@pytest.mark.parametrize("dialer", [0, 1])
async def test_ranks_told_different_things_still_talk(second: str, label: str, dialer: int) -> None:
    async for ranks in mixed("auto", second):
        one, two = ranks[dialer], ranks[1 - dialer]
        sent = one.send(two.rank, b"x" * 300_000)
        assert await received(two.receive(one.rank)) == b"x" * 300_000
        await sent
        assert one.mesh.describe(two.rank).split(": ")[1].startswith(label)
        assert two.mesh.describe(one.rank).split(": ")[1].startswith(label)


async def test_descriptors_a_peer_costs() -> None:
    """What docs/shared-memory.md says: the socket, the peer's eventfd, and before Python 3.13 one for each mapping."""
    mapping = 0 if sys.version_info >= (3, 13) else 1
    gc.collect()
    async with world(3, "shm") as made:

        async def meet(one: int, two: int) -> int:
            before = len(open_fds())
            sent = made.ranks[one].send(two, b"hello")
            assert await received(made.ranks[two].receive(one)) == b"hello"
            await sent
            return len(open_fds()) - before

        both_ends = 2 * (2 + 3 * mapping)
        doorbell = 2 + mapping  # our own: the page and the eventfd
        assert await meet(0, 1) == both_ends + 2 * doorbell
        assert await meet(0, 2) == both_ends + doorbell
        assert await meet(1, 2) == both_ends


async def test_segments_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(2, "shm") as made:
        sent = made.ranks[0].send(1, b"first")
        assert await received(made.ranks[1].receive(0)) == b"first"
        await sent
        memories = [rank.mesh.memory for rank in made.ranks]
        assert memories[0] is not None
        assert memories[1] is not None
        theirs: ShmConnection = memories[1].connections[0]
        with pytest.raises(RemoteProtocolError, match="segment 99"):
            theirs.segment(99)
        numbers = [memories[0].new_segment(4096) for _ in range(3)]
        assert memories[0].share(numbers[0], [1])
        memories[0].segments[numbers[0]].view[:3] = b"abc"
        taken: AttachedSegment = theirs.take_segment(numbers[0])
        assert taken.view[:3] == b"abc"
        del taken
        assert memories[0].share(numbers[1], [1])
        assert theirs.segment(numbers[1]) is theirs.segment(numbers[1])

        def full(fd: int, _size: int, _fds: object = None) -> None:
            os.close(fd)
            raise OSError(24, "Too many open files")

        monkeypatch.setattr("asyncdist.transport.connections.shm.AttachedSegment", full)
        assert memories[0].share(numbers[2], [1])
        with pytest.raises(OSError, match="could not be mapped"):
            theirs.segment(numbers[2])
        monkeypatch.undo()
        sent = made.ranks[0].send(1, b"still connected")
        assert await received(made.ranks[1].receive(0)) == b"still connected"
        await sent
        assert not memories[0].share(numbers[0], [1, 5])
    assert not memories[0].share(numbers[0], [1])
