"""Two ranks that dial each other at once: exactly one connection survives, and no message is lost or repeated."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import time
from collections.abc import Iterator, Sequence

import pytest
from mesh_world import World, received, world
from punctual import Late, assert_within, punctual
from waiting import eventually

from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.connections import link
from asyncdist.transport.connections.handshake import Handshake
from asyncdist.transport.connections.link import LinkState
from asyncdist.transport.protocol.hello import DialerHello, ListenerHello

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])


def dialed_by(made: World) -> int:
    """Which of the ranks 0 and 1 made the connection: its label is the other's address."""
    zero, one = made.ranks[0].mesh.describe(1), made.ranks[1].mesh.describe(0)
    by_zero = str(made.addresses[1]) in zero and zero.endswith(str(made.addresses[1]))
    if made.config.transport == "unix":
        assert zero.rpartition(" ")[2] == one.rpartition(" ")[2]
    return 0 if by_zero else 1


@TRANSPORTS
async def test_when_dials_cross_the_lower_rank_wins(transport: str) -> None:
    for _ in range(15):
        async with world(2, transport) as made:
            one, two = made.ranks
            incoming = [one.receive(1), two.receive(0)]
            one.send(1, b"from 0")
            two.send(0, b"from 1")
            assert [await received(future) for future in incoming] == [b"from 1", b"from 0"]
            assert dialed_by(made) == 0
            await eventually(lambda made=made: all(r.mesh.statistics()["sockets"] == 2 for r in made.ranks))
            assert not one.lost
            assert not two.lost


async def test_all_ranks_dial_all_others_at_once() -> None:
    size = 8
    async with world(size) as made:
        incoming = {(a, b): made.ranks[a].receive(b) for a in range(size) for b in range(size) if a != b}
        for a, b in incoming:
            made.ranks[b].send(a, bytes([b, a]))
        for (a, b), future in incoming.items():
            assert await received(future) == bytes([b, a])
        await eventually(lambda: all(r.mesh.statistics()["sockets"] == size for r in made.ranks))


async def test_higher_rank_wins_when_the_lower_cannot_connect() -> None:
    async with world(2) as made:
        one, two = made.ranks
        right = made.addresses[1]
        made.addresses[1] = PeerAddress(right.host_id, (), b"\0asyncdist-nobody")
        incoming = [one.receive(1), two.receive(0)]
        one.send(1, b"from 0")
        two.send(0, b"from 1")
        assert [await received(future) for future in incoming] == [b"from 1", b"from 0"]
        assert dialed_by(made) == 1


@pytest.mark.parametrize("lower", ["takes too long", "fails"])
@punctual
async def test_higher_rank_wins_when_the_lower_dials_in_vain(lower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CROSSED_WAIT_S", 0.05 if lower == "takes too long" else 1000.0)
    async with world(2) as made:
        one, two = made.ranks
        with socket.socket(socket.AF_UNIX) as hole:
            hole.bind(b"")
            hole.listen()
            made.addresses[1] = dataclasses.replace(made.addresses[1], unix=hole.getsockname())
            incoming = [one.receive(1), two.receive(0)]
            one.send(1, b"from 0")
            dials = one.mesh._links[1]
            await eventually(lambda: dials.state is LinkState.OPEN or (dials._dialer and dials._dialer.in_flight))
            if dials.state is LinkState.OPEN:
                raise Late("the other's hello, parked for CROSSED_WAIT_S, was accepted before anybody looked")
            two.send(0, b"from 1")
            if lower == "fails":
                await eventually(lambda: one.mesh._links[1]._park)
                hole.accept()[0].close()
            started = time.monotonic()
            assert [await received(future) for future in incoming] == [b"from 1", b"from 0"]
            assert_within(made.config.hello_timeout_s, time.monotonic() - started)  # the first hello was accepted
            assert dialed_by(made) == 1


@pytest.mark.parametrize("the_peer", ["confirms", "gives up"])
async def test_a_look_up_that_fails_ends_no_link_whose_peer_was_answered(
    the_peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer may count on its connection already; if that comes to nothing, its address is looked up again."""
    async with world(2) as made:
        zero, one = made.ranks
        asked: list[Sequence[int]] = []
        failing, unread = asyncio.Event(), list[Handshake[DialerHello]]()
        readable = Handshake._readable

        async def resolve(ranks: Sequence[int]) -> dict[int, PeerAddress]:
            asked.append(ranks)
            if len(asked) > 1:
                return made.addresses
            await failing.wait()
            raise ConnectionError("the store is away")

        def unread_once(self: Handshake[DialerHello]) -> None:
            """Leave the answer of rank 0 unread for now."""
            if isinstance(self.hello, DialerHello) and to_one.answering and not unread:
                unread.append(self)
            if self not in unread:
                readable(self)

        zero.mesh._resolve = resolve
        monkeypatch.setattr(Handshake, "_readable", unread_once)
        incoming = [zero.receive(1), one.receive(0)]
        zero.send(1, b"from 0")
        to_one = zero.mesh._links[1]
        await eventually(lambda: asked)
        one.send(0, b"from 1")
        await eventually(lambda: unread)
        failing.set()
        await eventually(lambda: not [task for task in zero.mesh._tasks if "resolve" in task.get_name()])
        assert to_one.state is LinkState.CONNECTING
        (handshake,) = unread
        if the_peer == "gives up":
            handshake._fail(ConnectionResetError("injected"))
            await eventually(lambda: len(asked) == 2)
        unread[:] = [None]  # type: ignore[list-item] # all are read from now on
        assert [await received(future) for future in incoming] == [b"from 1", b"from 0"]


@contextlib.contextmanager
def hellos_that_break(chance: float, seed: int) -> Iterator[None]:
    """Connections that die during their hello, but before the dialer may believe that it is open."""
    generator = random.Random(seed)
    readable = Handshake._readable

    def breaking(self: Handshake[ListenerHello]) -> None:
        confirming = isinstance(self.hello, ListenerHello) and self.hello._answered is not None
        if self._sock is not None and not confirming and generator.random() < chance:
            self._fail(ConnectionResetError("injected"))
        else:
            readable(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handshake, "_readable", breaking)
        yield


@pytest.mark.parametrize("seed", range(12))
async def test_crossed_dials_that_break_lose_and_repeat_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CROSSED_WAIT_S", 0.05)
    async with world(3, "unix" if seed % 2 else "tcp", backoff_first_s=0.002, backoff_limit_s=0.01) as made:
        pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
        with hellos_that_break(0.25, seed):
            incoming = {(a, b, n): made.ranks[a].receive(b, tag=n) for a, b in pairs for n in range(3)}
            for a, b, n in incoming:
                made.ranks[b].send(a, bytes([b, a, n]), tag=n)
            extra = {(a, b): made.ranks[a].receive(b, tag=0) for a, b in pairs}
            for (a, b, n), future in incoming.items():
                assert await received(future) == bytes([b, a, n])
        assert not any(future.done() for future in extra.values()), "a message came twice"
        assert not any(r.lost for r in made.ranks)
        await eventually(lambda: all(r.mesh.statistics()["sockets"] == 3 for r in made.ranks))
