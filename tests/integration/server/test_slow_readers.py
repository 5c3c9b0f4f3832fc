"""Clients who ask for large values and do not read: what the daemon holds for them is bounded, and nobody waits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from server_kit import SocketClient
from torch_wire_kit import SocketTorchClient
from waiting import eventually

from asyncdist_server import ServerConfig, StoreServer, serve
from asyncdist_server.engine.replies import PIECE_BYTES, SMALL_BYTES
from asyncdist_server.journal.journal import parse_durability
from asyncdist_server.serving.config import limits_for
from asyncdist_server.serving.connection import Connection
from asyncdist_server.torch.wire import Query
from asyncdist_server.wire import messages as m

VALUE = bytes(8 << 20)
MEMORY_BYTES = 64 << 20
LITTLE_MEMORY_BYTES = 20 << 20
UNREAD_BYTES = SMALL_BYTES + PIECE_BYTES + 1024
"""What a client may have unread besides what the kernel holds; the last is what msgpack and lengths take."""
KERNEL_BYTES = 128 << 10
"""What a kernel holds of what is not read; a sender's holds 4 MiB at most, less than a value."""
READERS = 12
DEADLINE_S = 60.0
HELD_S = 0.03
"""For what takes a millisecond, but for a few large blocks that the allocator moves."""
PROMPT_S = 1.0
"""For what takes a millisecond, on a machine that does other things as well."""


@contextlib.asynccontextmanager
async def daemon(memory_bytes: int = MEMORY_BYTES, **changes: Any) -> AsyncIterator[StoreServer]:
    limits = limits_for(len(VALUE), memory_bytes=memory_bytes)
    async with serve(ServerConfig(port=0, torch=True, limits=limits, **changes)) as server:
        yield server


def client(server: StoreServer, number: int, namespace: str = "job") -> SocketClient:
    made = SocketClient(server.port, client_id=b"client-%09d" % number, namespace=namespace)
    made.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    return made


def unread_bytes(server: StoreServer) -> int:
    """What the daemon holds of answers that it has made for clients."""
    transports = [connection._transport for connection in server._connections]
    return sum(transport.get_write_buffer_size() for transport in transports if transport is not None)


@pytest.mark.parametrize("ended", [False, True])
async def test_who_reads_nothing_holds_nobody_up_neither_while_it_lives_nor_when_it_ends(ended: bool) -> None:
    """Answers of all sizes to another job: those of many small values are copied, those of a large one referred to."""
    async with daemon() as server:

        def work() -> None:
            with contextlib.ExitStack() as stack:
                other = stack.enter_context(client(server, 0, "other"))
                other.ask(m.SET, b"100 KiB", bytes(100 << 10))
                other.ask(m.SET, b"1 MiB", bytes(1 << 20))
                many = [b"%d" % number for number in range(1000)]
                other.ask(m.MULTI_SET, many, [bytes(1000)] * len(many))
                writer = stack.enter_context(client(server, 1))
                writer.ask(m.SET, b"k", VALUE)
                writer.ask(m.MULTI_SET, many, [bytes(8000)] * len(many))
                lazy = [stack.enter_context(client(server, 2 + number)) for number in range(4 * READERS)]
                for number, each in enumerate(lazy):
                    each.send((m.GET, b"k", None) if number % 2 else (m.MULTI_GET, many, None))
                while server.unsaid.waiting_count < len(lazy):
                    assert other.ask(m.PING) is None
                for each in lazy if ended else ():
                    each.close()
                began_s = time.monotonic()
                for _ in range(3):
                    assert other.ask(m.GET, b"100 KiB", None) == bytes(100 << 10)
                    assert other.ask(m.GET, b"1 MiB", None) == bytes(1 << 20)
                    assert other.ask(m.MULTI_GET, many, None) == (bytes(1000),) * len(many)
                assert time.monotonic() - began_s < PROMPT_S
                assert unread_bytes(server) <= server.connection_count * UNREAD_BYTES
                assert server.unsaid.count() <= len(VALUE) + 8000 * len(many)

        await asyncio.to_thread(work)


