"""A socket of a simulated network, and an asyncio transport on a simulated connection.

`SimulatedSocket` is as much of `socket.socket` as non-blocking stream code uses. `SimulatedTransport` has the buffering
and the back-pressure of asyncio's own.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Final, cast

from asyncdist.testing.endpoint import Endpoint, Options

if TYPE_CHECKING:
    from asyncdist.testing.hosts import SimulatedProcess
    from asyncdist.testing.loop import SimulatedLoop
    from asyncdist.testing.network import SimulatedNetwork

Address = tuple[str, int]


READ_BYTES: Final = 256 * 1024
"""What asyncio's transports read at most in one go."""

HIGH_WATER_BYTES: Final = 64 * 1024
"""asyncio's default."""


class Watcher:
    """A callback for when a socket can be read or written, with the context that it is called in."""

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.callback = callback
        self.arguments = arguments
        self.context: Context = copy_context()
        self.scheduled = False


class SimulatedSocket:
    """Satisfies `endpoint.EndpointUser`; belongs to the process that made it."""

    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess, descriptor: int, family: int) -> None:
        self._network = network
        self._descriptor = descriptor
        self.process = process
        self.family = family
        self.options: Options = {}
        self.endpoint: Endpoint | None = None
        self.backlog: list[tuple[Endpoint, Address]] = []
        self._accept: Callable[[Endpoint, Address], None] | None = None
        self.local: Address = ("", 0)
        self.remote: Address | None = None
        self.reader: Watcher | None = None
        self.writer: Watcher | None = None
        process.sockets[self] = None

    # ---- what processes call

    def fileno(self) -> int:
        """Return its descriptor, a number no real one has; -1 once closed."""
        return self._descriptor

    def setblocking(self, flag: bool) -> None:
        """Accept non-blocking mode only: nothing may block in virtual time."""
        if flag:
            raise ValueError("a simulated socket cannot block")

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Note an option. Only options about peers that do not answer have an effect."""
        self.options[level, option] = value

    def bind(self, address: Address) -> None:
        """Take a port of the host, a free one for 0. Raises OSError (EADDRINUSE)."""
        host = self.process.host
        port = address[1]
        if not port:
            host.last_port += 1
            port = host.last_port
        if port in host.listeners:
            raise OSError(errno.EADDRINUSE, "the address is in use")
        self.local = (address[0], port)

    def listen(self, backlog: int = 128) -> None:
        host = self.process.host
        if self.local[1] in host.listeners:
            raise OSError(errno.EADDRINUSE, "the address is in use")
        host.listeners[self.local[1]] = self

    def getsockname(self) -> Address:
        return self.local

    def getpeername(self) -> Address:
        """Return the other side's address. Raises OSError (ENOTCONN)."""
        if self.remote is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return self.remote

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send as much as there is room for; raises as `socket.send`."""
        return self._connected().send(data)

    def recv(self, count: int) -> bytes:
        """Return bytes that have arrived; raises as `socket.recv`."""
        return self._connected().receive(count)

    def recv_into(self, buffer: memoryview | bytearray) -> int:
        """Read into `buffer`; raises as `socket.recv_into` does."""
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def shutdown(self, how: int) -> None:
        if how != socket.SHUT_RD:
            self._connected().finish()

    def close(self) -> None:
        host = self.process.host
        if host.listeners.get(self.local[1]) is self:
            del host.listeners[self.local[1]]
        for endpoint, _ in self.backlog:
            endpoint.close()
        self.backlog.clear()
        self.reader = self.writer = None
        if self.endpoint is not None:
            self.endpoint.close()
        self._network.forget(self)
        self._descriptor = -1

    def _connected(self) -> Endpoint:
        if self.endpoint is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return self.endpoint

    # ---- what the loop and the network call

    def serve(self, accept: Callable[[Endpoint, Address], None]) -> None:
        """Give every connection to `accept`, also connections that came before."""
        self._accept = accept
        backlog, self.backlog = self.backlog, []
        for endpoint, address in backlog:
            accept(endpoint, address)

    def incoming(self, endpoint: Endpoint, address: Address) -> None:
        """Give a new connection to the server's callback, or keep the connection until there is a callback."""
        if self._accept is None:
            self.backlog.append((endpoint, address))
        else:
            self._accept(endpoint, address)

    def on_readable(self) -> None:
        """Call the reader in the next turn of the loop, and again as long as there are bytes to read."""
        self._schedule(self.reader, self._read)

    def on_writable(self) -> None:
        """Call the writer in the next turn of the loop, and again as long as there is room."""
        self._schedule(self.writer, self._write)

    def _schedule(self, watcher: Watcher | None, call: Callable[[Watcher], None]) -> None:
        if watcher is not None and not watcher.scheduled:
            watcher.scheduled = True
            self._network.loop.call_soon(call, watcher, context=watcher.context)

    def _read(self, watcher: Watcher) -> None:
        watcher.scheduled = False
        if watcher is self.reader and self.endpoint is not None and self.endpoint.readable:
            watcher.callback(*watcher.arguments)
            if self.endpoint.readable:
                self.on_readable()

    def _write(self, watcher: Watcher) -> None:
        watcher.scheduled = False
        if watcher is self.writer and self.endpoint is not None and self.endpoint.writable:
            watcher.callback(*watcher.arguments)
            if self.endpoint.writable:
                self.on_writable()


