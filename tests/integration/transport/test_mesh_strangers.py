"""Who connects without belonging to the world: refused, bounded, and no trouble to the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import pytest
from mesh_world import Rank, World, received, world
from waiting import eventually

from asyncdist.errors import PeerLostError, RemoteProtocolError

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])


async def strangers_are_refused(made: World, stranger: Rank) -> None:
    """`stranger` cannot reach rank 1 of `made`, and rank 1 does not suffer from it."""
    listener = made.ranks[1].mesh
    before = listener.statistics()["refused_connections"]
    with pytest.raises(PeerLostError) as caught:
        await stranger.send(1, b"x")
    assert isinstance(caught.value.__cause__, RemoteProtocolError)
    await eventually(lambda: listener.statistics()["refused_connections"] == before + 1)
    assert not made.ranks[1].lost
    made.ranks[0].send(1, b"fine")
    assert await received(made.ranks[1].receive(0)) == b"fine"


@pytest.mark.parametrize(
    "identity", [{"world_id": b"another world..."}, {"secret": b"guessed"}], ids=["world", "token"]
)
@TRANSPORTS
async def test_stranger(transport: str, identity: dict[str, bytes]) -> None:
    async with world(2, transport) as made:
        stranger = World(2, transport)
        stranger.addresses = made.addresses
        intruder = stranger.add(0, **identity)
        await strangers_are_refused(made, intruder)
        await intruder.mesh.close(1)


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(300), b"\x8fADPEER\n\xff\xff\0\0" + bytes(88), b"x"],
    ids=["http", "zeros", "other version", "one byte"],
)
async def test_garbage_to_the_listener(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncdist")
    async with world(2, "tcp", hello_timeout_s=0.2) as made:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, made.addresses[1].endpoints[0])
            await loop.sock_sendall(sock, data)
            received_bytes = 0
            with contextlib.suppress(ConnectionResetError):
                while chunk := await loop.sock_recv(sock, 4096):
                    received_bytes += len(chunk)
            assert received_bytes <= 1024
        await eventually(lambda: made.ranks[1].mesh.statistics()["refused_connections"] == 1)
        assert "rank 1: refused a connection from tcp 127.0.0.1:" in caplog.text
        made.ranks[0].send(1, b"fine")
        assert await received(made.ranks[1].receive(0)) == b"fine"


async def test_a_dial_that_hangs_up_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncdist")
    async with world(2, "tcp") as made:
        with socket.create_connection(made.addresses[1].endpoints[0]):
            pass
        await eventually(lambda: made.ranks[1].mesh.statistics()["refused_connections"] == 1)
    assert "refused" not in caplog.text  # crossed dials end like that, and would read like an error


async def test_half_open_connections_are_bounded_and_expire() -> None:
    limit = 5
    async with world(2, "tcp", hello_timeout_s=0.3, max_half_open=limit) as made:
        listener = made.ranks[1].mesh
        silent = [socket.create_connection(made.addresses[1].endpoints[0]) for _ in range(limit + 1)]
        await eventually(lambda: len(listener._listener._half_open) == limit)
        await eventually(lambda: listener._listener._paused)
        made.ranks[0].send(1, b"patience")
        assert len(listener._listener._half_open) <= limit
        assert await received(made.ranks[1].receive(0)) == b"patience"
        await eventually(lambda: listener.statistics()["refused_connections"] == limit + 1)
        for sock in silent:
            sock.close()


async def test_accept_goes_on_after_descriptors_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted:
        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock
            self.failures = 0

        def accept(self) -> tuple[socket.socket, object]:
            self.failures += 1
            if self.failures <= 2:
                raise OSError(24, "Too many open files")
            return self.sock.accept()

        def getsockname(self) -> object:
            return self.sock.getsockname()

    async with world(2, "tcp") as made:
        listener = made.ranks[1].mesh._listener
        (sock,) = listener._sockets
        loop = asyncio.get_running_loop()
        exhausted = Exhausted(sock)
        original = listener._acceptable
        loop.remove_reader(sock.fileno())
        loop.add_reader(sock.fileno(), lambda: original(exhausted))  # type: ignore[arg-type]
        made.ranks[0].send(1, b"x")
        assert await received(made.ranks[1].receive(0)) == b"x"
        assert exhausted.failures >= 1


async def test_hostile_frames_cost_only_their_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with world(3) as made:
        one, two, three = made.ranks
        for peer in (two, three):
            peer.send(0, b"hello")
            assert await received(one.receive(peer.rank)) == b"hello"
        two.mesh._links[0]._connection._write([b"\xff" * 4096])  # type: ignore[union-attr]
        await eventually(lambda: 1 in one.lost)
        assert isinstance(one.lost[1].__cause__, RemoteProtocolError)
        three.send(0, b"still here")
        assert await received(one.receive(2)) == b"still here"