@pytest.mark.parametrize("durability", ["memory", "durable"])
@pytest.mark.parametrize("blocked", [False, True])
async def test_they_all_get_it(tmp_path: Path, blocked: bool, durability: str) -> None:
    kept = {} if durability == "memory" else {"durability": parse_durability(durability), "data_dir": tmp_path}
    async with daemon(**kept) as server:
        with contextlib.ExitStack() as stack:
            writer = await asyncio.to_thread(client, server, 0)
            stack.callback(writer.close)
            if not blocked:
                await asyncio.to_thread(writer.ask, m.SET, b"k", VALUE)
            readers = [await asyncio.to_thread(client, server, number) for number in range(1, 1 + READERS)]
            for reader in readers:
                stack.callback(reader.close)
                reader.send((m.GET, b"k", None))
            if blocked:
                await eventually(lambda: server.engine.waiter_count == READERS)
                await asyncio.to_thread(writer.ask, m.SET, b"k", VALUE)
            await eventually(lambda: server.unsaid.waiting_count == READERS)
            await asyncio.to_thread(writer.ask, m.DELETE, b"k")  # those who wait for it have it nevertheless
            assert server.unsaid.count() == len(VALUE)
            for reader in readers:
                assert unread_bytes(server) <= READERS * UNREAD_BYTES
                assert (await asyncio.to_thread(reader.reply))[2] == VALUE
            assert await asyncio.to_thread(readers[-1].ask, m.ADD, b"n", 1) == 1
            await eventually(lambda: not server.unsaid.waiting_count)
            assert server.held_bytes == 0


async def test_torch_clients_too() -> None:
    async with daemon() as server:
        with contextlib.ExitStack() as stack:

            def read(size: int, reader: SocketTorchClient) -> bytes:
                found = b""
                while len(found) < size:
                    found += reader.socket.recv(1 << 20)
                return found

            readers = [await asyncio.to_thread(SocketTorchClient, server.port) for _ in range(READERS)]
            for reader in readers:
                stack.callback(reader.close)
                reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
            await asyncio.to_thread(readers[0].send, Query.SET, b"k", VALUE)
            assert await asyncio.to_thread(readers[0].get, b"k") == VALUE
            for reader in readers:
                reader.send(Query.GET, b"k")
            await eventually(lambda: server.unsaid.waiting_count == READERS)
            assert server.unsaid.count() <= len(VALUE) + 8 * READERS
            for reader in readers:
                assert unread_bytes(server) <= READERS * UNREAD_BYTES
                assert (await asyncio.to_thread(read, 8 + len(VALUE), reader))[8:] == VALUE
            await eventually(lambda: not server.unsaid.waiting_count)


async def test_who_says_goodbye_behind_a_large_answer_gets_it() -> None:
    async with daemon() as server:

        def work() -> None:
            with client(server, 0) as reader:
                reader.ask(m.SET, b"k", VALUE)
                reader.send((m.GET, b"k", None), (m.GET, b"k", None), (m.GOODBYE,))
                assert reader.reply()[2] == reader.reply()[2] == VALUE
                assert reader.reply()[1] == m.OK
                assert reader.closed_by_daemon()

        await asyncio.to_thread(work)


async def test_small_answers_that_are_not_read_are_bounded_and_their_client_is_cut_off() -> None:
    small = bytes(SMALL_BYTES)
    async with daemon(stall_timeout_s=0.2) as server:
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(await asyncio.to_thread(client, server, 0))
            await asyncio.to_thread(writer.ask, m.SET, b"small", small)
            silent = [stack.enter_context(await asyncio.to_thread(client, server, 1 + number)) for number in range(3)]
            for each in silent:
                each.send(*[(m.GET, b"small", None)] * 1000)  # more than kernels hold
            while server.connection_count > 1:
                assert unread_bytes(server) <= server.connection_count * UNREAD_BYTES
                assert await asyncio.to_thread(writer.ask, m.GET, b"small", None) == small  # who reads goes on
            assert server.engine.counters.dropped == {"slow": len(silent)}


