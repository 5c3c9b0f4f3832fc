"""A TCP proxy that cuts connections in the middle of frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

CHUNK_BYTES = 4096


class CuttingProxy:
    """Passes bytes on until `cut_after` of them went in one direction, then resets both sides.

    `plan(connection_number)` says after how many bytes to cut the connection to the client and to the server; None for
    never.
    """

    def __init__(self, target_port: int, plan: Callable[[int], tuple[int | None, int | None]]) -> None:
        self.port = 0
        self.connections = 0
        self.cuts = 0
        self._target_port = target_port
        self._plan = plan
        self._spoil = False

    async def serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until one side ends it or the plan does."""
        self.connections += 1
        to_server, to_client = self._plan(self.connections)
        opening = asyncio.ensure_future(asyncio.open_connection("127.0.0.1", self._target_port))
        try:
            other_reader, other_writer = await asyncio.shield(opening)
        except OSError:
            writer.transport.abort()
            return
        except asyncio.CancelledError:  # asyncio may leave the socket open where opening itself is cancelled
            with contextlib.suppress(OSError):
                _, late = await opening
                late.transport.abort()
            raise
        pumps = [
            asyncio.ensure_future(self._pump(reader, other_writer, to_server, may_spoil=True)),
            asyncio.ensure_future(self._pump(other_reader, writer, to_client)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for each in (writer, other_writer):  # before anything is awaited, where this task may be cancelled
                each.transport.abort()
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in (writer, other_writer):
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    def spoil_next_chunk_to_server(self) -> None:
        """Change a bit of the last byte of what a client sends next."""
        self._spoil = True

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limit: int | None,
        *,
        may_spoil: bool = False,
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if may_spoil and self._spoil:
                data, self._spoil = data[:-1] + bytes([data[-1] ^ 1]), False
            if limit is not None:
                data, limit = data[:limit], limit - len(data)
            writer.write(data)
            with contextlib.suppress(OSError):
                await writer.drain()
            if limit is not None and limit <= 0:
                self.cuts += 1
                return


@asynccontextmanager
async def cutting_proxy(
    target_port: int, plan: Callable[[int], tuple[int | None, int | None]]
) -> AsyncIterator[CuttingProxy]:
    """Run a proxy on a free port."""
    proxy = CuttingProxy(target_port, plan)
    running: set[asyncio.Future[None]] = set()
    accepted: list[asyncio.StreamWriter] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        task = asyncio.ensure_future(proxy.serve_client(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for writer in accepted:  # a task that is cancelled before it begins closes nothing
            writer.close()
        await server.wait_closed()
