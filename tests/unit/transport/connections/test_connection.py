"""The shell around a core: how much it reads and writes in one callback, and what it makes of errors."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from transport_pair import Pair as CorePair
from transport_pair import Recorder, p2p, receive, send
from waiting import eventually

from asyncdist.errors import ClosedError, RemoteProtocolError
from asyncdist.transport.connections import connection
from asyncdist.transport.connections.connection import MAX_CALL_FRAMES, StreamConnection
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.protocol.frame import MAX_CALL_BYTES
from asyncdist.transport.protocol.operations import Receive
from asyncdist.transport.protocol.peer import PeerCore

BUFFER_BYTES = 65_536


class FakeCore:
    """Lends one buffer, counts what comes, and writes what `outgoing` holds."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        self.reads: list[int] = []
        self.frames_a_read = 1
        self.raises: Exception | None = None
        self.outgoing = b""
        self.left = False
        self.leaving = False
        self.goodbye_sent = False
        self.expects = True
        self.reader = self

    def open(self, writer: object, arm: object) -> None:
        self.writer = writer
        self.arm = arm

    def get_buffer(self) -> memoryview:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> int:
        self.reads.append(nbytes)
        if self.raises is not None:
            raise self.raises
        return self.frames_a_read

    def flush(self) -> bool:
        while self.outgoing:
            sent = self.writer([self.outgoing[:BUFFER_BYTES]])  # type: ignore[operator]
            self.outgoing = self.outgoing[sent:]
            if not sent:
                self.arm()  # type: ignore[operator]
                return False
        self.goodbye_sent = self.leaving
        return True

    def goodbye(self) -> None:
        self.leaving = True
        self.goodbye_sent = not self.outgoing


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


class Pair:
    """A connection with a core, by default a fake one, the raw socket at its other end, and how it ended."""

    def __init__(
        self,
        core: PeerCore | None = None,
        make: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair,
    ) -> None:
        self.other, sock = make()
        self.other.setblocking(False)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.core: Any = core or FakeCore()
        self.sockets = SocketSet(lambda: None)
        self.ended: list[Exception | None] = []
        self.connection = StreamConnection(
            SimpleNamespace(loop=asyncio.get_running_loop(), sockets=self.sockets),
            self.sockets.add(sock),
            self.core,
            "test",
            lambda _connection, error: self.ended.append(error),
        )


@pytest.fixture
async def pair() -> Iterator[Pair]:
    made = Pair()
    made.connection.start()
    yield made
    made.connection.abort()
    made.other.close()
    assert len(made.sockets) == 0


class ScriptedSocket:
    """Stands in for `recv_into`: always has as much as asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, buffer: memoryview) -> int:
        self.calls += 1
        return len(buffer)


async def test_short_read_is_the_last(pair: Pair) -> None:
    pair.other.send(b"x" * 100)
    await eventually(lambda: pair.core.reads)
    assert pair.core.reads == [100]
    calls = []
    receive = pair.connection._recv_into

    def counting(buffer: memoryview) -> int:
        calls.append(len(buffer))
        return receive(buffer)

    pair.connection._recv_into = counting
    pair.other.send(b"y" * 200)
    await eventually(lambda: len(pair.core.reads) == 2)
    assert len(calls) == 1, "a read for nothing"


async def test_catching_up_reads_no_further_than_receives_are_posted(pair: Pair) -> None:
    """What comes before its receive is stored, and copied when that is posted."""
    pair.connection._recv_into = endless = ScriptedSocket()
    pair.core.expects = False
    pair.connection.catch_up()
    assert not endless.calls
    pair.core.expects = True

    def updated(nbytes: int) -> int:
        pair.core.expects = endless.calls < 3
        return 1

    pair.connection._updated = updated
    pair.connection.catch_up()
    assert endless.calls == 3
    pair.core.expects = False
    pair.connection.poll()
    assert endless.calls == 4 + MAX_CALL_BYTES // BUFFER_BYTES - 1, "whoever looks takes all there is"


class Continuing(Recorder):
    """Has more sent, and makes a call that catches up, once the first message is here."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on: Callable[[], None] = lambda: None

    def message_received(self, token: object, receive: Receive) -> None:
        super().message_received(token, receive)
        if token == 0:
            self.go_on()


async def test_a_call_made_by_input_reads_nothing_beside_it() -> None:
    """What was read already would be overwritten by what follows: operations that were held back begin so."""
    cores, sink = CorePair(), Continuing()
    messages = [bytes([number]) * 1000 for number in range(4)]
    for number, message in enumerate(messages):
        send(cores.a, Recorder(), p2p(0), message, number)
        receive(cores.b, sink, p2p(0), len(message), number)
    sent = bytes(cores.ab.bytes)
    pair = Pair(cores.b)

    def go_on() -> None:
        pair.other.send(sent[2500:])
        pair.connection.catch_up()

    sink.go_on = go_on
    pair.connection.start()
    pair.other.send(sent[:2500])
    await eventually(lambda: len(sink.received) == len(messages))
    assert [bytes(sink.arrays[number]) for number in range(4)] == messages
    pair.connection.abort()
    pair.other.close()


