"""SimulatedLoop: virtual time with a network in it, for programs that bring sockets, transports and many processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import heapq
import ipaddress
import socket
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack

from asyncdist.testing.endpoint import Endpoint
from asyncdist.testing.hosts import PROCESS, ProcessHandle, ProcessTimerHandle
from asyncdist.testing.loop import VirtualTimeLoop
from asyncdist.testing.simulated_socket import SimulatedSocket, Watcher
from asyncdist.testing.simulated_transport import SimulatedTransport

if TYPE_CHECKING:
    from asyncdist.testing.network import SimulatedNetwork

__all__ = ["SimulatedLoop", "SimulatedServer"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SimulatedServer:
    """What `SimulatedLoop.create_server` returns: as much of `asyncio.Server` as is needed to stop."""

    def __init__(self, sock: SimulatedSocket) -> None:
        self.sockets = (sock,)

    def close(self) -> None:
        """Listen no more; connections stay."""
        for sock in self.sockets:
            sock.close()

    async def wait_closed(self) -> None:
        """Return at once: nothing is left to be done after `close`."""


class SimulatedLoop(VirtualTimeLoop):
    """See the module. Everything that happens to a process's callbacks when it is paused or killed is decided here."""

    def __init__(self, network: SimulatedNetwork) -> None:
        super().__init__()
        self._network = network

    # ---- processes

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> asyncio.Handle:
        handle = ProcessHandle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As the base class; the timer fires only while its process runs."""
        self._check_closed()  # type: ignore[attr-defined]
        timer = ProcessTimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_again(self, handle: asyncio.Handle) -> None:
        """Run a callback that its paused process held back."""
        if not handle.cancelled():
            self._ready.append(handle)  # type: ignore[attr-defined]

    def create_task(self, coro: Any, *, context: Context | None = None, **options: Any) -> asyncio.Task[Any]:
        """As the base class; a process knows its tasks, so that they can be buried when it is killed."""
        task = super().create_task(coro, context=context, **options)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.tasks.append(task)
        return task

    # ---- sockets

    def new_socket(self, family: int, kind: int, proto: int = 0) -> SimulatedSocket:
        """Return a socket of the process that runs now; programs ask for it where `socket.socket` would be called."""
        return self._network.new_socket(family, kind, proto)

    async def getaddrinfo(self, host: Any, port: Any, **kwargs: Any) -> Any:
        """Return a numeric address as it is; there are no names here."""
        family = socket.AF_INET if ipaddress.ip_address(host).version == 4 else socket.AF_INET6
        return [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await self._network.connect(sock, address)

    async def sock_recv(self, sock: Any, n: int) -> bytes:
        while True:
            try:
                data: bytes = sock.recv(n)
                return data
            except BlockingIOError:
                await self._wait(self.add_reader, self.remove_reader, sock)

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        """Send all of `data` on a simulated socket."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[sock.send(rest) :]
            except BlockingIOError:
                await self._wait(self.add_writer, self.remove_writer, sock)

    async def _wait(self, add: Callable[..., None], remove: Callable[[Any], bool], sock: SimulatedSocket) -> None:
        ready = self.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        add(sock.fileno(), wake)
        try:
            await ready
        finally:
            remove(sock.fileno())

    def add_reader(self, fd: Any, callback: Callable[[Unpack[Ts]], Any], *args: *Ts) -> None:
        """Call back while a simulated socket can be read."""
        sock = self._socket(fd)
        sock.reader = Watcher(callback, args)
        if sock.endpoint is not None and sock.endpoint.readable:
            sock.on_readable()

    def remove_reader(self, fd: Any) -> bool:
        sock = self._network.socket_of(fd)
        if sock is None or sock.reader is None:
            return False
        sock.reader = None
        return True

    def add_writer(self, fd: Any, callback: Callable[[Unpack[Ts]], Any], *args: *Ts) -> None:
        """Call back while a simulated socket has room."""
        sock = self._socket(fd)
        sock.writer = Watcher(callback, args)
        if sock.endpoint is not None and sock.endpoint.writable:
            sock.on_writable()

    def remove_writer(self, fd: Any) -> bool:
        sock = self._network.socket_of(fd)
        if sock is None or sock.writer is None:
            return False
        sock.writer = None
        return True

    def _socket(self, fd: int) -> SimulatedSocket:
        sock = self._network.socket_of(fd)
        if sock is None:
            raise RuntimeError(f"{fd} is no socket of the simulated network; only these can be waited for")
        return sock

    async def create_server(self, protocol_factory: Callable[[], asyncio.BaseProtocol], **kwargs: Any) -> Any:  # type: ignore[override]
        """Serve on a simulated socket that listens; TLS is not simulated."""
        sock = kwargs.pop("sock", None)
        kwargs.pop("backlog", None)
        if not isinstance(sock, SimulatedSocket) or any(value is not None for value in kwargs.values()):
            raise NotImplementedError("a simulated server needs a simulated socket and nothing else")

        def accept(endpoint: Endpoint, address: tuple[str, int]) -> None:
            if not endpoint.closed:
                SimulatedTransport(self, endpoint, protocol_factory(), address, sock)

        process = sock.process

        def accept_soon(endpoint: Endpoint, address: tuple[str, int]) -> None:
            self.call_soon(accept, endpoint, address, context=process.context.copy())

        sock.serve(accept_soon)
        return SimulatedServer(sock)

    # ---- what takes time in threads

    def run_in_executor(
        self, executor: concurrent.futures.Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run `func(*args)` a little later, in this thread, unless the process is killed before."""
        future: asyncio.Future[T] = self.create_future()

        def answer(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            if not future.done():
                set_outcome(outcome)

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                self.call_later(self._network.work_s(), answer, future.set_exception, error)
            else:
                self.call_later(self._network.work_s(), answer, future.set_result, result)

        self.call_later(self._network.work_s(), work)
        return future
