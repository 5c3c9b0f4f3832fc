"""What the simulation found, step by step; and that the simulated network does what a real one does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from sim_store_client import PORT, TOKEN

from asyncdist.store import TCPStore
from asyncdist.store import store_connection as connection
from asyncdist.store.tcp_client import RECONNECT_TIMEOUT_S
from asyncdist.testing.hosts import SimulatedHost
from asyncdist.testing.network import SimulatedNetwork, run_simulated
from asyncdist.testing.store_conformance import STORE_CHECKS, StoreCheck
from asyncdist_server.serving import sockets
from asyncdist_server.serving.config import ServerConfig, limits_for
from asyncdist_server.serving.daemon import StoreServer
from asyncdist_server.wire.messages import LIMIT, QUEUE_PUSH, SET, Limits

Main = Callable[["Town"], Awaitable[None]]


class Town:
    """A daemon and some hosts."""

    def __init__(self, network: SimulatedNetwork, **config: Any) -> None:
        self.network = network
        self.daemon = network.host("daemon")
        self.config = ServerConfig(self.daemon.address, PORT, token=TOKEN, **config)
        self.server: StoreServer | None = None

    async def start(self) -> StoreServer:
        self.daemon.restart()
        self.server = self.daemon.run(StoreServer, self.config)
        await self.network.outcome(self.daemon.spawn(self.server.start()))
        return self.server

    async def open(self, host: SimulatedHost, **options: Any) -> TCPStore:
        opening = TCPStore.connect(self.daemon.address, PORT, token=TOKEN, namespace="job", **options)
        return await self.network.outcome(host.spawn(opening))


def run(main: Main, seed: int = 1, **config: Any) -> None:
    """Run it on three seeds, with usual and unusual latencies; nothing may be left unhandled in the loop."""
    for each in (seed, seed + 1, seed + 2):
        network = SimulatedNetwork(each)
        unhandled: list[dict[str, Any]] = []
        network.loop.set_exception_handler(lambda _, context, found=unhandled: found.append(context))  # type: ignore[misc]

        async def whole(network: SimulatedNetwork) -> None:
            town = Town(network, **config)
            await town.start()
            await main(town)
            if town.daemon.process.alive:
                assert town.server is not None
                await network.outcome(town.daemon.spawn(town.server.stop()))

        run_simulated(whole, each, network=network)
        assert not unhandled


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_a_store_on_the_simulated_network_conforms(check: StoreCheck) -> None:
    async def main(town: Town) -> None:
        host = town.network.host("client")
        town.network.typical_latency_s = 0.0001  # some checks move a large value in limited time
        await town.network.outcome(
            host.spawn(check(lambda: TCPStore.connect(town.daemon.address, PORT, token=TOKEN, namespace="job")))
        )

    run(main)


def test_a_client_that_vanished_with_news_under_way_is_noticed_within_a_minute() -> None:
    async def main(town: Town) -> None:
        lost, other = town.network.host("lost"), town.network.host("other")
        watching = (await town.open(lost)).watch("w/")
        store = await town.open(other)
        await watching.__aenter__()
        reading = lost.spawn(anext(watching))
        await asyncio.sleep(1)
        lost.vanish()
        await store.set("w/x", "news")  # sent to it, and never acknowledged
        assert town.server is not None
        assert town.server.connection_count == 2
        await asyncio.sleep(60)
        assert town.server.connection_count == 1
        assert not reading.done()
        await store.close()

    run(main)


@pytest.mark.parametrize("waits", [False, True])
def test_a_job_comes_back_although_its_vanished_host_has_taken_all_places(waits: bool) -> None:
    """Whether the daemon had something to tell the connections meanwhile or not."""
    places = 4

    async def main(town: Town) -> None:
        lost, back = town.network.host("lost"), town.network.host("back")
        for _ in range(places):
            store = await town.open(lost)
            if waits:
                lost.run(partial(store.get, "key", timeout=31))
        await asyncio.sleep(30)
        lost.vanish()
        stores = await asyncio.gather(*[town.open(back, timeout=RECONNECT_TIMEOUT_S) for _ in range(places)])
        for store in stores:
            await town.network.outcome(back.spawn(store.close()))

    run(main, limits=Limits(connections=places))


def test_a_client_knows_that_it_is_cut_off_before_the_daemon_does() -> None:
    """Else a lock that is bound to its connection is another's while it still believes in it."""
    client_s = connection.KEEPALIVE_IDLE_S + connection.KEEPALIVE_INTERVAL_S * connection.KEEPALIVE_PROBES
    assert max(client_s, connection.UNACKNOWLEDGED_MS / 1000) < (
        sockets.UNACKNOWLEDGED_MS / 1000 - sockets.KEEPALIVE_IDLE_S
    )


def test_a_lease_that_is_due_while_the_store_is_closed_disturbs_nobody() -> None:
    async def main(town: Town) -> None:
        host = town.network.host("client")
        store = await town.open(host)
        lease = await store.lease(0.3)
        town.network.cut(host, town.daemon)
        store.set("key", "never acknowledged").cancel()
        await store.close()  # takes two seconds, in which the lease would have been kept alive
        assert lease.lost
        town.network.heal(host, town.daemon)

    run(main)


