"""What every mesh must do, as checks that run on any of them.

    from transport_conformance import MESH_CHECKS

    @pytest.mark.parametrize("check", MESH_CHECKS, ids=lambda check: check.__name__)
    async def test_my_mesh(check):
        await check(open_my_meshes)

`open_my_meshes` is an async function that takes a sequence of owners and opens one mesh for each, ranks 0, 1, ... of a
world of its own, in this event loop. A check needs no test framework and leaves nothing open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

from asyncdist.errors import CollectiveMismatchError, PeerLostError
from asyncdist.testing.store_conformance import checks_of
from asyncdist.transport.base_mesh import BaseMesh, MeshOwner
from asyncdist.transport.protocol.frame import EAGER_BYTES, MAX_CONTROL_BYTES, MAX_OFFERS, pack_key
from asyncdist.transport.protocol.operations import Receive, SendOp

__all__ = ["MESH_CHECKS", "MeshCheck", "OpenMeshes"]


OpenMeshes: TypeAlias = Callable[[Sequence[MeshOwner]], Awaitable[Sequence[BaseMesh]]]
"""Open one mesh per owner, ranks 0, 1, ... of a new world, all listening and able to find each other."""

MeshCheck: TypeAlias = Callable[[OpenMeshes], Coroutine[Any, Any, None]]

PATIENCE_S: Final = 30.0
"""Far more than any check takes: a check that waits this long has failed."""

CLOSE_TIMEOUT_S: Final = 10.0

GROUP: Final = 11
"""The group whose messages the checks send."""

SIZES: Final = (0, 1, 100_000, EAGER_BYTES, EAGER_BYTES + 1, 5 << 20)
GROUP_BYTES: Final = pack_key(GROUP, 0, 0, 0, 0)[:8]


def pattern(nbytes: int, salt: int = 0) -> bytes:
    """Bytes of which no two stretches look alike soon."""
    block = bytes((i * i + salt) % 251 for i in range(1009))
    return (block * (nbytes // len(block) + 1))[:nbytes]


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - a condition of any kind has no event to wait for
            await asyncio.sleep(0.001)


class Operation:
    """One send or receive: a sink that turns what it is told into a future, and objects to being told twice."""

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.data = bytearray()
        self.meta = b""
        self.source: int | None = None
        self.refusal: Exception | None = None
        self.receive: Receive | None = None
        self.calls = 0

    def message_sent(self, token: Any) -> None:
        self._end(None)

    def message_received(self, token: Any, receive: Receive) -> None:
        self.source = receive.source
        self.meta = receive.meta
        assert receive.nbytes == len(self.data)
        self._end(None)

    def message_failed(self, token: Any, error: BaseException) -> None:
        self._end(error)

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        if self.refusal is not None:
            raise self.refusal
        self.data = bytearray(nbytes)
        return memoryview(self.data)

    def _end(self, error: BaseException | None) -> None:
        self.calls += 1
        assert self.calls == 1, "told twice"
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)
            self.future.exception()  # not every check asks

    async def done(self) -> bytes:
        """Wait for the end; returns the data received."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.shield(self.future)
        return bytes(self.data)

    async def failure(self) -> BaseException:
        """Wait for the failure."""
        try:
            await self.done()
        except Exception as error:
            return error
        raise AssertionError("it did not fail")


