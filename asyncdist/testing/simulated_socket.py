"""A socket of a simulated network: as much of `socket.socket` as non-blocking stream code uses."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

from asyncdist.testing.endpoint import Endpoint, Options

if TYPE_CHECKING:
    from asyncdist.testing.hosts import SimulatedProcess
    from asyncdist.testing.network import SimulatedNetwork

__all__ = ["SimulatedSocket", "Watcher"]

Address = tuple[str, int]


class Watcher:
    """A callback that wants to know when a socket can be read or written; called in its own context."""

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
        """Note an option; those about peers that do not answer have an effect."""
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
        """Send what there is room for; raises as `socket.send` does."""
        return self._connected().send(data)

    def recv(self, count: int) -> bytes:
        """Return what has arrived; raises as `socket.recv` does."""
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
        """Hand every connection to `accept`, also those that came before."""
        self._accept = accept
        backlog, self.backlog = self.backlog, []
        for endpoint, address in backlog:
            accept(endpoint, address)

    def incoming(self, endpoint: Endpoint, address: Address) -> None:
        """Give a new connection to whoever serves, or keep it until somebody does."""
        if self._accept is None:
            self.backlog.append((endpoint, address))
        else:
            self._accept(endpoint, address)

    def on_readable(self) -> None:
        """Call the reader in the next turn of the loop, and again as long as there is something to read."""
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