async def test_nothing_is_left_of_who_goes_away() -> None:
    async with daemon() as server:
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(await asyncio.to_thread(client, server, 0))
            await asyncio.to_thread(writer.ask, m.SET, b"k", VALUE)
            for number in range(1, 1 + READERS):
                reader = stack.enter_context(await asyncio.to_thread(client, server, number))
                reader.send((m.GET, b"k", None), (m.GOODBYE,))  # the daemon is to close, and may not yet
            await eventually(lambda: server.unsaid.waiting_count == READERS)
        await eventually(lambda: server.connection_count == 0)
        assert not server.unsaid.waiting_count


async def test_what_is_to_be_said_later_is_bounded_for_all_together() -> None:
    """Values that were deleted meanwhile are the store's no more and yet there."""
    each, clients, values = 1 << 20, 20, 6
    async with daemon(memory_bytes=LITTLE_MEMORY_BYTES, stall_timeout_s=DEADLINE_S) as server:
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(await asyncio.to_thread(client, server, 0))
            await asyncio.to_thread(writer.ask, m.SET, b"large", VALUE)
            for number in range(1, 1 + clients):
                reader = stack.enter_context(await asyncio.to_thread(client, server, number))
                waits = [(m.GET, b"%d %d" % (number, value), None) for value in range(values)]
                reader.send(*waits, (m.GET, b"large", None))
            await eventually(lambda: server.engine.waiter_count == clients * values)
            await eventually(lambda: server.unsaid.waiting_count == clients)
            for number in range(clients * values):
                key = b"%d %d" % (1 + number % clients, number // clients)
                await asyncio.to_thread(writer.ask, m.SET, key, bytes(each))
                await asyncio.to_thread(writer.ask, m.DELETE, key)
                assert server.unsaid.count() <= LITTLE_MEMORY_BYTES
                held = sum(connection._session.reply_bytes for connection in server._connections)
                assert held <= LITTLE_MEMORY_BYTES + clients * len(VALUE)
            assert server.engine.counters.dropped.keys() == {"slow"}
            assert server.connection_count > 1  # not all of them


async def test_many_large_answers_to_one_client_are_made_as_it_reads_them() -> None:
    """Tasks of one program that wait for the same key share a connection."""
    async with daemon() as server:
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(await asyncio.to_thread(client, server, 0))
            reader = stack.enter_context(await asyncio.to_thread(client, server, 1))
            gets = READERS // 2
            reader.send(*[(m.GET, b"k", None)] * gets)
            await eventually(lambda: server.engine.waiter_count == gets)
            await asyncio.to_thread(writer.ask, m.SET, b"k", VALUE)
            for _ in range(gets):
                assert (await asyncio.to_thread(reader.reply))[2] == VALUE
                assert unread_bytes(server) <= UNREAD_BYTES
            assert await asyncio.to_thread(reader.ask, m.ADD, b"n", 1) == 1


@pytest.mark.parametrize("torch", [False, True], ids=["native", "torch"])
async def test_no_large_value_holds_the_loop(monkeypatch: pytest.MonkeyPatch, torch: bool) -> None:
    """Measured in the loop's own processor time. To decode one of 32 MiB at once takes more than 50 ms."""
    value = bytes(32 << 20)
    taken_s: list[float] = []

    def timed(name: str) -> None:
        genuine = getattr(Connection, name)

        def measured(*arguments: Any) -> Any:
            began_s = time.thread_time()
            genuine(*arguments)
            taken_s.append(time.thread_time() - began_s)

        monkeypatch.setattr(Connection, name, measured)

    for name in ("data_received", "take_turn", "resume_writing"):
        timed(name)
    async with serve(ServerConfig(port=0, torch=True)) as server:

        def work() -> None:
            with client(server, 0) as native, SocketTorchClient(server.port) as other:
                if torch:
                    other.send(Query.SET, b"/k", value)
                    assert other.get(b"/k") == value
                else:
                    native.ask(m.SET, b"k", value)
                    assert native.ask(m.GET, b"k", None) == value

        await asyncio.to_thread(work)
    assert max(taken_s) < HELD_S, sorted(taken_s)[-5:]
