"""Dials that fail or take long: who is waited for, for how long, and what the error says."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import Sequence

import pytest
from jobs import free_port
from mesh_world import Rank, World, received, world
from punctual import assert_within, punctual
from waiting import PATIENCE_S, eventually

from asyncdist.errors import ConnectTimeoutError, DistStoreError, PeerLostError
from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.connections import dialer
from asyncdist.transport.listening import listen_tcp

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])


@punctual
async def test_peer_that_is_gone_from_this_host_is_lost_at_once() -> None:
    async with world(2) as made:
        one, two = made.ranks
        await two.mesh.close(1)
        started = time.monotonic()
        pending = [one.send(1, b"x"), one.receive(1)]
        for future in pending:
            with pytest.raises(PeerLostError, match="lost rank 1") as caught:
                await future
            assert isinstance(caught.value.__cause__, ConnectionRefusedError)
        assert_within(5, time.monotonic() - started)
        assert list(one.lost) == [1]
        with pytest.raises(PeerLostError):
            one.send(1, b"x")


@TRANSPORTS
async def test_a_rank_that_is_forgotten_may_be_another_one(transport: str) -> None:
    """It is lost, and then a mesh of that number comes."""
    async with world(2, transport) as made:
        one, two = made.ranks
        sent = one.send(1, b"to the first")
        assert await received(two.receive(0)) == b"to the first"
        await sent
        one.mesh.forget(1)  # it is connected
        assert one.mesh.is_connected(1)
        two.mesh.abort()
        await eventually(lambda: 1 in one.lost)
        with pytest.raises(PeerLostError):
            one.send(1, b"x")
        one.mesh.forget(1)
        one.mesh.forget(1)
        assert not one.mesh.is_gone(1)
        del one.lost[1]
        third = made.add(1)
        made.addresses[1] = await third.mesh.listen()
        sent = one.send(1, b"to the second")
        assert await received(third.receive(0)) == b"to the second"
        await sent


async def test_refused_dial_to_another_host_is_retried_until_the_time_out() -> None:
    async with world(2, "tcp", connect_timeout_s=0.4) as made:
        one = made.ranks[0]
        made.addresses[1] = PeerAddress("elsewhere", (("127.0.0.1", 1),))
        object.__setattr__(made.addresses[1], "host_id", "elsewhere")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PeerAddress, "loopback", property(lambda self: False))
            with pytest.raises(PeerLostError, match="no connection to rank 1 at tcp 127") as caught:
                await one.send(1, b"x")
        cause = caught.value.__cause__
        assert isinstance(cause, ConnectTimeoutError)
        assert isinstance(cause.__cause__, ConnectionRefusedError)


async def test_listener_that_appears_late_is_found() -> None:
    port = free_port()
    made = World(2, "tcp", connect_timeout_s=PATIENCE_S)
    one, two = made.add(0), made.add(1)
    made.addresses[1] = PeerAddress("elsewhere", (("127.0.0.1", port),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerAddress, "loopback", property(lambda self: False))
        one.send(1, b"late")
        await eventually(lambda: made.resolved)
        await eventually(lambda: one.mesh._links[1]._dialer and one.mesh._links[1]._dialer.failures > 1)
        two.mesh._listener._sockets.append(two.mesh._context.sockets.add(listen_tcp("127.0.0.1", [port])))
        two.mesh.accept()
        assert await received(two.receive(None, ranks=[0])) == b"late"
    await asyncio.gather(one.mesh.close(5), two.mesh.close(5))


@pytest.mark.parametrize("silent", ["no greeting", "no answer to SYN"])
async def test_blackholed_dial_times_out(silent: str) -> None:
    made = World(2, "tcp", connect_timeout_s=0.5, silent_timeout_s=0.2, hello_timeout_s=0.1)
    one = made.add(0)
    with contextlib.ExitStack() as stack:
        hole = stack.enter_context(socket.socket())
        hole.bind(("127.0.0.1", 0))
        hole.listen(100 if silent == "no greeting" else 0)
        if silent != "no greeting":
            for _ in range(4):  # a full backlog drops what comes
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(hole.getsockname())
        made.addresses[1] = PeerAddress(one.mesh._context.host_id, (hole.getsockname(),))
        with pytest.raises(PeerLostError, match=r"within 0\.5 s") as caught:
            await one.send(1, b"x")
        assert isinstance(caught.value.__cause__, ConnectTimeoutError)
    assert one.mesh.statistics()["sockets"] == 0
    await one.mesh.close(1)


@TRANSPORTS
@pytest.mark.parametrize("end", ["it answers", "it dies"])
async def test_peer_whose_loop_is_busy_is_waited_for_beyond_the_connect_timeout(
    transport: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(2, transport, connect_timeout_s=0.2, hello_timeout_s=0.05) as made:
        one, two = made.ranks
        if end == "it dies" and transport == "tcp":  # on another host, where a refusal is not the end
            made.addresses[1] = dataclasses.replace(made.addresses[1], host_id="elsewhere")
            monkeypatch.setattr(PeerAddress, "loopback", property(lambda self: False))
        loop = asyncio.get_running_loop()
        (listening,) = two.mesh._listener._sockets
        loop.remove_reader(listening.fileno())
        future = one.send(1, b"patience")
        await eventually(lambda: one.mesh._links[1]._dialer and one.mesh._links[1]._dialer._expired)
        assert not one.lost
        if end == "it answers":
            loop.add_reader(listening.fileno(), two.mesh._listener._acceptable, listening)
            assert await received(two.receive(0)) == b"patience"
        else:
            two.mesh.abort()
            with pytest.raises(PeerLostError):
                await future


@pytest.mark.parametrize("failure", ["raises", "knows nobody", "never returns"])
async def test_failed_look_up(failure: str) -> None:
    async def resolve(ranks: Sequence[int]) -> dict[int, PeerAddress]:
        if failure == "raises":
            raise OSError("the store is gone")
        if failure == "never returns":
            await asyncio.Event().wait()
        return {}

    one = Rank(0, 3, resolve, TransportConfig(connect_timeout_s=0.2))
    for _ in range(2):  # it is looked up again each time: a rank that is not found is not lost
        for rank, future in enumerate([one.send(1, b"x"), one.receive(2)], 1):
            with pytest.raises(DistStoreError, match=f"rank 0 does not know where rank {rank} listens") as caught:
                await future
            assert isinstance(caught.value.__cause__, OSError | LookupError)
            if failure == "never returns":
                assert "the store does not say: no answer within 0.2 s" in str(caught.value)
    assert not one.lost
    await one.mesh.close(1)


async def test_a_rank_that_was_not_found_at_first_may_dial_or_be_found_later() -> None:
    made = World(3, "unix")
    for rank in range(3):
        made.add(rank)
    one, two, three = made.ranks
    with pytest.raises(DistStoreError):
        await one.send(1, b"where?")
    with pytest.raises(DistStoreError):
        await one.send(2, b"where?")
    await made.listen()
    one.send(1, b"found")
    three.send(0, b"dialed")
    assert await received(two.receive(0)) == b"found"
    assert await received(one.receive(2)) == b"dialed"
    await asyncio.gather(*(rank.mesh.close(1) for rank in made.ranks))


async def test_socket_connected_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class SelfConnecting(socket.socket):
        def connect_ex(self, address: tuple[str, int]) -> int:  # type: ignore[override]
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(address)
            return super().connect_ex(address)

    made = World(2, "tcp")
    one = made.add(0)
    made.addresses[1] = PeerAddress(one.mesh._context.host_id, (("127.0.0.1", free_port()),))
    monkeypatch.setattr(dialer.socket, "socket", SelfConnecting)
    future = one.send(1, b"x")
    with pytest.raises(PeerLostError, match="connected to itself"):
        await future
    await one.mesh.close(1)
