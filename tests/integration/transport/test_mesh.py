"""Meshes over real sockets: messages, and which transport and address a pair uses."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import random
import re
import socket
import sys

import psutil
import pytest
from chaos_proxy import Chaos, chaos_proxy
from mesh_world import World, received, world
from waiting import eventually

from asyncdist.errors import ClosedError, DistNetworkError, PeerLostError
from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.connections import dialer, link
from asyncdist.transport.connections.connection import UNSENT_BYTES, set_stream_options

SIOCOUTQNSD = 0x894B
"""Asks Linux for the bytes of a TCP socket that were not sent."""

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
async def test_thousands_of_small_messages_arrive_in_order(transport: str) -> None:
    async with world(2, transport) as made:
        one, two = made.ranks
        incoming = [two.receive(0) for _ in range(3000)]
        for number in range(3000):
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
    with pytest.raises(DistNetworkError, match=r"rank 0: cannot listen on 192\.0\.2\.213: .*ASYNCDIST_SOCKET_IFNAME"):
        await one.mesh.listen(["127.0.0.1", "192.0.2.213"])
    assert one.mesh.statistics()["sockets"] == 0
    await one.mesh.close(1)


def free_ports(count: int) -> range:
    """As many free ports in a row."""
    while True:
        first = random.randrange(20_000, 30_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return range(first, first + count)


async def test_ranks_listen_on_the_ports_that_are_open_in_a_firewall() -> None:
    """Also on those that other ranks had a moment ago; where there are not enough, the error says which were tried."""
    ports = free_ports(3)
    for _ in range(2):
        made = World(4, "tcp", ports=ports)
        ranks = [made.add(rank) for rank in range(4)]
        try:
            for rank in ranks[:3]:
                made.addresses[rank.rank] = await rank.mesh.listen()
            assert sorted(port for address in made.addresses.values() for _ip, port in address.endpoints) == [*ports]
            with pytest.raises(DistNetworkError, match=f"every port of ASYNCDIST_PORT_RANGE={ports[0]}-{ports[2]} is"):
                await ranks[3].mesh.listen()
            assert ranks[3].mesh.statistics()["sockets"] == 0
            ranks[0].send(1, b"x")
            assert await received(ranks[1].receive(0)) == b"x"
        finally:
            await asyncio.gather(*(rank.mesh.close(5) for rank in ranks))


async def test_a_rank_is_reached_by_the_address_that_it_advertises() -> None:
    """Behind a gateway, which a proxy stands for here."""
    (port,) = ports = free_ports(1)
    made = World(2, "tcp", ports=ports)
    one, two = made.add(0), made.add(1)
    async with chaos_proxy("127.0.0.1", port, Chaos()) as gateway:
        try:
            made.addresses[1] = await two.mesh.listen(advertised=[("127.0.0.1", gateway.port)])
            one.send(1, b"x")
            assert await received(two.receive(None, ranks=[0])) == b"x"
            assert gateway.connections == 1
            assert f"tcp 127.0.0.1:{gateway.port}" in one.mesh.describe(1)
        finally:
            await asyncio.gather(one.mesh.close(5), two.mesh.close(5))


async def test_an_advertised_address_without_a_port_has_that_of_the_listener() -> None:
    made = World(1, "tcp")
    one = made.add(0)
    try:
        address = await one.mesh.listen(advertised=[("192.0.2.7", 0), ("192.0.2.8", 31_000)])
        (own,) = [sock for sock in psutil.Process().net_connections("tcp4") if sock.status == psutil.CONN_LISTEN]
        assert address.endpoints == (("192.0.2.7", own.laddr.port), ("192.0.2.8", 31_000))
    finally:
        await one.mesh.close(1)


@pytest.mark.parametrize("text", ["0", "1-70000", "20-10", "a-b", "5-", "-5"])
def test_a_range_of_ports_is_checked(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ASYNCDIST_PORT_RANGE='{text}': give the first and the last port")):
        TransportConfig.from_environ({"ASYNCDIST_PORT_RANGE": text})


@pytest.mark.parametrize(("text", "interfaces", "streams"), [("", 1, 1), ("", 3, 3), ("64", 2, 64), (" 1 ", 2, 1)])
def test_a_pair_has_as_many_connections_as_are_asked_for(text: str, interfaces: int, streams: int) -> None:
    assert TransportConfig.from_environ({"ASYNCDIST_STREAMS": text}, interfaces).streams == streams


@pytest.mark.parametrize("text", ["0", "65", "-1", "two"])
def test_another_number_of_connections_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ASYNCDIST_STREAMS='.*': give a number of connections from 1 to 64"):
        TransportConfig.from_environ({"ASYNCDIST_STREAMS": text})


def test_a_range_of_ports_is_read() -> None:
    assert TransportConfig.from_environ({"ASYNCDIST_PORT_RANGE": " 20000 - 20099 "}).ports == range(20_000, 20_100)
    assert TransportConfig.from_environ({"ASYNCDIST_PORT_RANGE": "20000"}).ports == range(20_000, 20_001)


async def test_tcp_options() -> None:
    with socket.socket() as sock:
        set_stream_options(sock, 30)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much is unsent")
@pytest.mark.parametrize("far", [True, False])
async def test_the_kernel_keeps_little_that_it_cannot_send_to_other_hosts(
    monkeypatch: pytest.MonkeyPatch, far: bool
) -> None:
    sockets: list[socket.socket] = []
    monkeypatch.setattr(link, "on_this_host", lambda sock: bool(sockets.append(sock)) or not far)
    async with world(2, "tcp") as made:
        one, two = made.ranks
        two.receive(0)
        one.send(1, b"meet")
        await eventually(lambda: len(sockets) == 2)
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * UNSENT_BYTES)
            with contextlib.suppress(BlockingIOError):
                while True:  # nobody reads while the loop does not turn
                    sock.send(bytes(UNSENT_BYTES // 8))
            unsent = int.from_bytes(fcntl.ioctl(sock, SIOCOUTQNSD, bytes(4)), sys.byteorder)
            assert (unsent <= 1.25 * UNSENT_BYTES) is far
        for sock in sockets:
            sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system has no choice of congestion control")
async def test_nothing_is_paced_inside_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets: list[socket.socket] = []
    on_this_host = link.on_this_host

    def watch(sock: socket.socket) -> bool:
        sockets.append(sock)
        return on_this_host(sock)

    monkeypatch.setattr(link, "on_this_host", watch)
    for transport in ("tcp", "unix"):
        async with world(2, transport) as made:
            made.ranks[0].send(1, b"meet")
            assert await received(made.ranks[1].receive(0)) == b"meet"
            for sock in sockets:
                if sock.family != socket.AF_UNIX:
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"
            assert len(sockets) == 2
            sockets.clear()


async def test_closed_mesh_raises() -> None:
    async with world(2) as made:
        one = made.ranks[0]
        await one.mesh.close(1)
        for call in (lambda: one.send(1, b""), lambda: one.receive(1), lambda: one.receive(None, ranks=[1])):
            with pytest.raises(ClosedError, match="the mesh is closed"):
                call()
        with pytest.raises(ClosedError):
            await one.mesh.listen()