class Rank:
    """One mesh, what its owner was told, and its operations as `Operation`s."""

    def __init__(self) -> None:
        self.lost: dict[int, PeerLostError] = {}
        self.left: list[int] = []
        self.connected: list[int] = []
        self.greetings: list[bytes] = []  # controls sent to each rank that connects
        self.controls: list[tuple[int, bytes]] = []
        self.events: list[str] = []
        self.mesh: BaseMesh

    def peer_connected(self, rank: int) -> None:
        assert rank not in self.connected
        self.connected.append(rank)
        for payload in self.greetings:
            self.mesh.send_control(rank, payload)

    def peer_lost(self, rank: int, error: PeerLostError) -> None:
        assert rank not in self.lost
        self.lost[rank] = error

    def peer_left(self, rank: int) -> None:
        assert rank not in self.left
        self.left.append(rank)

    def control_received(self, rank: int, payload: bytes) -> None:
        self.controls.append((rank, payload))
        self.events.append("control")

    def send(self, rank: int, data: bytes, tag: int = 0, channel: int = 0, meta: bytes = b"") -> Operation:
        operation = Operation()
        op = SendOp(pack_key(GROUP, tag, 0, 0, channel), memoryview(data), meta, operation, None)
        try:
            complete = self.mesh.post_send(rank, op)
        except PeerLostError as error:
            operation.message_failed(None, error)
        else:
            if complete:
                operation.message_sent(None)
        return operation

    def receive(
        self,
        rank: int | None,
        tag: int = 0,
        channel: int = 0,
        nbytes: int | None = None,
        ranks: Collection[int] = (),
        refusal: Exception | None = None,
    ) -> Operation:
        """Post a receive from `rank`, or from any of `ranks`; into `nbytes` bytes, or whatever comes."""
        operation = Operation()
        operation.refusal = refusal
        target = None
        if nbytes is not None:
            operation.data = bytearray(nbytes)
            target = memoryview(operation.data)
        receive = operation.receive = Receive(pack_key(GROUP, tag, 0, 0, channel), target, operation, None)
        try:
            if rank is None:
                complete = self.mesh.post_receive_any(ranks, receive)
            else:
                complete = self.mesh.post_receive(rank, receive)
        except Exception as error:  # it was here already, and did not suit
            operation.message_failed(None, error)
        else:
            if complete:
                operation.message_received(None, receive)
        return operation


@asynccontextmanager
async def open_world(open_meshes: OpenMeshes, size: int) -> AsyncIterator[list[Rank]]:
    """`size` ranks; all leave at the end."""
    ranks = [Rank() for _ in range(size)]
    for rank, mesh in zip(ranks, await open_meshes(ranks), strict=True):
        rank.mesh = mesh
    try:
        yield ranks
    finally:
        await asyncio.gather(*(rank.mesh.close(CLOSE_TIMEOUT_S) for rank in ranks))


async def check_sizes(open_meshes: OpenMeshes) -> None:
    """Messages of every kind of size arrive, whether sent or received first, on both channels."""
    async with open_world(open_meshes, 2) as (one, two):
        for channel in (0, 1):
            for tag, nbytes in enumerate(SIZES):
                data = pattern(nbytes, tag)
                target = nbytes if channel else None
                sent = one.send(1, data, tag, channel)
                received = two.receive(0, tag, channel, target)
                assert await received.done() == data
                await sent.done()
                received = two.receive(0, tag + 100, channel, target)
                await asyncio.sleep(0)
                sent = one.send(1, data, tag + 100, channel)
                assert await received.done() == data
                assert received.source == 0
                await sent.done()


async def check_order(open_meshes: OpenMeshes) -> None:
    """Messages of one tag arrive in the order sent, small and large mixed."""
    async with open_world(open_meshes, 2) as (one, two):
        messages = [pattern(EAGER_BYTES + 5 if i % 7 == 3 else i, i) for i in range(100)]
        sends = [one.send(1, message) for message in messages]
        receives = [two.receive(0) for _ in messages]
        assert [await receive.done() for receive in receives] == messages
        for send in sends:
            await send.done()


async def check_tags_out_of_order(open_meshes: OpenMeshes) -> None:
    """Tags are received in any order."""
    async with open_world(open_meshes, 2) as (one, two):
        sizes = [3, EAGER_BYTES + 1, 0, 100_000, 17]
        sends = [one.send(1, pattern(size, tag), tag) for tag, size in enumerate(sizes)]
        for tag in reversed(range(len(sizes))):
            assert await two.receive(0, tag).done() == pattern(sizes[tag], tag)
        for send in sends:
            await send.done()


async def check_both_directions(open_meshes: OpenMeshes) -> None:
    """Large messages both ways at once, before either side receives."""
    async with open_world(open_meshes, 2) as (one, two):
        data = pattern(3 << 20)
        sends = [one.send(1, data), two.send(0, data)]
        receives = [one.receive(1), two.receive(0)]
        for receive in receives:
            assert await receive.done() == data
        for send in sends:
            await send.done()


