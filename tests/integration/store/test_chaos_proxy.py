"""The chaos proxy: what it passes on, cuts, delays, and leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from chaos_proxy import Chaos, chaos_proxy

DATA = bytes(range(256)) * 400
PIECE_BYTES = 1024
DEADLINE_S = 60.0


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A server that answers everything with itself; returns its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def through(port: int, data: bytes = DATA) -> bytes:
    """What comes back of `data`, which is sent piece by piece, up to the end or a reset of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    back = b""
    try:
        async with asyncio.timeout(DEADLINE_S):
            for start in range(0, len(data), PIECE_BYTES):
                writer.write(data[start : start + PIECE_BYTES])
                back += await reader.readexactly(len(data[start : start + PIECE_BYTES]))
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.transport.abort()
    return back


async def at_end(reader: asyncio.StreamReader) -> None:
    """Return once the connection has ended or was reset."""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(DEADLINE_S):
            await reader.read()


async def test_without_chaos_all_bytes_pass() -> None:
    async with echo() as port, chaos_proxy("127.0.0.1", port, Chaos()) as proxy:
        assert await through(proxy.port) == DATA
        assert (proxy.connections, proxy.cuts) == (1, 0)


async def test_pieces_and_delays_keep_the_order() -> None:
    chaos = Chaos(piece=1000, delayed=0.2, delay=0.001)
    async with echo() as port, chaos_proxy("127.0.0.1", port, chaos, seed=3) as proxy:
        assert await asyncio.gather(through(proxy.port), through(proxy.port)) == [DATA, DATA]


async def test_cuts_come_in_the_middle() -> None:
    async with echo() as port, chaos_proxy("127.0.0.1", port, Chaos(cut_after=20_000, stall=0.01), seed=1) as proxy:
        lengths = []
        for _ in range(30):
            back = await through(proxy.port)
            assert DATA.startswith(back)
            lengths.append(len(back))
        assert proxy.cuts >= 20
        assert len(set(lengths)) >= 15


async def test_a_seed_says_when_to_cut() -> None:
    async def lengths(seed: int) -> list[int]:
        async with echo() as port, chaos_proxy("127.0.0.1", port, Chaos(cut_after=20_000), seed=seed) as proxy:
            return [len(await through(proxy.port)) for _ in range(10)]

    first, second, other = await lengths(1), await lengths(1), await lengths(2)
    assert first == second
    assert first != other


async def test_nobody_behind_it() -> None:
    async with echo() as port:
        pass
    async with chaos_proxy("127.0.0.1", port, Chaos()) as proxy:
        assert await through(proxy.port) == b""


@pytest.mark.parametrize("stall", [0.0, 60.0])
async def test_it_ends_what_it_carries_when_it_ends(stall: float) -> None:
    async with echo() as port:
        async with chaos_proxy("127.0.0.1", port, Chaos(cut_after=1.0, early=0.0, stall=stall)) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(DATA)
            if not stall:
                await at_end(reader)
        await at_end(reader)
        writer.transport.abort()