class _AcceptedSocket:
    """What `get_extra_info("socket")` gives: options and a number."""

    def __init__(self, endpoint: Endpoint, descriptor: int) -> None:
        self._endpoint = endpoint
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._endpoint.options[level, option] = value


class SimulatedTransport(asyncio.Transport):
    """Made by the loop for each accepted connection, in the context of the process that listens."""

    def __init__(
        self,
        loop: SimulatedLoop,
        endpoint: Endpoint,
        protocol: asyncio.BaseProtocol,
        peer: tuple[str, int],
        listener: SimulatedSocket,
    ) -> None:
        info = {
            "peername": peer,
            "sockname": listener.getsockname(),
            "socket": _AcceptedSocket(endpoint, endpoint.number),
        }
        super().__init__(info)
        self._loop = loop
        self._endpoint = endpoint
        self._protocol = cast(asyncio.Protocol, protocol)
        self._context: Context = copy_context()
        self._buffer = bytearray()
        self._high_bytes = HIGH_WATER_BYTES
        self._low_bytes = HIGH_WATER_BYTES // 4
        self._reading = True
        self._read_due = False
        self._write_due = False
        self._paused_protocol = False
        self._eof = False
        self._closing = False
        self._lost = False
        self._soon(self._begin)

    def _soon(self, call: Any, *arguments: Any) -> None:
        self._loop.call_soon(call, *arguments, context=self._context)

    def _begin(self) -> None:
        self._protocol.connection_made(self)
        self._endpoint.user = self
        self.on_readable()

    # ---- the endpoint's user

    def on_readable(self) -> None:
        """Read in the next turn of the loop."""
        if self._reading and not self._read_due and not self._closing:
            self._read_due = True
            self._soon(self._read)

    def on_writable(self) -> None:
        """Send the rest in the next turn of the loop."""
        if self._buffer and not self._write_due:
            self._write_due = True
            self._soon(self._write_more)

    def _read(self) -> None:
        self._read_due = False
        if not self._reading or self._closing or not self._endpoint.readable:
            return
        try:
            data = self._endpoint.receive(READ_BYTES)
        except OSError as error:
            self._fail(error)
            return
        if data:
            self._protocol.data_received(data)
            self.on_readable()
            return
        self._reading = False
        if not self._protocol.eof_received():
            self.close()

    def _write_more(self) -> None:
        self._write_due = False
        if self._lost:
            return
        try:
            del self._buffer[: self._send(self._buffer)]
        except OSError as error:
            self._fail(error)
            return
        if self._paused_protocol and len(self._buffer) <= self._low_bytes:
            self._paused_protocol = False
            self._protocol.resume_writing()
        if not self._buffer:
            if self._closing:
                self._lose(None)
            elif self._eof:
                self._endpoint.finish()

    def _send(self, data: bytes | bytearray | memoryview) -> int:
        try:
            return self._endpoint.send(data)
        except BlockingIOError:
            return 0

    def _fail(self, error: OSError) -> None:
        if not self._lost:
            self._buffer.clear()
            self._closing = True
            self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._endpoint.close()

    # ---- asyncio.Transport

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Read no more, send the buffered bytes, then close."""
        if not self._closing:
            self._closing = True
            self._reading = False
            if not self._buffer:
                self._lose(None)

    def abort(self) -> None:
        self._buffer.clear()
        self._closing = True
        self._lose(None)

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._closing and not self._reading:
            self._reading = True
            self.on_readable()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send as much of `data` as there is room for now, and the rest later."""
        if self._eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._lost or not data:
            return
        if self._buffer:
            self._buffer += data
        else:
            try:
                sent = self._send(data)
            except OSError as error:
                self._fail(error)
                return
            self._buffer += memoryview(data)[sent:]
        if len(self._buffer) > self._high_bytes and not self._paused_protocol:
            self._paused_protocol = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self._closing or self._eof:
            return
        self._eof = True
        if not self._buffer:
            self._endpoint.finish()

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the buffer sizes at which the protocol pauses and resumes writing."""
        self._high_bytes = HIGH_WATER_BYTES if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low
