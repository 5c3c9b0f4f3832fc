"""Segments passed from rank to rank: gone again when nobody wants them, and asked for in the middle of a read."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from mesh_world import Done, Rank, open_fds, received, world
from waiting import eventually

from asyncdist.errors import PeerLostError
from asyncdist.transport.connections.shm import ShmConnection
from asyncdist.transport.host_memory import HostMemory
from asyncdist.transport.protocol.frame import pack_key
from asyncdist.transport.protocol.operations import Receive
from asyncdist.transport.shared_memory.arrays import ARENA_BYTES
from asyncdist.transport.shared_memory.segment import Segment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")


async def meet(one: Rank, other: Rank) -> tuple[HostMemory, ShmConnection]:
    """Connect; the memory of `one`, and the connection of `other` to it."""
    one.send(other.rank, b"hello")
    assert await received(other.receive(one.rank)) == b"hello"
    memory, others = one.mesh.memory, other.mesh.memory
    assert memory is not None
    assert others is not None
    return memory, others.connections[one.rank]


async def test_what_nobody_took_is_unmapped_when_its_owner_gives_it_up() -> None:
    async with world(2, "shm") as made:
        one, other = made.ranks
        memory, connection = await meet(one, other)
        descriptors = len(open_fds())
        for _ in range(20):
            numbers = [memory.new_segment(4096) for _ in range(3)]
            for number in numbers:
                assert memory.share(number, [1])
            connection.segment(numbers[0])
            connection.take_segment(numbers[1])
            for number in numbers:
                memory.free(number)
            one.send(1, b"after that", tag=1)
            assert await received(other.receive(0, tag=1)) == b"after that"
            assert not connection.attached
        assert len(open_fds()) <= descriptors
        assert not memory.connections[1]._numbers


async def test_what_was_lent_can_be_lent_on_after_its_owner_has_gone() -> None:
    async with world(3, "shm") as made:
        one, two, three = made.ranks
        memory, connection = await meet(one, two)
        segment = Segment(8192, memory.fds)
        segment.view[:3] = b"abc"
        taken = connection.take_segment(memory.lend(segment, 1))
        segment.release()
        one.mesh.abort()
        await eventually(lambda: two.lost)
        relaying, onward = await meet(two, three)
        number = relaying.lend(taken, 2)
        assert onward.segment(number).view[:3] == b"abc"
        last = onward.take_segment(number)
        assert last.view[:3] == b"abc"
        assert relaying.lend(taken, 0) == 0  # it is not here
        for one_of_them in (taken, last):
            one_of_them.close()
            one_of_them.close()
            one_of_them.release()
        assert relaying.lend(taken, 2) == 0


async def test_what_was_lent_and_not_taken_is_closed() -> None:
    async with world(2, "shm") as made:
        one, other = made.ranks
        memory, connection = await meet(one, other)
        segment = Segment(8192, memory.fds)
        descriptors = len(open_fds())
        for _ in range(5):
            number = memory.lend(segment, 1)
            assert connection.segment(number).fd >= 0
            assert len(open_fds()) > descriptors
            memory.connections[1].unshare(number)
            one.send(1, b"after that", tag=1)
            assert await received(other.receive(0, tag=1)) == b"after that"
            assert len(open_fds()) == descriptors
        connection.segment(memory.lend(segment, 1))  # goes with the connection
        segment.release()


class Asking(Done):
    """On its first message, asks for a segment."""

    def __init__(self, connection: ShmConnection, number: int) -> None:
        super().__init__()
        self._connection = connection
        self._number = number

    def message_received(self, token: Any, receive: Receive) -> None:
        assert self._connection.segment(self._number).size
        super().message_received(token, receive)


async def test_a_segment_asked_for_while_reading_what_a_lost_rank_has_sent() -> None:
    """The end of its socket stands right behind the segment, and what is being read must not be read again."""
    async with world(2, "shm") as made:
        one, other = made.ranks
        memory, connection = await meet(one, other)
        number = memory.new_segment(4096)
        asking = Asking(connection, number)
        assert not other.mesh.post_receive(0, Receive(pack_key(1, 5, 0, 0, 0), None, asking, None))
        second, third = other.receive(0, tag=5), other.receive(0, tag=5)
        assert memory.share(number, [1])
        one.send(1, b"first", tag=5)
        one.send(1, b"second", tag=5)
        one.mesh.abort()
        connection._poll()
        assert await received(asking.future) == b"first"
        assert await received(second) == b"second"
        with pytest.raises(PeerLostError):
            await received(third)
        await eventually(lambda: other.lost)


async def test_an_arena_that_is_gone_before_it_was_mapped_is_not_kept() -> None:
    """The ring overtakes the socket: that the arena is gone may be read before the arena itself."""
    async with world(2, "shm") as made:
        one, other = made.ranks
        memory, connection = await meet(one, other)
        zero_copy = memory.connections[1].zero_copy
        for _ in range(3):
            array = memory.arrays.empty((ARENA_BYTES + 1,), np.dtype(np.uint8))
            assert array is not None
            assert zero_copy.expose(memoryview(array)) is None
            del array
            memory.arrays._reclaim()
            connection._poll()
            assert not connection.zero_copy._attached
        one.send(1, b"after that", tag=1)
        assert await received(other.receive(0, tag=1)) == b"after that"
