"""Several connections of one pair: stripes in any order, paths that are lost at any time, and hostile bytes."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_pair import Pair as CorePair
from transport_pair import Recorder, collective, p2p, receive, send
from waiting import eventually

from asyncdist.errors import ClosedError, RemoteProtocolError
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.connections import striped
from asyncdist.transport.connections.striped import (
    ACKNOWLEDGE_BYTES,
    HEADER,
    MAX_STRIPE_BYTES,
    WINDOW_BYTES,
    Path,
    StripedConnection,
)
from asyncdist.transport.fork import SocketSet


class Watch:
    """Stands in for a KeepaliveWatch: the test says which path is silent."""

    def __init__(self) -> None:
        self.watched: dict[object, Callable[[Exception], None]] = {}

    def add(self, connection: object, _sock: socket.socket, on_silent: Callable[[Exception], None]) -> None:
        self.watched[connection] = on_silent

    def remove(self, connection: object) -> None:
        self.watched.pop(connection, None)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for sock in (one, other):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)  # what is lost with a path, at most
    return one, other


class End:
    """One side of a pair."""

    def __init__(self, core: Any, sock: socket.socket, streams: int = 3) -> None:
        self.core = core
        self.sockets = SocketSet(lambda: None)
        self.ended: list[Exception | None] = []
        self.lost: list[int] = []
        self.watch = Watch()
        context: Any = SimpleNamespace(
            loop=asyncio.get_running_loop(),
            sockets=self.sockets,
            config=TransportConfig("tcp", streams=streams),
            keepalive=Watch(),
            path_watch=self.watch,
        )
        self.connection = StripedConnection(
            context,
            self.sockets.add(sock),
            core,
            "test",
            lambda _connection, error: self.ended.append(error),
            0,
            self.lost.append,
        )
        self.connection.start()

    def add(self, number: int, sock: socket.socket) -> None:
        self.connection.add(number, self.sockets.add(sock))

    def path(self, number: int) -> Path:
        return next(path for path in self.connection._paths if path.number == number)

    def silent(self, number: int) -> None:
        path = self.path(number)
        path.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes((1, 0, 0, 0, 0, 0, 0, 0)))
        self.watch.watched[path](TimeoutError("silent"))


class Pair:
    """Two cores over `streams` paths."""

    def __init__(self, streams: int = 3) -> None:
        self.cores = CorePair()
        one, other = tcp_pair()
        self.ends = End(self.cores.a, one, streams), End(self.cores.b, other, streams)
        self.held: list[socket.socket] = []
        for number in range(1, streams):
            self.connect(number)

    def connect(self, number: int) -> None:
        for end, sock in zip(self.ends, tcp_pair(), strict=True):
            end.add(number, sock)

    def cut(self, number: int) -> None:
        """From now on nothing is heard over this path, and neither kernel tells."""
        for end in self.ends:
            path = end.path(number)
            self.held.append(path.sock.dup())
            asyncio.get_running_loop().remove_reader(path.fd)

    def close(self) -> None:
        for sock in self.held:
            sock.close()
        for end in self.ends:
            end.connection.abort()
            assert len(end.sockets) == 0
            assert not end.watch.watched


@pytest.fixture
async def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def exchange(pair: Pair, rng: random.Random, numbers: Iterable[int]) -> list[tuple[Recorder, int, bytes]]:
    """Post messages in both directions; returns what is to come."""
    expected, sender = [], Recorder()
    for number in numbers:
        data = rng.randbytes(rng.choice((0, 5, 3000, 70_000, 300_000, 1 << 20)))
        there, back = rng.sample((pair.cores.a, pair.cores.b), 2)
        key = p2p(number % 3) if rng.random() < 0.5 else collective(number)
        receiver = Recorder()
        if rng.random() < 0.5:
            receive(back, receiver, key, len(data), number)
            send(there, sender, key, data, number)
        else:
            send(there, sender, key, data, number)
            receive(back, receiver, key, len(data), number)
        expected.append((receiver, number, data))
    return expected


async def all_come(expected: list[tuple[Recorder, int, bytes]]) -> None:
    for receiver, number, data in expected:
        await eventually(lambda receiver=receiver, number=number: number in receiver.received)
        assert bytes(receiver.arrays[number]) == data


@pytest.mark.parametrize("seed", range(4))
async def test_what_paths_lose_at_any_time_comes_all_the_same(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    expected: list[tuple[Recorder, int, bytes]] = []
    for first in range(0, 96, 12):
        expected += exchange(pair, rng, range(first, first + 12))
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
        numbers = [path.number for path in pair.ends[0].connection._paths]
        number = rng.choice(numbers)
        if rng.random() < 0.5:
            pair.ends[rng.randrange(2)].silent(number)  # the other side is told by its kernel
        else:
            pair.cut(number)
            for end in pair.ends:
                end.silent(number)
                for _ in range(rng.randrange(5)):
                    await asyncio.sleep(0)
        assert all(not end.ended for end in pair.ends)
        await eventually(lambda: all(len(end.connection._paths) < 3 for end in pair.ends))
        pair.connect(number)
    await all_come(expected)
    assert all(number in end.lost for end in pair.ends)


async def test_paths_share_what_is_sent(pair: Pair) -> None:
    sink = Recorder()
    receive(pair.cores.b, sink, collective(0), 24 << 20, 0)
    await asyncio.sleep(0.01)
    before = {path.number: path for path in pair.ends[0].connection._paths}
    sent: dict[int, int] = dict.fromkeys(before, 0)
    send_on = pair.ends[0].connection._send

    def counting(path: Path, data: bytes) -> None:
        sent[path.number] += len(data)
        send_on(path, data)

    pair.ends[0].connection._send = counting  # type: ignore[method-assign]
    send(pair.cores.a, Recorder(), collective(0), bytes(24 << 20), 0)
    await eventually(lambda: 0 in sink.received)
    assert all(4 << 20 < nbytes < 12 << 20 for nbytes in sent.values()), sent


async def test_with_the_last_path_the_peer_is_lost(pair: Pair) -> None:
    for number in range(3):
        pair.ends[1].path(number).sock.shutdown(socket.SHUT_WR)
    await eventually(lambda: pair.ends[0].ended)
    assert "without a goodbye" in str(pair.ends[0].ended[0])
    assert len(pair.ends[0].lost) == 2
    with pytest.raises(ClosedError):
        pair.ends[0].connection._write([b"x"])


async def test_the_last_path_is_not_given_up_for_its_silence(pair: Pair) -> None:
    end = pair.ends[0]
    for number in range(3):
        end.silent(number)
    assert end.lost == [0, 1]
    assert not end.ended
    assert list(end.watch.watched) == [end.path(2)]


async def test_a_goodbye_that_was_lost_is_said_again(pair: Pair) -> None:
    for number in (1, 2):
        pair.ends[0].silent(number)
    await eventually(lambda: len(pair.ends[1].connection._paths) == 1)
    pair.cut(0)
    sink = Recorder()
    receive(pair.cores.b, sink, p2p(0), 3, 0)
    send(pair.cores.a, Recorder(), p2p(0), b"end", 0)
    pair.ends[0].connection.leave()
    pair.connect(1)
    pair.ends[0].silent(0)
    await eventually(lambda: pair.ends[1].ended and pair.ends[0].ended)
    assert pair.ends[0].ended == pair.ends[1].ended == [None]
    assert bytes(sink.arrays[0]) == b"end"


async def test_both_leave_at_once(pair: Pair) -> None:
    for end in pair.ends:
        end.connection.leave()
    await eventually(lambda: pair.ends[1].ended and pair.ends[0].ended)
    assert pair.ends[0].ended == pair.ends[1].ended == [None]


async def test_a_path_that_comes_anew_takes_the_place_of_the_old_one(pair: Pair) -> None:
    pair.cut(1)
    expected = exchange(pair, random.Random(0), range(30))
    one, other = tcp_pair()
    pair.ends[1].add(1, other)
    assert sorted(path.number for path in pair.ends[1].connection._paths) == [0, 1, 2]
    pair.ends[0].silent(1)
    pair.ends[0].add(1, one)
    await all_come(expected)


class Stranger:
    """An end whose peer is the test, over one path of two."""

    def __init__(self, streams: int = 2) -> None:
        self.cores = CorePair()
        self.sock, sock = tcp_pair()
        self.end = End(self.cores.a, sock, streams)

    async def told(self, *stripes: bytes) -> Exception | None:
        """Send all, and return how the connection ended, if it did."""
        for stripe in stripes:
            await asyncio.get_running_loop().sock_sendall(self.sock, stripe)
        self.sock.shutdown(socket.SHUT_WR)
        await eventually(lambda: self.end.ended)
        return self.end.ended[0]

    def close(self) -> None:
        self.end.connection.abort()
        self.sock.close()


@pytest.fixture
async def stranger() -> Iterator[Stranger]:
    made = Stranger()
    yield made
    made.close()


def stripe(offset: int, length: int, acknowledged: int = 0) -> bytes:
    return HEADER.pack(offset, acknowledged, length)


LIMIT = 2 * WINDOW_BYTES + MAX_STRIPE_BYTES


@pytest.mark.parametrize(
    ("header", "refused"),
    [
        (stripe(1, MAX_STRIPE_BYTES), False),
        (stripe(1, MAX_STRIPE_BYTES + 1), True),
        (stripe(LIMIT - 5, 5), False),
        (stripe(LIMIT - 5, 6), True),
        (stripe(0, 0, acknowledged=1), True),
        (stripe(2**64 - 1, 1), True),
    ],
)
async def test_a_header_is_refused_one_past_each_limit(stranger: Stranger, header: bytes, refused: bool) -> None:
    assert isinstance(await stranger.told(header), RemoteProtocolError if refused else ConnectionResetError)


async def test_memory_for_stripes_before_their_turn_is_bounded(stranger: Stranger) -> None:
    """Stripes that overlap are never made by an honest peer; they fill no more than honest ones could."""
    stranger.end.connection._window = 20 - MAX_STRIPE_BYTES
    stripes = [stripe(offset, 4) + b"1234" for offset in range(1, 7)]
    await asyncio.get_running_loop().sock_sendall(stranger.sock, b"".join(stripes[:5]))
    await eventually(lambda: stranger.end.connection._early_bytes == 20)
    assert isinstance(await stranger.told(stripes[5]), RemoteProtocolError)


@given(data=st.binary(max_size=200), split=st.integers(0, 200))
async def test_any_bytes_are_taken_or_refused(data: bytes, split: int) -> None:
    stranger = Stranger()
    try:
        error = await stranger.told(data[:split], data[split:])
        assert isinstance(error, RemoteProtocolError | ConnectionResetError)
    finally:
        stranger.close()


async def read_all(sock: socket.socket) -> bytes:
    found = b""
    while True:
        try:
            found += sock.recv(1 << 20)
        except BlockingIOError:
            return found


async def test_without_acknowledgement_no_more_than_a_window_is_sent(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = stranger.end.connection
    connection._window = 1000
    assert connection._write([bytes(999)]) == 999
    assert connection._write([bytes(10), bytes(10)]) == 20
    assert connection._write([b"x"]) == 0
    flushed = []
    monkeypatch.setattr(connection, "_core", SimpleNamespace(flush=lambda: flushed.append(1), goodbye_sent=False))
    connection._arm()
    await asyncio.sleep(0.01)
    assert not flushed
    await asyncio.get_running_loop().sock_sendall(stranger.sock, stripe(0, 0, acknowledged=999))
    await eventually(lambda: flushed)
    assert [held.end for held in connection._stripes] == [1019]


@pytest.mark.parametrize(("nbytes", "told"), [(ACKNOWLEDGE_BYTES - 1, False), (ACKNOWLEDGE_BYTES, True)])
async def test_what_is_handled_is_acknowledged_in_portions(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch, nbytes: int, told: bool
) -> None:
    connection = stranger.end.connection
    memory = memoryview(bytearray(1 << 20))
    monkeypatch.setattr(connection, "_get_buffer", lambda: memory)
    monkeypatch.setattr(connection, "_updated", lambda _: 0)
    await asyncio.get_running_loop().sock_sendall(stranger.sock, stripe(0, nbytes) + bytes(nbytes))
    await eventually(lambda: connection._handled == nbytes)
    await asyncio.sleep(0.01)
    found = await read_all(stranger.sock)
    # The front of it may have been acknowledged before the end came.
    assert (stripe(0, 0, acknowledged=nbytes) in found) is told
    assert len(found) == (HEADER.size if told else 0)


def test_a_window_has_room_for_some_of_the_largest_stripes() -> None:
    assert striped.MAX_STRIPE_BYTES <= WINDOW_BYTES
    assert ACKNOWLEDGE_BYTES * 4 <= WINDOW_BYTES


async def test_an_acknowledgement_that_may_be_lost_with_its_path_is_given_again(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, loop = stranger.end.connection, asyncio.get_running_loop()
    memory = memoryview(bytearray(1 << 20))
    monkeypatch.setattr(connection, "_get_buffer", lambda: memory)
    monkeypatch.setattr(connection, "_updated", lambda _: 0)
    await loop.sock_sendall(stranger.sock, stripe(0, ACKNOWLEDGE_BYTES) + bytes(ACKNOWLEDGE_BYTES))
    told = stripe(0, 0, acknowledged=ACKNOWLEDGE_BYTES)
    async with asyncio.timeout(10):
        assert await loop.sock_recv(stranger.sock, 100) == told
        other, sock = tcp_pair()
        stranger.end.add(1, sock)
        stranger.end.silent(0)
        assert await loop.sock_recv(other, 100) == told
    other.close()
