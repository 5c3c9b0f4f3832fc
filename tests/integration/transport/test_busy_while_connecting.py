"""A rank whose loop is busy while a connection is made: late words are no loss, on either side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from mesh_world import received, world
from punctual import Late, punctual
from waiting import eventually

from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.config import LATE_S
from asyncdist.transport.connections.dialer import Dialer
from asyncdist.transport.connections.handshake import Handshake
from asyncdist.transport.connections.link import CONFIRM_TIMEOUT_FACTOR, Link
from asyncdist.transport.protocol.hello import ACK_BYTES, DialerHello

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
HELLO_TIMEOUT_S = 0.03
BUSY_S = 3 * CONFIRM_TIMEOUT_FACTOR * HELLO_TIMEOUT_S


@TRANSPORTS
async def test_a_dialer_that_reads_the_answer_when_it_was_taken_back_dials_again(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readable = Handshake._readable
    late: list[object] = []

    def busy(self: Handshake[DialerHello]) -> None:
        if late or not isinstance(self.hello, DialerHello) or self.hello.wanted != ACK_BYTES:
            readable(self)
            return
        loop, sock = asyncio.get_running_loop(), self._sock
        assert sock is not None
        late.append(self)
        self.set_deadline(1000)
        loop.remove_reader(sock.fileno())
        loop.call_later(BUSY_S, loop.add_reader, sock.fileno(), self._readable)

    monkeypatch.setattr(Handshake, "_readable", busy)
    async with world(2, transport, hello_timeout_s=HELLO_TIMEOUT_S, backoff_first_s=0.01) as made:
        one, two = made.ranks
        one.send(1, b"x" * 100_000)
        assert await received(two.receive(None, ranks=[0])) == b"x" * 100_000
        assert late
        assert not one.lost
        assert not two.lost


@TRANSPORTS
async def test_a_listener_that_was_busy_beyond_the_deadline_finds_the_confirmation(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed = Link.dial_agreed
    busy: list[object] = []

    def confirm(self: Link, handshake: Handshake[DialerHello]) -> None:
        agreed(self, handshake)
        if not busy:
            busy.append(self)
            time.sleep(BUSY_S)

    monkeypatch.setattr(Link, "dial_agreed", confirm)
    async with world(2, transport, hello_timeout_s=HELLO_TIMEOUT_S, backoff_first_s=0.01) as made:
        one, two = made.ranks
        one.send(1, b"x" * 100)
        assert await received(two.receive(None, ranks=[0])) == b"x" * 100
        assert busy
        assert not one.lost
        assert not two.lost


@TRANSPORTS
@punctual
async def test_a_listener_that_was_busy_beyond_the_deadline_finds_the_hello(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = DialerHello.feed
    busy: list[object] = []

    def say_hello(self: DialerHello, data: bytes) -> bytes:
        answer = feed(self, data)
        if answer and not busy:
            busy.append(self)
            asyncio.get_running_loop().call_soon(time.sleep, BUSY_S)
        return answer

    monkeypatch.setattr(DialerHello, "feed", say_hello)
    async with world(2, transport, hello_timeout_s=HELLO_TIMEOUT_S, backoff_first_s=0.01) as made:
        one, two = made.ranks
        one.send(1, b"x" * 100)
        assert await received(two.receive(None, ranks=[0])) == b"x" * 100
        assert busy
        await eventually(lambda: one.mesh.is_reached(1))
        if two.mesh.statistics()["refused_connections"]:
            raise Late("the hello was not there when the listener looked")


@TRANSPORTS
@pytest.mark.parametrize("busy", ["while it looks up", "while it connects"])
@punctual
async def test_a_dialer_that_was_busy_beyond_the_connect_timeout_goes_on(
    transport: str, busy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(2, transport, connect_timeout_s=HELLO_TIMEOUT_S, backoff_first_s=0.01) as made:
        one, two = made.ranks
        was_busy: list[bool] = []

        def work() -> None:
            if not was_busy:
                was_busy.append(True)
                time.sleep(BUSY_S + 2 * LATE_S)

        if busy == "while it looks up":
            resolve = one.mesh._resolve

            async def distant(ranks: Sequence[int]) -> dict[int, PeerAddress]:
                asyncio.get_running_loop().call_soon(work)
                await asyncio.sleep(HELLO_TIMEOUT_S / 2)
                return await resolve(ranks)

            one.mesh._resolve = distant
        else:
            start = Dialer.start

            def begin(self: Dialer, *, paused: bool = False) -> None:
                start(self, paused=paused)
                work()

            monkeypatch.setattr(Dialer, "start", begin)
        one.send(1, b"x" * 100)
        receiving = two.receive(None, ranks=[0])
        await eventually(lambda: receiving.done() or one.lost)
        if one.lost:
            raise Late("the second try, too, took longer than the connect timeout")
        assert await received(receiving) == b"x" * 100
        assert was_busy
        assert not one.lost
        assert not two.lost
