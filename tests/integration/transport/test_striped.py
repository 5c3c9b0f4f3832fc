"""Pairs of ranks with several connections: how they are spread over interfaces, lost, and made anew."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter

import pytest
from mesh_world import Rank, World, received, world
from waiting import eventually

from asyncdist.transport.connections.striped import Path, StripedConnection

RESET = bytes((1, 0, 0, 0, 0, 0, 0, 0))
"""A `struct linger` by which closing a socket resets the connection."""


def striped(rank: Rank, peer: Rank) -> StripedConnection:
    connection = rank.mesh._links[peer.rank]._connection
    assert isinstance(connection, StripedConnection)
    return connection


def socket_of(path: Path) -> socket.socket:
    assert path.sock is not None
    return path.sock


async def connected(made: World, streams: int) -> tuple[Rank, Rank]:
    """Two ranks that have all their connections."""
    one, other = made.ranks
    sent = one.send(other.rank, b"first")
    assert await received(other.receive(one.rank)) == b"first"
    await sent
    await eventually(lambda: all(len(striped(*pair)._paths) == streams for pair in ((one, other), (other, one))))
    return one, other


async def test_each_connection_takes_the_next_interface_from_its_own_address() -> None:
    async with world(2, "tcp", interfaces=2, streams=4) as made:
        one, other = await connected(made, 4)
        ends = [
            (socket_of(path).getsockname()[0], socket_of(path).getpeername()[0]) for path in striped(one, other)._paths
        ]
        assert Counter(ends) == {("127.0.0.1", "127.0.0.1"): 2, ("127.0.0.2", "127.0.0.2"): 2}
        assert sorted(path.number for path in striped(other, one)._paths) == [0, 1, 2, 3]


async def test_pairs_with_one_connection_each_use_all_interfaces() -> None:
    async with world(8, "tcp", interfaces=2, streams=1) as made:
        for rank in made.ranks[1:]:
            made.ranks[0].mesh.connect([rank.rank])
        await eventually(lambda: all(made.ranks[0].mesh.is_connected(rank.rank) for rank in made.ranks[1:]))
        used = Counter(made.ranks[0].mesh.describe(rank.rank).split()[3].split(":")[0] for rank in made.ranks[1:])
        assert set(used) == {"127.0.0.1", "127.0.0.2"}


async def test_without_one_interface_the_others_connect() -> None:
    async with world(2, "tcp", interfaces=2, streams=2) as made:
        for rank in made.ranks:
            rank.mesh._context.ips[0] = "192.0.2.1"  # no address of this host: a socket cannot be bound to it
        one, other = made.ranks
        for number in range(3):
            one.send(other.rank, bytes([number]) * 100_000)
        for number in range(3):
            assert await received(other.receive(one.rank)) == bytes([number]) * 100_000
        assert [socket_of(path).getsockname()[0] for path in striped(one, other)._paths] == ["127.0.0.2"]


@pytest.mark.parametrize("dialed_here", [True, False])
async def test_a_connection_that_is_reset_mid_message_is_made_anew(dialed_here: bool) -> None:
    data = random.Random(0).randbytes(16 << 20)
    async with world(2, "tcp", interfaces=2, streams=3) as made:
        one, other = await connected(made, 3)
        resets = striped(one, other) if bool(made.ranks[0].mesh._links[1]._path_dialers) is dialed_here else None
        connection = resets or striped(other, one)
        for number in (0, 2, 1):
            sent = one.send(other.rank, data)
            incoming = other.receive(one.rank)
            at = striped(other, one).bytes_received
            await eventually(lambda at=at: striped(other, one).bytes_received > at + (2 << 20))
            path = next(path for path in connection._paths if path.number == number)
            socket_of(path).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection._lose(path, ConnectionResetError("by the test"))
            assert await received(incoming) == data
            await sent
            await eventually(lambda: len(striped(one, other)._paths) == 3 == len(striped(other, one)._paths))
        assert not one.lost
        assert not other.lost


async def test_a_rank_that_ends_is_lost_at_once() -> None:
    async with world(2, "tcp", interfaces=2, streams=3) as made:
        one, other = await connected(made, 3)
        incoming = one.receive(other.rank)
        other.mesh.abort()
        await eventually(lambda: other.rank in one.lost)
        assert "without a goodbye" in str(one.lost[other.rank])
        await asyncio.wait([incoming])
        assert incoming.exception() is one.lost[other.rank]


async def test_a_rank_that_leaves_has_left() -> None:
    async with world(2, "tcp", interfaces=2, streams=3) as made:
        one, other = await connected(made, 3)
        sent = other.send(one.rank, b"last")
        await other.mesh.close(10)
        await sent
        assert await received(one.receive(other.rank)) == b"last"
        assert one.left == [other.rank]
        assert not one.lost