@pytest.mark.parametrize(("frames_a_read", "reads"), [(1, MAX_CALL_BYTES // BUFFER_BYTES), (0, 16)])
async def test_a_callback_ends_after_a_mebibyte(pair: Pair, frames_a_read: int, reads: int) -> None:
    pair.core.frames_a_read = frames_a_read
    pair.connection._recv_into = endless = ScriptedSocket()
    pair.connection._readable()
    assert endless.calls == reads == MAX_CALL_BYTES // BUFFER_BYTES


async def test_a_callback_ends_at_one_byte_past_the_limit_only_after_another_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.connection._recv_into = endless = ScriptedSocket()
    monkeypatch.setattr(connection, "MAX_CALL_BYTES", 2 * BUFFER_BYTES)
    pair.connection._readable()
    assert endless.calls == 2
    monkeypatch.setattr(connection, "MAX_CALL_BYTES", 2 * BUFFER_BYTES + 1)
    pair.connection._readable()
    assert endless.calls == 5


@pytest.mark.parametrize(("frames", "reads"), [(MAX_CALL_FRAMES, 1), (MAX_CALL_FRAMES - 1, 2)])
async def test_a_callback_ends_after_many_frames(pair: Pair, frames: int, reads: int) -> None:
    pair.core.frames_a_read = frames
    pair.connection._recv_into = endless = ScriptedSocket()
    pair.connection._readable()
    assert endless.calls == reads


async def test_writer_is_armed_until_all_is_written(pair: Pair) -> None:
    pair.core.outgoing = bytes(3_000_000)
    assert not pair.core.flush()
    assert pair.connection._armed
    received = 0
    while received < 3_000_000:
        try:
            received += len(pair.other.recv(1 << 20))
        except BlockingIOError:
            await asyncio.sleep(0)
    await eventually(lambda: not pair.connection._armed)
    assert pair.connection.bytes_sent == 3_000_000


async def test_goodbye_shuts_the_sending_side_after_the_flush(pair: Pair) -> None:
    pair.core.outgoing = bytes(3_000_000)
    pair.core.flush()
    pair.connection.leave()
    assert not pair.connection._shut
    received = bytearray()
    while True:
        try:
            chunk = pair.other.recv(1 << 20)
        except BlockingIOError:
            await asyncio.sleep(0)
            continue
        if not chunk:
            break
        received += chunk
    assert len(received) == 3_000_000
    pair.other.close()
    await eventually(lambda: pair.ended)
    assert pair.ended == [None]


async def test_a_reset_right_behind_data_is_noticed_though_nothing_is_sent() -> None:
    """uvloop tells of both in one call, and never again."""
    for trial in range(8):
        pair = Pair(make=tcp_pair)
        pair.connection.start()
        await asyncio.sleep(0)
        pair.other.send(bytes(trial + 1))
        pair.other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        pair.other.close()
        async with asyncio.timeout(10):
            await eventually(lambda: pair.ended)  # noqa: B023
        assert pair.core.reads == [trial + 1]
        assert isinstance(pair.ended[0], ConnectionResetError)
        assert len(pair.sockets) == 0


async def test_end_of_stream_without_goodbye(pair: Pair) -> None:
    pair.other.close()
    await eventually(lambda: pair.ended)
    assert isinstance(pair.ended[0], ConnectionResetError)
    assert "without a goodbye" in str(pair.ended[0])


async def test_goodbye_ends_the_connection(pair: Pair) -> None:
    pair.core.left = True
    pair.other.send(b"goodbye")
    await eventually(lambda: pair.ended)
    assert pair.ended == [None]
    assert len(pair.sockets) == 0


async def test_protocol_error_ends_the_connection_even_after_our_goodbye(pair: Pair) -> None:
    pair.core.raises = RemoteProtocolError("nonsense")
    pair.connection.leave()
    pair.other.send(b"x")
    await eventually(lambda: pair.ended)
    assert pair.ended == [pair.core.raises]


async def test_broken_core_is_reported_and_ends_the_connection(pair: Pair) -> None:
    loop = asyncio.get_running_loop()
    reported: list[object] = []
    loop.set_exception_handler(lambda _loop, context: reported.append(context["exception"]))
    pair.core.raises = KeyError("a mistake of ours")
    pair.other.send(b"x")
    await eventually(lambda: pair.ended)
    assert reported == pair.ended == [pair.core.raises]


async def test_write_error_is_told_after_what_was_still_to_read(pair: Pair) -> None:
    pair.other.send(b"last words")
    pair.other.close()
    assert pair.connection._write([b"into the void"]) == 0
    assert not pair.ended, "only from the loop"
    pair.connection._arm()
    assert not pair.connection._armed
    await eventually(lambda: pair.ended)
    assert pair.core.reads == [10]
    assert isinstance(pair.ended[0], BrokenPipeError)


async def test_writing_after_the_end_raises(pair: Pair) -> None:
    pair.connection.abort()
    pair.connection.abort()
    with pytest.raises(ClosedError):
        pair.connection._write([b"x"])


@pytest.mark.parametrize("buffers", [[b"one"], [b"one", memoryview(b"two"), b"three"]])
async def test_buffers_are_gathered(pair: Pair, buffers: Sequence[bytes | memoryview]) -> None:
    whole = b"".join(buffers)
    assert pair.connection._write(buffers) == len(whole)
    assert pair.other.recv(100) == whole


async def test_a_poll_sends_what_there_was_no_room_for(pair: Pair) -> None:
    """Whoever looks without letting the loop turn must not wait for the loop to say that there is room."""
    pair.core.outgoing = bytes(8 << 20)
    assert not pair.core.flush()
    left = len(pair.core.outgoing)
    assert 0 < left < 8 << 20
    assert pair.other.recv(BUFFER_BYTES)
    while len(pair.core.outgoing) == left:
        assert pair.other.recv(BUFFER_BYTES), "all is read, and nothing more is sent"
        assert not pair.connection.poll(), "nothing has come"
    while pair.core.outgoing:
        pair.other.recv(BUFFER_BYTES)
        pair.connection.poll()
    assert not pair.connection._armed
