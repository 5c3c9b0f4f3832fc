"""Meshes over real sockets: connecting, choosing, messages, addresses, limits of patience."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import socket
import time
from collections.abc import Iterator, Sequence

import pytest
from mesh_world import PATIENCE_S, Rank, World, eventually, received, world

from asyncdist.errors import ClosedError, ConnectTimeoutError, PeerLostError, RemoteProtocolError
from asyncdist.transport import dialer, link
from asyncdist.transport.address import PeerAddress
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.handshake import Handshake
from asyncdist.transport.hello import ListenerHello
from asyncdist.transport.tcp import set_stream_options

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])


@TRANSPORTS
async def test_messages_of_many_sizes_both_ways(transport: str) -> None:
    payloads = [bytes([size % 251]) * size for size in (0, 1, 48, 4096, 65_536, 65_537, 3_000_000)]
    async with world(2, transport) as made:
        one, two = made.ranks
        incoming = [(r.receive(1 - r.rank, tag), data) for r in (one, two) for tag, data in enumerate(payloads)]
        outgoing = [r.send(1 - r.rank, data, tag) for r in (one, two) for tag, data in enumerate(payloads)]
        for future, data in incoming:
            assert await received(future) == data
        await asyncio.gather(*outgoing)
        assert transport in one.mesh.describe(1)
        assert one.mesh.statistics()["peers"] == {"open": 1}


@TRANSPORTS
async def test_ten_thousand_small_messages_arrive_in_order(transport: str) -> None:
    async with world(2, transport) as made:
        one, two = made.ranks
        incoming = [two.receive(0) for _ in range(10_000)]
        for number in range(10_000):
            one.send(1, number.to_bytes(4, "little"))
        for number, future in enumerate(incoming):
            assert await received(future) == number.to_bytes(4, "little")


async def test_message_to_oneself() -> None:
    async with world(2) as made:
        (one, _) = made.ranks
        for size in (0, 5, 70_000, 5_000_000):
            data = random.Random(size).randbytes(size)
            sent = one.send(0, data, tag=size)
            assert await received(one.receive(0, tag=size)) == data
            assert await sent is True
            future = one.receive(None, tag=size, ranks=[0, 1])
            one.send(0, data, tag=size)
            assert await received(future) == data
        assert one.mesh.describe(0) == "rank 0: itself"


async def test_one_look_up_for_all_peers_of_a_turn() -> None:
    async with world(5) as made:
        one = made.ranks[0]
        one.mesh.connect([1, 2])
        one.mesh.connect([2, 3])
        one.send(4, b"x")
        one.mesh.connect([0, 1])
        await eventually(lambda: one.mesh.statistics()["peers"] == {"open": 4})
        one.mesh.connect([1, 2, 3, 4])
        assert made.resolved == [(0, [1, 2, 3, 4])]


@pytest.mark.parametrize("rank", [-1, 2, 100])
async def test_rank_outside_the_world(rank: int) -> None:
    async with world(2) as made:
        one = made.ranks[0]
        for call in (lambda: one.send(rank, b""), lambda: one.receive(rank), lambda: one.mesh.connect([rank])):
            with pytest.raises(ValueError, match="not in a world of 2 ranks"):
                call()
        with pytest.raises(ValueError, match="not in a world of 2 ranks"):
            one.receive(None, ranks=[0, rank])


async def test_receive_from_any_source_and_withdraw() -> None:
    async with world(4) as made:
        one = made.ranks[0]
        unwanted = one.receive(None, tag=9, ranks=range(4))
        incoming = [one.receive(None, ranks=range(4)) for _ in range(3)]
        for peer in made.ranks[1:]:
            peer.send(0, bytes([peer.rank]))
        assert sorted([await received(future) for future in incoming]) == [b"\1", b"\2", b"\3"]
        assert not unwanted.done()


async def test_control_goes_only_to_the_connected() -> None:
    async with world(3) as made:
        one, two, three = made.ranks
        one.send(1, b"")
        await received(two.receive(0))
        assert one.mesh.broadcast_control([1, 2], b"hello") == [1]
        await eventually(lambda: two.controls == [(0, b"hello")])
        one.mesh.send_control(2, b"there")
        await eventually(lambda: three.controls == [(0, b"there")])


# -- transport of a pair


async def test_auto_shares_memory_on_one_host() -> None:
    async with world(2, "auto") as made:
        made.ranks[0].send(1, b"x")
        assert await received(made.ranks[1].receive(0)) == b"x"
        assert "shm beside unix @asyncdist-" in made.ranks[0].mesh.describe(1)
        assert "shm beside unix @asyncdist-" in made.ranks[1].mesh.describe(0)


async def test_auto_falls_back_to_tcp_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with world(2, "auto") as made:
        made.addresses[1] = dataclasses.replace(made.addresses[1], unix=b"\0asyncdist-nobody")
        with caplog.at_level(logging.INFO, "asyncdist"):
            made.ranks[0].send(1, b"x")
            assert await received(made.ranks[1].receive(None, ranks=[0])) == b"x"
        assert "tcp 127.0.0.1:" in made.ranks[0].mesh.describe(1)
        lines = [line for line in caplog.messages if "does not connect" in line]
        assert len(lines) == 1
        assert "unix @asyncdist-nobody" in lines[0]
        assert "using TCP" in lines[0]
        assert len([line for line in caplog.messages if "connected to rank 1 over tcp" in line]) == 1


AUTO, UNIX = TransportConfig("auto"), TransportConfig("unix")


async def test_ranks_of_other_hosts_use_tcp() -> None:
    targets, why = dialer.choose_targets(
        "here", PeerAddress("there", (("10.0.0.1", 5),), b"\0name"), TransportConfig("auto")
    )
    assert [target.label for target in targets] == ["tcp 10.0.0.1:5"]
    assert not why
    targets, why = dialer.choose_targets(
        "here", PeerAddress("there", (("127.0.0.1", 5),), b"\0name"), TransportConfig("auto")
    )
    assert not targets
    assert "MASTER_ADDR" in why
    targets, why = dialer.choose_targets(
        "here", PeerAddress("there", (("10.0.0.1", 5),), b"\0name"), TransportConfig("unix")
    )
    assert not targets
    assert "another host" in why


async def test_unreachable_peer_fails_with_the_reason() -> None:
    async with world(2, "tcp") as made:
        made.addresses[1] = dataclasses.replace(made.addresses[1], host_id="elsewhere")
        with pytest.raises(PeerLostError, match="advertises only loopback") as caught:
            await made.ranks[0].send(1, b"x")
        assert caught.value.rank == 1
        assert list(made.ranks[0].lost) == [1]


def test_transport_is_checked() -> None:
    assert TransportConfig.from_environ({}).transport == "auto"
    assert TransportConfig.from_environ({"ASYNCDIST_TRANSPORT": " TCP "}).transport == "tcp"
    with pytest.raises(ValueError, match="ASYNCDIST_TRANSPORT='carrier-pigeon': use one of auto, shm, unix, tcp"):
        TransportConfig.from_environ({"ASYNCDIST_TRANSPORT": "carrier-pigeon"})


async def test_ipv6() -> None:
    made = World(2, "tcp")
    one, two = made.add(0), made.add(1)
    try:
        made.addresses[1] = await two.mesh.listen(["::1"])
    except OSError:
        pytest.skip("no IPv6 on this machine")
    else:
        one.send(1, b"six")
        assert await received(two.receive(None, ranks=[0])) == b"six"
        assert "tcp [::1]:" in one.mesh.describe(1)
    finally:
        await asyncio.gather(one.mesh.close(5), two.mesh.close(5))


async def test_second_endpoint_is_tried() -> None:
    async with world(2, "tcp") as made:
        address = made.addresses[1]
        made.addresses[1] = dataclasses.replace(address, endpoints=(("127.0.0.1", 1), *address.endpoints))
        made.ranks[0].send(1, b"x")
        assert await received(made.ranks[1].receive(None, ranks=[0])) == b"x"


async def test_address_that_cannot_be_bound() -> None:
    made = World(1, "tcp")
    one = made.add(0)
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.213"):
        await one.mesh.listen(["127.0.0.1", "192.0.2.213"])
    assert one.mesh.statistics()["sockets"] == 0
    await one.mesh.close(1)


async def test_tcp_options() -> None:
    with socket.socket() as sock:
        set_stream_options(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


# -- dials that fail


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
        assert time.monotonic() - started < 5
        assert list(one.lost) == [1]
        with pytest.raises(PeerLostError):
            one.send(1, b"x")


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


async def test_listener_that_appears_late_is_found(unused_tcp_port: int) -> None:
    made = World(2, "tcp", connect_timeout_s=PATIENCE_S)
    one, two = made.add(0), made.add(1)
    made.addresses[1] = PeerAddress("elsewhere", (("127.0.0.1", unused_tcp_port),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerAddress, "loopback", property(lambda self: False))
        one.send(1, b"late")
        await eventually(lambda: made.resolved)
        await eventually(lambda: one.mesh._links[1]._dialer and one.mesh._links[1]._dialer.failures > 1)
        listening = two.mesh._context.sockets.add(socket.socket())
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        two.mesh._listener._sockets.append(listening)
        two.mesh._listener._listen(listening, ("127.0.0.1", unused_tcp_port))
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
    pending = [one.send(1, b"x"), one.receive(2)]
    for rank, future in enumerate(pending, 1):
        with pytest.raises(PeerLostError) as caught:
            await future
        assert caught.value.rank == rank
        assert isinstance(caught.value.__cause__, OSError | LookupError | TimeoutError)
    assert sorted(one.lost) == [1, 2]
    await one.mesh.close(1)


async def test_socket_connected_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> None:
    class SelfConnecting(socket.socket):
        def connect_ex(self, address: tuple[str, int]) -> int:  # type: ignore[override]
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(address)
            return super().connect_ex(address)

    made = World(2, "tcp")
    one = made.add(0)
    made.addresses[1] = PeerAddress(one.mesh._context.host_id, (("127.0.0.1", unused_tcp_port),))
    monkeypatch.setattr(dialer.socket, "socket", SelfConnecting)
    future = one.send(1, b"x")
    with pytest.raises(PeerLostError, match="connected to itself"):
        await future
    await one.mesh.close(1)


# -- crossed dials


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
            await eventually(lambda: one.mesh._links[1]._dialer and one.mesh._links[1]._dialer.in_flight)
            two.send(0, b"from 1")
            if lower == "fails":
                await eventually(lambda: one.mesh._links[1]._park)
                hole.accept()[0].close()
            started = time.monotonic()
            assert [await received(future) for future in incoming] == [b"from 1", b"from 0"]
            assert time.monotonic() - started < made.config.hello_timeout_s, "only the next hello was accepted"
            assert dialed_by(made) == 1


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


# -- strangers


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


async def test_closed_mesh_raises() -> None:
    async with world(2) as made:
        one = made.ranks[0]
        await one.mesh.close(1)
        for call in (lambda: one.send(1, b""), lambda: one.receive(1), lambda: one.receive(None, ranks=[1])):
            with pytest.raises(ClosedError, match="the mesh is closed"):
                call()
        with pytest.raises(ClosedError):
            await one.mesh.listen()