async def check_self(open_meshes: OpenMeshes) -> None:
    """A rank's messages to itself obey the same rules."""
    async with open_world(open_meshes, 1) as (one,):
        for tag, nbytes in enumerate(SIZES):
            sent = one.send(0, pattern(nbytes), tag)
            assert await one.receive(0, tag).done() == pattern(nbytes)
            await sent.done()
        received = one.receive(None, 50, ranks=[0])
        one.send(0, b"me", 50)
        assert await received.done() == b"me"
        assert received.source == 0


async def check_any_source(open_meshes: OpenMeshes) -> None:
    """A receive from any source takes the first message, and does not take one meant for an earlier receive."""
    async with open_world(open_meshes, 3) as (one, two, three):
        received = one.receive(None, ranks=[1, 2])
        two.send(0, b"two")
        assert await received.done() == b"two"
        assert received.source == 1
        specific = one.receive(2, 5)
        anyone = one.receive(None, 5, ranks=[1, 2])
        three.send(0, b"first", 5)
        three.send(0, b"second", 5)
        assert await specific.done() == b"first"
        assert await anyone.done() == b"second"
        data = pattern(2 << 20)
        sends = [two.send(0, data, 6), three.send(0, data, 6)]
        sources = set()
        for _ in range(2):
            large = one.receive(None, 6, ranks=[1, 2])
            assert await large.done() == data
            sources.add(large.source)
        assert sources == {1, 2}
        for send in sends:
            await send.done()


async def check_refused(open_meshes: OpenMeshes) -> None:
    """A receive whose `allocate` raises fails with that error, and the pair goes on."""
    async with open_world(open_meshes, 2) as (one, two):
        for tag, nbytes in enumerate(SIZES):
            refusal = TypeError("no such array")
            refused = two.receive(0, tag, refusal=refusal)
            sent = one.send(1, pattern(nbytes), tag, meta=b"float32")
            assert await refused.failure() is refusal
            await sent.done()
            sent = one.send(1, pattern(nbytes), tag, meta=b"int8")
            accepted = two.receive(0, tag)
            assert await accepted.done() == pattern(nbytes)
            assert accepted.meta == b"int8"


async def check_mismatch(open_meshes: OpenMeshes) -> None:
    """A message of another length than its target's fails the receive with both lengths named; the pair goes on."""
    async with open_world(open_meshes, 2) as (one, two):
        slot = 0
        for sent_bytes in SIZES:
            for expected_bytes in SIZES:
                if sent_bytes == expected_bytes:
                    continue
                slot += 1
                received = two.receive(0, slot, 1, expected_bytes)
                sent = one.send(1, pattern(sent_bytes), slot, 1)
                error = await received.failure()
                assert isinstance(error, CollectiveMismatchError)
                assert str(sent_bytes) in str(error)
                assert str(expected_bytes) in str(error)
                assert "rank 0" in str(error)
                await sent.done()
        received = two.receive(0, 1000, 1, 1 << 20)
        one.send(1, pattern(1 << 20), 1000, 1)
        assert await received.done() == pattern(1 << 20)


async def check_withdraw(open_meshes: OpenMeshes) -> None:
    """A withdrawn receive takes no message; a matched one cannot be withdrawn."""
    async with open_world(open_meshes, 2) as (one, two):
        for tag, nbytes in enumerate(SIZES):
            gone = two.receive(0, tag)
            kept = two.receive(0, tag)
            assert gone.receive is not None
            assert two.mesh.withdraw(gone.receive)
            assert not two.mesh.withdraw(gone.receive)
            one.send(1, pattern(nbytes), tag)
            assert await kept.done() == pattern(nbytes)
            assert kept.receive is not None
            assert not two.mesh.withdraw(kept.receive)
        anyone = two.receive(None, 50, ranks=[0, 1])
        assert anyone.receive is not None
        assert two.mesh.withdraw(anyone.receive)
        one.send(1, b"kept", 50)
        assert await two.receive(0, 50).done() == b"kept"
        assert gone.calls == anyone.calls == 0