def test_a_revocation_that_fails_after_its_caller_has_gone_disturbs_nobody() -> None:
    async def main(town: Town) -> None:
        store = await town.open(town.network.host("client"))
        lease = await store.lease(60)
        town.daemon.process.pause()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(lease.revoke(), 0.1)
        town.daemon.kill()
        await town.start()
        assert await store.num_keys() == 0
        await store.close()

    run(main)


def test_an_item_given_back_while_the_store_is_full_is_there_again() -> None:
    async def main(town: Town) -> None:
        network, host = town.network, town.network.host("client")
        network.typical_latency_s = 0.1
        store, other = await town.open(host), await town.open(network.host("other"))
        await store.queue_push("queue", "item")
        popping = asyncio.ensure_future(store.queue_pop("queue"))
        assert town.server is not None
        engine = town.server.engine
        while engine.statistics()["queues"]:  # noqa: ASYNC110  # virtual time
            await asyncio.sleep(0.001)
        assert popping.cancel(), "the item is under way"
        client = engine.open("job", lambda reply: None)
        for number in range(1, 2000):
            engine.request(client, (number, SET, b"%d" % number, b"x" * 900 if number < 20 else b""), 0.0)
        await asyncio.sleep(5)
        refused = engine.request(client, (2000, QUEUE_PUSH, b"queue", b"item"), 0.0)
        assert refused is not None
        assert refused[1] == LIMIT
        assert await other.queue_pop("queue", timeout=5) == b"item"
        for each in (store, other):
            await each.close()

    run(main, limits=limits_for(1_000, memory_bytes=9_000))


# What a real network does.


def test_a_killed_daemon_refuses_and_a_vanished_one_is_silent() -> None:
    async def main(town: Town) -> None:
        host, loop = town.network.host("client"), town.network.loop
        town.daemon.kill()
        sock = host.run(loop.new_socket, socket.AF_INET, socket.SOCK_STREAM)
        with pytest.raises(ConnectionRefusedError):
            await loop.sock_connect(sock, (town.daemon.address, PORT))
        town.daemon.restart()
        town.daemon.vanish()
        began = loop.time()
        with pytest.raises(TimeoutError):
            await loop.sock_connect(sock, (town.daemon.address, PORT))
        assert loop.time() - began > 100

    run(main)


@pytest.mark.parametrize("simulated", [True, False])
def test_sockets_simulated_and_real_behave_alike(simulated: bool) -> None:
    """Order, the end, a reset, back-pressure and refusal, as a program sees them."""

    class Echo(asyncio.Protocol):
        first = True

        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            made.append(transport)

        def data_received(self, data: bytes) -> None:
            first, self.first = self.first, False
            if first and data == b"A":
                self.transport.abort()
            elif first and data == b"P":
                self.transport.pause_reading()
            else:
                self.transport.write(data)

    made: list[Any] = []

    async def main(network: SimulatedNetwork | None = None) -> None:
        loop = asyncio.get_running_loop()
        new_socket = getattr(loop, "new_socket", socket.socket)
        listener = new_socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        server = await loop.create_server(Echo, sock=listener)

        async def connected() -> Any:
            sock = new_socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, address)
            except BaseException:
                sock.close()
                raise
            return sock

        sock = await connected()
        data = bytes(range(256)) * 400
        await loop.sock_sendall(sock, data)
        received = b""
        while len(received) < len(data):
            received += await loop.sock_recv(sock, 5_000)
        assert received == data
        with pytest.raises(BlockingIOError):
            sock.recv(1)
        sock.shutdown(socket.SHUT_WR)
        assert await loop.sock_recv(sock, 1) == b"", "the other side closes, too"
        sock.close()
        assert sock.fileno() == -1
        sock = await connected()
        await loop.sock_sendall(sock, b"A")
        assert await loop.sock_recv(sock, 1) == b""
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await send_again_and_again(sock)
        sock.close()
        sock = await connected()
        await loop.sock_sendall(sock, b"P")
        await asyncio.sleep(0.1)
        with pytest.raises(BlockingIOError):
            send_without_end(sock)
        made[-1].resume_reading()
        writable = loop.create_future()
        loop.add_writer(sock.fileno(), lambda: writable.done() or writable.set_result(None))
        drain = asyncio.ensure_future(read_all(loop, sock))
        await asyncio.wait_for(writable, 20)
        loop.remove_writer(sock.fileno())
        drain.cancel()
        await asyncio.gather(drain, return_exceptions=True)
        sock.close()
        server.close()
        with pytest.raises(ConnectionRefusedError) as refusal:
            await connected()
        assert refusal.value.errno == errno.ECONNREFUSED
        await asyncio.sleep(0.1)

    if simulated:
        for seed in range(8):
            made.clear()
            run_simulated(main, seed)
    else:
        asyncio.run(main())


async def send_again_and_again(sock: Any) -> None:
    for _ in range(100):
        sock.send(b"x")
        await asyncio.sleep(0.01)


def send_without_end(sock: Any) -> None:
    while True:
        assert sock.send(b"x" * 100_000) > 0


async def read_all(loop: asyncio.AbstractEventLoop, sock: Any) -> None:
    while await loop.sock_recv(sock, 100_000):
        pass
