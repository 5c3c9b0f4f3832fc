"""A TCP proxy that treats its connections as badly as networks do, by seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

__all__ = ["Chaos", "ChaosProxy", "chaos_proxy"]

READ_BYTES: Final = 64 * 1024
"""What is read at once; pieces passed on are smaller."""
CLOSE_TIMEOUT_S: Final = 1.0
"""How long the last bytes of a connection that ends by itself may take to their reader."""
HEAD_BYTES: Final = 300
"""About what a handshake takes: short lives of connections are drawn around it, so that it is cut as well."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """What happens to connections.

    Args:
        cut_after: mean number of bytes after which a connection is cut, counted in each direction by itself, in the
            middle of whatever these bytes are; 0 for never.
        early: share of connections that live for about a handshake only.
        delayed, delay: share of the pieces that wait, and the longest wait in seconds. Order is kept.
        piece: most bytes passed on at once; they arrive in pieces of any size up to this.
        stall: longest time in seconds for which a cut connection says nothing before its two sides learn of the cut,
            and for which one of them learns of it later than the other.
    """

    cut_after: float = 0.0
    early: float = 0.1
    delayed: float = 0.0
    delay: float = 0.0
    piece: int = READ_BYTES
    stall: float = 0.0


class ChaosProxy:
    """A proxy that is serving; see `chaos_proxy`. `cuts` counts the connections it has cut."""

    def __init__(self, host: str, port: int, chaos: Chaos, seed: int) -> None:
        self.port = 0
        self.connections = 0
        self.cuts = 0
        self._target = host, port
        self._chaos = chaos
        self._seed = seed

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection to its end."""
        self.connections += 1
        rng = random.Random(f"{self._seed} {self.connections}")
        sides = [writer]
        pumps: list[asyncio.Task[bool]] = []
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            sides.append(far_writer)
            up, down = self._budget(rng), self._budget(rng)
            pumps.append(asyncio.create_task(self._pump(reader, far_writer, up, random.Random(rng.random()))))
            pumps.append(asyncio.create_task(self._pump(far_reader, writer, down, random.Random(rng.random()))))
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if any(pump.result() for pump in done):
                self.cuts += 1
                for pump in pumps:
                    pump.cancel()
                await self._end(sides, rng)
            else:
                await self._close(sides)
        except OSError:
            pass  # nothing listens there, or one side has reset its connection: the other one learns of it below
        finally:
            for pump in pumps:
                pump.cancel()
            for side in sides:
                side.transport.abort()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _close(self, sides: list[asyncio.StreamWriter]) -> None:
        """Close both sides, after what was read from one has reached the other; bounded."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for side in sides:
                    side.close()
                    await side.wait_closed()

    def _budget(self, rng: random.Random) -> float:
        """Return how many bytes one direction of a new connection carries."""
        if not self._chaos.cut_after:
            return float("inf")
        if rng.random() < self._chaos.early:
            return rng.expovariate(1 / HEAD_BYTES)
        return rng.expovariate(1 / self._chaos.cut_after)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: float, rng: random.Random
    ) -> bool:
        """Pass bytes on; returns whether the connection is to be cut, rather than over."""
        chaos = self._chaos
        while data := await reader.read(READ_BYTES):
            while data:
                if rng.random() < chaos.delayed:
                    await asyncio.sleep(rng.uniform(0.0, chaos.delay))
                size = min(len(data), rng.randint(1, chaos.piece))
                if writer.transport.is_closing():
                    return False
                writer.write(data[: int(min(size, budget))])
                budget -= size
                data = data[size:]
                await writer.drain()
                if budget <= 0:
                    return True
        return False

    async def _end(self, sides: list[asyncio.StreamWriter], rng: random.Random) -> None:
        """Let both sides learn of a cut: some time later, in any order, as an end or as a reset."""
        rng.shuffle(sides)
        for side in sides:
            if rng.random() < 0.5:
                await asyncio.sleep(rng.uniform(0.0, self._chaos.stall))
            if rng.random() < 0.5:
                side.transport.abort()
            side.close()


@asynccontextmanager
async def chaos_proxy(host: str, port: int, chaos: Chaos, *, seed: int = 0) -> AsyncIterator[ChaosProxy]:
    """Serve on a free port of 127.0.0.1 (`.port`) for a server that may come and go; ends all connections at the end.

    The n-th connection is treated alike in every run with the same `seed`, as far as its bytes are the same.
    """
    proxy = ChaosProxy(host, port, chaos, seed)
    running: set[asyncio.Task[None]] = set()
    accepted: set[asyncio.StreamWriter] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.add(writer)
        task = asyncio.get_running_loop().create_task(proxy.carry(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(lambda _: accepted.discard(writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        left = list(accepted)
        await asyncio.gather(*running, return_exceptions=True)
        for writer in left:  # a task that is cancelled before it begins closes nothing
            writer.transport.abort()
        with contextlib.suppress(OSError):
            await server.wait_closed()