async def check_drop_group(open_meshes: OpenMeshes) -> None:
    """Dropping a group tells no sink, frees every array, stops streams, and lets other groups go on."""
    async with open_world(open_meshes, 2) as (one, two):
        two.receive(0, 99)
        one.send(1, b"connected", 99)
        operations = [
            one.send(1, pattern(8 << 20), 1),
            one.send(1, pattern(8 << 20), 2, 1),
            one.send(1, b"parked", 3),
            two.receive(0, 1),
            two.receive(0, 2, 1, 8 << 20),
            two.receive(0, 4),
            two.receive(None, 5, ranks=[0]),
        ]
        for _ in range(5):
            await asyncio.sleep(0)
        finished = [operation.calls for operation in operations]
        for rank in (two, one):
            rank.mesh.drop_group(GROUP_BYTES)
        images = [bytes(operation.data) for operation in operations]
        one.send(1, b"late", 4)
        barrier = two.send(0, b"x", 77)
        await one.receive(1, 77).done()
        await barrier.done()
        received = two.receive(0, 6)
        one.send(1, pattern(1 << 20), 6)
        assert await received.done() == pattern(1 << 20)
        assert [operation.calls for operation in operations] == finished
        assert [bytes(operation.data) for operation in operations] == images


async def check_control_overtakes(open_meshes: OpenMeshes) -> None:
    """A control message does not wait for the bulk posted before it."""
    async with open_world(open_meshes, 2) as (one, two):
        received = two.receive(0, 1, 1, 64 << 20)
        await asyncio.sleep(0.01)
        received.future.add_done_callback(lambda _: two.events.append("bulk"))
        sent = one.send(1, bytes(64 << 20), 1, 1)
        one.mesh.send_control(1, b"stop")
        one.mesh.send_control(1, bytes(MAX_CONTROL_BYTES))
        await received.done()
        await sent.done()
        assert two.events == ["control", "control", "bulk"]
        assert two.controls == [(0, b"stop"), (0, bytes(MAX_CONTROL_BYTES))]


async def check_greeting(open_meshes: OpenMeshes) -> None:
    """Both owners hear, once, of a connection; what they send then arrives, and before what was posted earlier."""
    async with open_world(open_meshes, 3) as (one, two, three):
        for rank in (one, two, three):
            rank.greetings.append(b"from %d" % rank.mesh.rank)
        received = two.receive(0, 1)
        received.future.add_done_callback(lambda _: two.events.append("message"))
        one.send(1, b"posted before", 1)
        await received.done()
        await eventually(lambda: one.controls)
        assert one.controls == [(1, b"from 1")]
        assert two.controls == [(0, b"from 0")]
        assert two.events == ["control", "message"]
        one.send(0, b"itself")
        assert await one.receive(0).done() == b"itself"
        assert one.connected == [1]
        assert two.connected == [0]
        assert not three.connected


async def check_peer_lost(open_meshes: OpenMeshes) -> None:
    """A peer that vanishes fails what is pending with it, tells the owner, and leaves others alone."""
    async with open_world(open_meshes, 3) as (one, two, three):
        three.send(0, b"hello")
        await one.receive(2).done()
        assert await _exchange(one, two)
        pending = [
            one.receive(2, 1),
            one.receive(2, 2, 1, 1 << 20),
            one.send(2, pattern(1 << 20), 3),
            one.receive(None, 4, ranks=[1, 2]),
        ]
        unaffected = one.receive(1, 5)
        three.send(0, b"already here", 6)
        three.mesh.send_control(0, b"after it")
        await eventually(lambda: one.controls)
        three.mesh.abort()
        for operation in pending:
            error = await operation.failure()
            assert isinstance(error, PeerLostError)
            assert error.rank == 2
        await eventually(lambda: one.lost)
        assert list(one.lost) == [2]
        assert not one.left
        for later in (one.receive(2, 1), one.send(2, b"late")):
            error = await later.failure()
            assert isinstance(error, PeerLostError)
            assert error.rank == 2
        assert await one.receive(2, 6).done() == b"already here"
        two.send(0, b"alive", 5)
        assert await unaffected.done() == b"alive"


