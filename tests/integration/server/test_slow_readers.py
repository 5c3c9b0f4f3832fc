"""Many clients who ask for the same large value, and do not read: what the daemon holds for them is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from server_kit import SocketClient
from torch_wire_kit import SocketTorchClient
from waiting import eventually

from asyncdist_server import ServerConfig, StoreServer, serve
from asyncdist_server import messages as m
from asyncdist_server.config import limits_for
from asyncdist_server.connection import WRITE_HIGH_BYTES
from asyncdist_server.durability import parse_durability
from asyncdist_server.torch_wire import Query
from asyncdist_server.unsent import SMALL_REPLY_BYTES, UNSENT_PART

VALUE = bytes(8 << 20)
MEMORY_BYTES = 64 << 20
LITTLE_MEMORY_BYTES = 20 << 20
ROOM = MEMORY_BYTES // UNSENT_PART + len(VALUE) + 4096
READERS = 12
DEADLINE_S = 60.0
HALF = WRITE_HIGH_BYTES // 2
"""Too little to be noticed for itself."""


@contextlib.asynccontextmanager
async def daemon(memory_bytes: int = MEMORY_BYTES, **changes: Any) -> AsyncIterator[StoreServer]:
    limits = limits_for(len(VALUE), memory_bytes=memory_bytes)
    async with serve(ServerConfig(port=0, torch=True, limits=limits, **changes)) as server:
        yield server


def client(server: StoreServer, number: int) -> SocketClient:
    return SocketClient(server.port, client_id=b"client-%09d" % number)


@pytest.mark.parametrize("durability", ["memory", "durable"])
@pytest.mark.parametrize("blocked", [False, True])
async def test_they_wait_for_each_other_and_all_get_it(tmp_path: Path, blocked: bool, durability: str) -> None:
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
            await eventually(lambda: bool(server.unsent.waiting))
            assert server.unsent.count() <= ROOM
            assert await asyncio.to_thread(writer.ask, m.ADD, b"n", 1) == 1  # what is small goes on
            for reader in readers:
                assert (await asyncio.to_thread(reader.reply))[2] == VALUE
                assert server.unsent.count() <= ROOM
            assert await asyncio.to_thread(readers[-1].ask, m.ADD, b"n", 1) == 2
            await eventually(lambda: not server.unsent.waiting)


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
            await asyncio.to_thread(readers[0].send, Query.SET, b"k", VALUE)
            assert await asyncio.to_thread(readers[0].get, b"k") == VALUE
            for reader in readers:
                reader.send(Query.GET, b"k")
            await eventually(lambda: bool(server.unsent.waiting))
            assert server.unsent.count() <= ROOM
            for reader in readers:
                assert (await asyncio.to_thread(read, 8 + len(VALUE), reader))[8:] == VALUE
            await eventually(lambda: not server.unsent.waiting)


async def test_many_small_answers_that_nobody_reads_are_bounded_and_cut_off() -> None:
    """Each connection holds less than what makes one wait by itself; together they would exhaust the memory."""
    small = bytes(SMALL_REPLY_BYTES)
    async with daemon(stall_timeout_s=0.5, memory_bytes=LITTLE_MEMORY_BYTES) as server:

        def room(number: int) -> int:
            return LITTLE_MEMORY_BYTES // UNSENT_PART + len(VALUE) + 2 * SMALL_REPLY_BYTES * number + 4096

        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(await asyncio.to_thread(client, server, 0))
            await asyncio.to_thread(writer.ask, m.SET, b"small", small)
            await asyncio.to_thread(writer.ask, m.SET, b"large", VALUE)
            silent: list[SocketClient] = []
            while not server.unsent.waiting:
                silent.append(stack.enter_context(await asyncio.to_thread(client, server, len(silent) + 1)))
                assert len(silent) <= 2 * LITTLE_MEMORY_BYTES // UNSENT_PART // HALF
                silent[-1].socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                for connection in server._connections:
                    if connection._transport is not None:
                        sock = connection._transport.get_extra_info("socket")
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                while server.unsent.count() < len(silent) * HALF and not server.unsent.waiting:
                    ran = server.engine.counters.results[m.GET][m.OK]
                    silent[-1].send((m.GET, b"small", None))  # one at a time: together they would be a large answer
                    await eventually(lambda ran=ran: server.engine.counters.results[m.GET][m.OK] > ran)  # type: ignore[misc]
                    assert server.unsent.count() <= room(len(silent))
            assert await asyncio.to_thread(writer.ask, m.ADD, b"n", 1) == 1  # who reads goes on
            assert await asyncio.to_thread(writer.ask, m.GET, b"large", None) == VALUE  # once those are cut off
            assert server.engine.counters.dropped.keys() == {"slow"}
            assert server.unsent.count() <= room(len(silent))


async def test_who_goes_away_makes_room() -> None:
    async with daemon() as server:
        with contextlib.ExitStack() as stack:
            writer = stack.enter_context(await asyncio.to_thread(client, server, 0))
            await asyncio.to_thread(writer.ask, m.SET, b"k", VALUE)
            for number in range(1, 1 + READERS):
                reader = stack.enter_context(await asyncio.to_thread(client, server, number))
                reader.send((m.GET, b"k", None), (m.GOODBYE,))  # the daemon is to close, and may not yet
            await eventually(lambda: bool(server.unsent.waiting))
        await eventually(lambda: server.connection_count == 0)
        assert not server.unsent.waiting
        assert server.unsent.count() == 0


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
            await eventually(lambda: sum(found._paused for found in server._connections) == clients)
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
                assert server.unsent.count() <= 2 * len(VALUE) + 4096
            assert await asyncio.to_thread(reader.ask, m.ADD, b"n", 1) == 1
