"""VirtualTimeLoop: an event loop whose clock jumps to the next timer instead of waiting for it.

A simulated hour takes as long as its callbacks. When nothing is ready and no timer is set, nothing can happen any more:
the program is deadlocked, and the loop raises `DeadlockError` instead of hanging. Threads, executors and sockets would
wake the loop from outside its time, so executors run inline, and file descriptors are refused. `SimulatedLoop` adds a
simulated network, for programs with sockets, transports and many processes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import heapq
import ipaddress
import math
import os
import selectors
import socket
from collections.abc import Callable, Mapping
from contextvars import Context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, TypeVarTuple, Unpack

from asyncdist.testing.endpoint import Endpoint
from asyncdist.testing.hosts import PROCESS, ProcessHandle, ProcessTimerHandle
from asyncdist.testing.simulated_socket import SimulatedSocket, SimulatedTransport, Watcher

if TYPE_CHECKING:
    from asyncdist.testing.network import SimulatedNetwork

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


_INTERNAL: Final = tuple(f"{folder}{os.sep}" for folder in (Path(asyncio.__file__).parent, Path(__file__).parents[1]))
"""Folders whose lines the report of a deadlock leaves out: they are not the user's program."""


class DeadlockError(RuntimeError):
    """Every task waits for what nothing can bring about; the message lists the tasks."""


class _VirtualSelector(selectors.BaseSelector):
    """Waits by moving the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.idle: Callable[[], NoReturn] | None = None
        self.turns = 0
        self.max_turns = math.inf
        self.expire: Callable[[], None]
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Take note of the loop's own wake-up socket; refuse any other."""
        if self._keys:
            raise RuntimeError("file descriptors cannot be waited for in virtual time; use the in-memory transport")
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fd] = key = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Move the clock by `timeout`; None means that nothing is left to wait for."""
        self.turns += 1
        if self.turns >= self.max_turns:
            self.expire()
        if timeout is None and self.idle is not None:
            self.idle()
        elif timeout is not None and timeout > 0:
            self.now_s += timeout
        return []

    def close(self) -> None:
        self._keys.clear()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module. `time()` starts at 0 and is exact: a sleep of an hour ends 3600 seconds later."""

    virtual_time = True

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)
        self._virtual.idle = self._deadlocked

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual.now_s

    def limit_idle_turns(self, turns: int, progress: Callable[[], object]) -> None:
        """Raise DeadlockError once `progress()` has stayed the same for `turns` turns of the loop, or some more."""
        seen = progress()

        def expire() -> None:
            nonlocal seen
            self._virtual.turns = 0
            before, seen = seen, progress()
            if seen == before:
                self._virtual.max_turns = math.inf  # what is cancelled now is to end
                raise DeadlockError(
                    f"no message between ranks in {turns} turns of the event loop, at {self.time():g} s now: one of "
                    "these tasks repeats itself for ever: " + self._waiting()
                )

        self._virtual.turns, self._virtual.max_turns, self._virtual.expire = 0, turns, expire

    def run_in_executor(
        self, executor: concurrent.futures.Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def set_default_executor(self, executor: concurrent.futures.Executor) -> None:
        """Refused: work in threads takes no virtual time."""
        raise RuntimeError("executors run inline in virtual time")

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As `call_soon`: there is no other thread to be woken for."""
        return self.call_soon(callback, *args, context=context)

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there is no network in virtual time."""
        raise RuntimeError("there is no network in virtual time; use the in-memory transport")

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Refused: there is no network in virtual time."""
        raise RuntimeError("there is no network in virtual time; use the in-memory transport")

    def _deadlocked(self) -> NoReturn:
        raise DeadlockError(
            f"nothing can happen any more at {self.time():g} s, and these tasks wait: " + self._waiting()
        )

    def _waiting(self) -> str:
        """Where each task waits. Tasks that run no line of the program come only if there are no others."""
        tasks = [task for task in asyncio.all_tasks(self) if not task.done()]
        places = [(task.get_name(), *_where(task.get_coro())) for task in tasks]
        shown = [place for place in places if place[2]] or places
        return "; ".join(sorted(f"{name}: {place}" for name, place, _ in shown))


def _where(awaited: Any) -> tuple[str, bool]:
    """Where a coroutine waits, in which call, and for what; and whether the line belongs to the program.

    The line is the innermost one outside asyncio and asyncdist, if there is one.
    """
    place, called, ours = repr(awaited), "", False
    while frame := getattr(awaited, "cr_frame", None):
        internal = frame.f_code.co_filename.startswith(_INTERNAL)
        if internal and ours:
            called = called or f" in {awaited.__qualname__}"
        else:
            place = f"{awaited.__qualname__} at {frame.f_code.co_filename}:{frame.f_lineno}"
            called, ours = "", not internal
        awaited = awaited.cr_await
    frame = getattr(awaited, "gi_frame", None)  # of an __await__
    waited_for = frame.f_locals.get("self") if frame is not None else None
    return place + called + ("" if waited_for is None else f" for {waited_for!r}"), ours


class SimulatedServer:
    """What `SimulatedLoop.create_server` returns: the part of `asyncio.Server` that stops it."""

    def __init__(self, sock: SimulatedSocket) -> None:
        self.sockets = (sock,)

    def close(self) -> None:
        """Listen no more; connections stay."""
        for sock in self.sockets:
            sock.close()

    async def wait_closed(self) -> None:
        """Return at once: nothing is left to be done after `close`."""


class SimulatedLoop(VirtualTimeLoop):
    """Virtual time with a network. Callbacks of a paused process wait, those of a killed one are dropped."""

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
        """Return a socket of the process that runs now. Programs call this in place of `socket.socket`."""
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