async def check_clean_leave(open_meshes: OpenMeshes) -> None:
    """A rank that leaves is not lost, and what it sent before can still be received."""
    async with open_world(open_meshes, 2) as (one, two):
        assert await _exchange(one, two)
        pending = one.receive(1, 1)
        large = one.receive(1, 2)
        for tag in range(10, 20):
            two.send(0, pattern(tag), tag)
        sent = two.send(0, pattern(4 << 20), 2)
        await two.mesh.close(10.0)
        await sent.done()
        assert await large.done() == pattern(4 << 20)
        await eventually(lambda: one.left)
        assert one.left == [1]
        assert not one.lost
        assert isinstance(await pending.failure(), PeerLostError)
        for tag in range(10, 20):
            assert await one.receive(1, tag).done() == pattern(tag)


async def check_break_off(open_meshes: OpenMeshes) -> None:
    """Breaking a pair frees its arrays, the pair with oneself included, and leaves other pairs alone."""
    async with open_world(open_meshes, 3) as (one, two, three):
        assert await _exchange(one, two)
        assert await _exchange(one, three)
        for rank in (0, 1):
            pending = [one.send(rank, bytes(1 << 20), 1), one.receive(rank, 2)]
            one.mesh.break_pair(rank, TimeoutError("too late"))
            for operation in [*pending, one.send(rank, b"later")]:
                error = await operation.failure()
                assert isinstance(error, PeerLostError)
                assert error.rank == rank
                assert "too late" in str(error)
        await eventually(lambda: two.lost)
        assert list(one.lost) == [1]
        assert await _exchange(one, three)


async def check_nobody_left(open_meshes: OpenMeshes) -> None:
    """A receive from any source ends once all others have left, but not before what they sent was received."""
    async with open_world(open_meshes, 3) as (one, two, three):
        assert await _exchange(one, two)
        assert await _exchange(one, three)
        everyone = [0, 1, 2]
        for rank in (two, three):
            rank.send(0, b"before", 1)
        first = one.receive(None, 1, ranks=everyone)
        pending = one.receive(None, 2, ranks=everyone)
        assert await first.done() == b"before"
        await two.mesh.close(10.0)
        await eventually(lambda: one.left)
        assert not pending.future.done()
        await three.mesh.close(10.0)
        assert isinstance(await pending.failure(), PeerLostError)
        assert await one.receive(None, 1, ranks=everyone).done() == b"before"
        error = await one.receive(None, 1, ranks=everyone).failure()
        assert isinstance(error, PeerLostError)
        assert error.left
        assert error.rank == 1
        one.send(0, pattern(1 << 20), 3)
        assert await one.receive(None, 3, ranks=everyone).done() == pattern(1 << 20)
    async with open_world(open_meshes, 1) as (alone,):
        waiting = alone.receive(None, 1, ranks=[0])
        alone.send(0, b"me", 1)
        assert await waiting.done() == b"me"


async def check_thousands_in_flight(open_meshes: OpenMeshes) -> None:
    """Far more messages than credit and offers allow wait without blocking another tag, and arrive in order."""
    count = 4 * MAX_OFFERS
    async with open_world(open_meshes, 2) as (one, two):
        sends = [one.send(1, i.to_bytes(4, "little") * 300, 1) for i in range(count)]
        received = two.receive(0, 2)
        one.send(1, b"another tag", 2)
        assert await received.done() == b"another tag"
        receives = [two.receive(0, 1) for _ in range(count)]
        for i, receive in enumerate(receives):
            assert (await receive.done())[:4] == i.to_bytes(4, "little")
        for send in sends:
            await send.done()


async def _exchange(one: Rank, two: Rank) -> bool:
    """Send a small message each way."""
    receives = [one.receive(two.mesh.rank, 900), two.receive(one.mesh.rank, 900)]
    one.send(two.mesh.rank, b"ping", 900)
    two.send(one.mesh.rank, b"ping", 900)
    return [await receive.done() for receive in receives] == [b"ping", b"ping"]


MESH_CHECKS: Final[tuple[MeshCheck, ...]] = checks_of(__name__, "open_meshes")
"""Every check; each takes an `OpenMeshes`."""
