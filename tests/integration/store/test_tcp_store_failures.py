"""What TCPStore does when the connection, the daemon or the other side is not what it should be."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

import forked
import pytest
from store_proxy import cutting_proxy

from asyncdist.errors import ClosedError, DistStoreError, StoreLimitError, StoreTimeoutError
from asyncdist.store import TCPStore
from asyncdist.store.dialer import SILENT_CLOSES
from asyncdist.testing.store_conformance import expect_pending, task
from asyncdist_server.serving.config import ServerConfig
from asyncdist_server.serving.daemon import serve
from asyncdist_server.serving.threaded import ThreadedServer, serve_in_thread
from asyncdist_server.wire.messages import Limits

# ---- cut connections


@pytest.mark.parametrize("seed", range(3))
async def test_cut_connections_apply_everything_exactly_once(
    server: ThreadedServer, namespace: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of cuts in the middle of requests and replies; each change is made once, in order."""
    for name, value in (("FIRST_BACKOFF_S", 0.0), ("MAX_BACKOFF_S", 0.0)):
        monkeypatch.setattr(f"asyncdist.store.dialer.{name}", value)
    chance = random.Random(seed)

    def plan(_: int) -> tuple[int | None, int | None]:
        # handshake and hello take about 130 bytes up and 190 down: most cuts come after them, some within
        if chance.random() < 0.5:
            return chance.randrange(100, 400), None
        return None, chance.randrange(150, 350)

    count = 800
    async with (
        cutting_proxy(server.port, plan) as proxy,
        TCPStore("127.0.0.1", proxy.port, namespace=namespace, timeout=60) as store,
    ):
        sums: list[int] = []

        async def add() -> None:
            sums.extend([await store.add("n", 1) for _ in range(count // 4)])

        async def append(name: str) -> None:
            for index in range(count // 4):
                await store.append("log" + name, f"{index},")

        async def push_and_pop() -> list[bytes]:
            popped = []
            for index in range(count // 4):
                await store.queue_push("q", str(index))
                popped.append(await store.queue_pop("q"))
            return popped

        *_, popped = await asyncio.gather(add(), add(), append("a"), append("b"), push_and_pop())
        assert sorted(sums) == list(range(1, count // 2 + 1))
        expected = "".join(f"{index}," for index in range(count // 4)).encode()
        assert await store.multi_get(["loga", "logb"]) == [expected, expected]
        assert popped == [str(index).encode() for index in range(count // 4)]
        assert proxy.cuts > 100


async def test_a_proxy_that_closes_while_the_daemon_is_away_is_no_stranger(namespace: str) -> None:
    """What listens in front of a restarting daemon takes connections and closes them without a word."""
    closed = 0
    enough = asyncio.Event()

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal closed
        await reader.read(1)
        writer.close()
        closed += 1
        if closed == 2 * SILENT_CLOSES:
            enough.set()

    async with AsyncExitStack() as stack:
        async with serve(ServerConfig(port=0)) as daemon:
            port = daemon.port
            store = await stack.enter_async_context(TCPStore("127.0.0.1", port, namespace=namespace))
            waiting = task(store.get("k"))
            await store.set("other", "1")
        async with await asyncio.start_server(close, "127.0.0.1", port, reuse_address=True):
            await asyncio.wait([task(enough.wait()), waiting], return_when=asyncio.FIRST_COMPLETED)
            assert enough.is_set(), "it gave up"
        await stack.enter_async_context(serve(ServerConfig(port=port)))
        async with TCPStore("127.0.0.1", port, namespace=namespace) as other:
            await other.set("k", "v")
        assert await waiting == b"v"
        await store.close()


async def test_waits_survive_a_cut(server: ThreadedServer, namespace: str) -> None:

    def plan(number: int) -> tuple[int | None, int | None]:
        return (260, None) if number == 1 else (None, None)

    async with (
        cutting_proxy(server.port, plan) as proxy,
        TCPStore("127.0.0.1", proxy.port, namespace=namespace) as store,
        TCPStore("127.0.0.1", server.port, namespace=namespace) as other,
    ):
        waiting = [task(store.get("k")), task(store.queue_pop("q")), task(store.wait(["k", "l"]))]
        while not proxy.cuts:
            await store.add("noise", 1)
        assert proxy.connections == 2
        assert not any(each.done() for each in waiting)
        await other.multi_set(["k", "l"], ["v", "w"])
        await other.queue_push("q", "item")
        assert await asyncio.gather(*waiting) == [b"v", b"item", None]


async def test_pop_cancelled_while_disconnected_loses_nothing(server: ThreadedServer, namespace: str) -> None:
    """The daemon answered the pop, the answer was lost, the caller left before the connection was made anew."""
    async with (
        TCPStore("127.0.0.1", server.port, namespace=namespace) as other,
        TCPStore("127.0.0.1", server.port, namespace=namespace) as store,
    ):
        popping = task(store.queue_pop("q"))
        await expect_pending(popping, store)
        connection = store._connection
        assert connection is not None
        connection._loop.remove_reader(connection._fd)  # from now on answers stay unread
        await other.queue_push("q", "item")
        assert await other.queue_len("q") == 0  # it was given to the pop
        popping.cancel()
        await asyncio.wait([popping])
        connection._lose(ConnectionResetError("test"))
        assert await other.queue_pop("q", timeout=10) == b"item"


# ---- the daemon dies


@contextmanager
def daemon_process(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A daemon in a process of its own; killed at the end if it still runs."""
    command = [sys.executable, "-m", "asyncdist_server", "--port", str(port)]
    with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.kill()


async def test_restarted_daemon_fails_changes_and_repeats_reads() -> None:
    returned = asyncio.Event()
    with daemon_process() as (first, port):
        store = await TCPStore.connect("127.0.0.1", port, on_incarnation_change=returned.set)
        await store.set("address", "mine")
        waiting = task(store.get("later"))
        await expect_pending(waiting, store)
        first.kill()
        first.wait()
        while (await asyncio.wait([adding := task(store.add("n", 1))], timeout=0.01))[0]:
            pass  # sent before the loss was noticed? it is answered or it stays pending; the latter is wanted
    with daemon_process(port):
        with pytest.raises(DistStoreError, match=r"add\('n'\) failed: the store was restarted without its data"):
            await adding
        async with asyncio.timeout(60):
            await returned.wait()
        assert not waiting.done()
        assert await store.check(["address"]) is False
        await store.set("address", "mine")
        await store.set("later", "v")
        assert await waiting == b"v"
        await store.close()


async def test_daemon_that_stays_away_fails_everything_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist.store.tcp_client.RECONNECT_TIMEOUT_S", 0.3)
    with daemon_process() as (process, port):
        store = await TCPStore.connect("127.0.0.1", port)
        waiting: list[asyncio.Future[object]] = [task(store.get("k")), task(store.queue_pop("q"))]
        await expect_pending(waiting[0], store)
        process.kill()
        process.wait()
        waiting.append(task(store.set("k", "v")))
        async with asyncio.timeout(60):
            errors = await asyncio.gather(*waiting, return_exceptions=True)
    for error, text in zip(errors, ("get('k')", "queue_pop('q')", "set('k')"), strict=True):
        assert isinstance(error, DistStoreError)
        assert f"store 127.0.0.1:{port}: {text} failed" in str(error)
        assert "could not connect within 0.3 s" in str(error)
    monkeypatch.undo()
    with daemon_process(port):
        with pytest.raises(DistStoreError, match="restarted without its data"):
            await store.set("k", "v")  # the next request connects again, and was meant for the data that is gone
        await store.set("k", "v")
        assert await store.get("k") == b"v"
        await store.close()


async def test_silent_daemon_is_bounded_by_the_time_out() -> None:
    with daemon_process() as (process, port):
        store = await TCPStore.connect("127.0.0.1", port)
        store.set_timeout(0.1)
        process.send_signal(19)  # SIGSTOP
        with pytest.raises(StoreTimeoutError, match=r"set\('k'\): the store did not answer in time"):
            await store.set("k", "v")
        process.send_signal(18)  # SIGCONT
        store.set_timeout(10)
        assert await store.get("k") == b"v"
        await store.close()


async def test_close_is_bounded_when_the_daemon_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncdist.store.tcp_client.CLOSE_TIMEOUT_S", 0.1)
    with daemon_process() as (process, port):
        store = await TCPStore.connect("127.0.0.1", port)
        process.send_signal(19)
        setting = task(store.set("k", "v"))
        async with asyncio.timeout(5):
            await store.close()
        with pytest.raises(ClosedError):
            await setting


# ---- limits


async def test_limits_are_errors_and_leave_the_store_usable() -> None:
    limits = Limits(frame_bytes=2 * 1024 * 1024, value_bytes=1024 * 1024)
    with serve_in_thread(limits=limits) as server:
        async with TCPStore("127.0.0.1", server.port) as store:
            await store.set("k", b"x" * limits.value_bytes)
            with pytest.raises(StoreLimitError, match=r"set\('k'\)"):
                store.set("k", b"x" * (limits.value_bytes + 1))
            with pytest.raises(StoreLimitError, match="the key has"):
                await store.set("k" * (limits.key_bytes + 1), b"")
            await store.set("k" * limits.key_bytes, b"")
            assert len(await store.get("k")) == limits.value_bytes


async def test_more_requests_than_may_be_in_flight() -> None:
    with serve_in_thread(limits=Limits(in_flight=100)) as server:
        async with TCPStore("127.0.0.1", server.port) as store:
            sums = await asyncio.gather(*(store.add("n", 1) for _ in range(1000)))
            assert sums == list(range(1, 1001))


async def test_much_data_at_once(server: ThreadedServer, namespace: str) -> None:
    async with TCPStore("127.0.0.1", server.port, namespace=namespace) as store:
        value = bytes(100_000)
        await asyncio.gather(*(store.set(f"key {index}", value) for index in range(200)))
        values = await asyncio.gather(*(store.get(f"key {index}") for index in range(200)))
        assert all(each == value for each in values)


# ---- cancellation, fork, loops


async def test_cancelling_connect_at_every_await(server: ThreadedServer) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for turns in range(40):
        connecting = task(TCPStore.connect("127.0.0.1", server.port))
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait([connecting])
        if not connecting.cancelled():
            await connecting.result().close()
    async with asyncio.timeout(60):  # the server, which is in this process, closes its ends a little later
        while len(os.listdir("/proc/self/fd")) > descriptors:  # noqa: ASYNC110 -- nothing tells
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "verb",
    [
        lambda store: store.get("absent"),
        lambda store: store.wait(["absent"]),
        lambda store: store.multi_get(["absent"]),
        lambda store: store.queue_pop("absent"),
        lambda store: store.set("k", "v"),
        lambda store: store.num_keys(),
    ],
    ids=["get", "wait", "multi_get", "queue_pop", "set", "num_keys"],
)
async def test_cancelling_a_verb_at_every_turn(
    server: ThreadedServer, namespace: str, verb: Callable[[TCPStore], Awaitable[object]]
) -> None:
    async with TCPStore("127.0.0.1", server.port, namespace=namespace) as store:
        for turns in range(8):
            calling = task(verb(store))
            for _ in range(turns):
                await asyncio.sleep(0)
            calling.cancel()
            await asyncio.wait([calling])
            assert await store.add("alive", 1) > turns
        await store.num_keys()
        assert store._pipeline is not None
        assert store._pipeline.idle  # the daemon has confirmed that nothing is left there


async def test_cancelling_close_closes(server: ThreadedServer) -> None:
    for turns in range(6):
        store = await TCPStore.connect("127.0.0.1", server.port)
        waiting = task(store.get("absent"))
        await expect_pending(waiting, store)
        closing = task(store.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        if turns == 0:
            await store.close()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            store.get("k")


async def test_forked_child_cannot_disturb_the_parent(server: ThreadedServer, namespace: str) -> None:
    async with TCPStore("127.0.0.1", server.port, namespace=namespace) as store:
        await store.set("k", "v")
        waiting = task(store.get("later"))
        await expect_pending(waiting, store)
        child = os.fork()
        if child == 0:
            try:
                store.set("k", "child")
            except ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222 -- it exits at once
        await store.set("later", "w")
        assert await waiting == b"w"
        assert await store.get("k") == b"v"


async def test_another_loop_is_refused(server: ThreadedServer) -> None:
    async with TCPStore("127.0.0.1", server.port) as store:

        async def use() -> None:
            await store.set("k", "v")

        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, use())


async def test_requests_of_one_turn_are_one_write(
    server: ThreadedServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TCPStore("127.0.0.1", server.port, namespace=namespace) as store:
        connection = store._connection
        assert connection is not None
        sends: list[int] = []
        send = connection._send_some
        monkeypatch.setattr(connection, "_send_some", lambda data: sends.append(len(data)) or send(data), raising=True)
        await asyncio.gather(*(store.set(f"k{index}", "v") for index in range(100)))
        assert len(sends) == 1


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        TCPStore("127.0.0.1", "29500")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="port"):
        TCPStore("127.0.0.1", 0)
    with pytest.raises(ValueError, match="namespace"):
        TCPStore("127.0.0.1", 1, namespace="x" * 256)
