"""Ranks of one host read long messages in each other's process, over real sockets."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
from mesh_world import Rank, received, world
from waiting import eventually

from asyncdist.errors import PeerLostError
from asyncdist.transport.connections.shm import ShmConnection
from asyncdist.transport.protocol.zero_copy import READ_BYTES
from asyncdist.transport.shared_memory.process_memory import PROCESS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
LONG = os.urandom(1 << 20) * (2 * READ_BYTES >> 20)


async def meet(one: Rank, other: Rank) -> tuple[ShmConnection, ShmConnection]:
    """Connect; both ends."""
    one.send(other.rank, b"hello")
    assert await received(other.receive(one.rank)) == b"hello"
    assert one.mesh.memory is not None
    assert other.mesh.memory is not None
    return one.mesh.memory.connections[other.rank], other.mesh.memory.connections[one.rank]


async def test_they_read_each_other() -> None:
    async with world(2, "shm") as made:
        one, other = made.ranks
        ends = await meet(one, other)
        for end in ends:
            await eventually(lambda end=end: end.zero_copy.reads and end.zero_copy.exposed(PROCESS))
            assert end.peer_process == os.getpid()
        before = [end.bytes_sent for end in ends]
        there, back = one.send(1, LONG, tag=1), other.send(0, LONG, tag=2)
        assert await received(one.receive(1, tag=2)) == LONG
        assert await received(other.receive(0, tag=1)) == LONG
        assert await there
        assert await back
        assert [end.bytes_sent - sent < 1000 for end, sent in zip(ends, before, strict=True)] == [True, True]


async def test_a_long_message_may_be_the_first() -> None:
    """It may be posted before either knows what the other can read."""
    async with world(2, "shm") as made:
        one, other = made.ranks
        sent = one.send(1, LONG)
        assert await received(other.receive(0)) == LONG
        assert await sent


async def test_where_it_is_off_they_travel() -> None:
    async with world(2, "shm", single_copy="off") as made:
        one, other = made.ranks
        ends = await meet(one, other)
        before = ends[0].bytes_sent
        one.send(1, LONG, tag=1)
        assert await received(other.receive(0, tag=1)) == LONG
        assert ends[0].bytes_sent - before > len(LONG)
        assert not any(end.zero_copy.reads for end in ends)


async def test_processes_of_another_user_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may read those of all users would read what a rank names, in any process that has come to its number."""
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    async with world(2, "shm") as made:
        ends = await meet(*made.ranks)
        with pytest.raises(PermissionError, match="another user"):
            ends[0].peer_process  # noqa: B018
        assert not any(end.zero_copy.reads for end in ends)


async def test_a_rank_that_goes_while_it_is_read() -> None:
    async with world(2, "shm") as made:
        one, other = made.ranks
        ends = await meet(one, other)
        await eventually(lambda: ends[0].zero_copy.exposed(PROCESS))
        sent, got = one.send(1, LONG, tag=1), other.receive(0, tag=1)
        while not ends[1].zero_copy.copies:  # which takes several turns of the loop, and not much time
            assert not got.done()
            await asyncio.sleep(0)
        one.mesh.abort()
        with pytest.raises(PeerLostError):
            await received(got)
        assert sent.done()
        assert not ends[1].zero_copy.copies
        with pytest.raises(OSError, match="not connected"):
            ends[0].peer_process  # noqa: B018
