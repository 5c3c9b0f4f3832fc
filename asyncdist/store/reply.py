"""Reply, the future of one store request; Lookout, which spins for it; and the exception for each reply code."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Callable, Generator, Mapping
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from asyncdist.concurrency.spin import CATCH, TURN_S, Persistence
from asyncdist.errors import (
    ClosedError,
    DistError,
    DistStoreError,
    LeaseLostError,
    QueueEmptyError,
    StoreLimitError,
    StoreTimeoutError,
    WatchCompactedError,
)
from asyncdist.inspect.recorder import ENDED, NOTE, RECORDER, Entry
from asyncdist.store.base import decoded_key
from asyncdist_server.serving.sockets import served_here
from asyncdist_server.wire import messages
from asyncdist_server.wire.key_text import shown

if TYPE_CHECKING:
    from asyncdist.store.store_connection import Connection

WAITING: Final = frozenset(
    {messages.GET, messages.WAIT, messages.MULTI_GET, messages.QUEUE_POP, messages.WATCH, messages.LOCK, messages.JOIN}
)
"""Operations that wait for other clients; the last element of their requests is `timeout_ms`."""

TAKING: Final = frozenset({messages.QUEUE_POP, messages.LOCK, messages.JOIN})
"""Operations that take an item, a lock or a place. If the caller was cancelled meanwhile, it is given back."""

ALONE: Final = 4
"""A task that has sent so many requests in a row, each alone, spins for the reply to the next."""

SHOWN_KEYS: Final = 5
"""Most keys of a request that an error message shows."""

CONVERSIONS: Final[Mapping[int, Callable[[Any], Any]]] = {
    messages.MULTI_GET: list,
    messages.LIST_KEYS: lambda page: (page[0], list(map(decoded_key, page[1]))),
}
"""Operations whose value on the wire is not what the caller gets."""


class ReplyOwner(Protocol):
    """The object that issued a request and settles its reply."""

    @property
    def lookout(self) -> Lookout | None:
        """Spins for a reply that is awaited; None if nothing does."""

    def withdraw(self, reply: Reply) -> None:
        """Note that `reply` was cancelled, and make sure that its request takes nothing from a queue."""


class Reply(asyncio.Future[Any]):
    """A future that tells its owner when it is cancelled.

    `request` is the request as on the wire, (id, operation, arguments...); `deadline` the loop's time at which the
    owner gives up by itself. A done-callback instead of `cancel` would cost a turn of the loop per request.
    """

    __slots__ = ("deadline", "entry", "owner", "request")

    empty_is_error: ClassVar[bool] = False
    deadline: float
    owner: ReplyOwner
    request: tuple[Any, ...]
    entry: Entry | None
    """What the recorder has of a request that waits for other clients."""

    def __await__(self) -> Generator[Any, None, Any]:
        lookout = self.owner.lookout
        if lookout is not None and not self.done() and lookout.seek(self):
            yield
        return (yield from super().__await__())

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the waiting and withdraw the request where that is possible."""
        if not super().cancel(msg):
            return False
        self._ended("was withdrawn")
        self.owner.withdraw(self)
        return True

    def set_exception(self, exception: type | BaseException, /) -> None:
        """Fail."""
        super().set_exception(exception)
        self._ended(str(exception))

    def _ended(self, error: str) -> None:
        if self.entry is not None:
            self.entry[ENDED], self.entry[NOTE] = monotonic(), error


class NonBlockingPop(Reply):
    """The reply to `queue_pop(block=False)`, whose expiry is `QueueEmptyError`."""

    __slots__ = ()

    empty_is_error = True


def record_wait(reply: Reply, loop: asyncio.AbstractEventLoop) -> None:
    """Let the recorder know of a request that has just been issued, if it waits for other clients."""
    reply.entry = None
    operation = reply.request[1]
    if operation in WAITING and RECORDER.on:
        reply.entry = RECORDER.wait(messages.OPERATION_NAMES[operation], reply.request[2], loop)


def settle(reply: Reply, code: int, value: Any, where: str) -> None:
    """Give `reply`, which must not be done, the outcome that the reply code and value of the wire mean."""
    if code == messages.OK:
        convert = CONVERSIONS.get(reply.request[1])
        reply.set_result(value if convert is None else convert(value))
        if reply.entry is not None:
            reply.entry[ENDED] = monotonic()
    elif code == messages.CANCELLED:
        asyncio.Future.cancel(reply)
    else:
        reply.set_exception(failure(reply, code, value, where))


def failure(reply: Reply, code: int, value: Any, where: str) -> DistStoreError:
    """Return the exception for a reply code other than OK."""
    what = f"{where}: {describe(reply.request)}"
    if code == messages.TIMEOUT:
        if reply.empty_is_error:
            return QueueEmptyError(f"{what}: the queue is empty")
        if isinstance(value, str):
            return StoreTimeoutError(f"{what} timed out after {reply.request[-1] / 1000:g} s: {value}", [])
        missing = ", ".join(map(shown, value))
        text = f"{what} timed out after {reply.request[-1] / 1000:g} s, still missing: {missing}"
        return StoreTimeoutError(text, list(map(decoded_key, value)))
    if code == messages.LIMIT:
        return StoreLimitError(f"{what}: {value}")
    kinds = {messages.COMPACTED: WatchCompactedError, messages.LEASE_LOST: LeaseLostError}
    return kinds.get(code, DistStoreError)(f"{what}: {value}")


def undoing(request: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """Return the request, without an id, that undoes one of an operation in `TAKING` whose result was `value`."""
    if request[1] == messages.QUEUE_POP:
        return messages.QUEUE_RETURN, request[2], value
    if request[1] == messages.LOCK:
        return messages.UNLOCK, request[2], value
    return messages.LEAVE, request[2], request[-2]


def describe(request: tuple[Any, ...]) -> str:
    """Return operation and keys of `request`, for messages."""
    name = messages.OPERATION_NAMES[request[1]]
    keys = request[2] if len(request) > 2 else ()
    if not isinstance(keys, tuple | bytes) or (keys and request[1] == messages.KEEP_ALIVE):
        return f"{name}()"
    if isinstance(keys, bytes):
        return f"{name}('{shown(keys)}')"
    some = ", ".join(f"'{shown(key)}'" for key in keys[:SHOWN_KEYS])
    more = f", ... {len(keys)} keys" if len(keys) > SHOWN_KEYS else ""
    return f"{name}({some}{more})"


def timeout_ms(timeout_s: float | None) -> int | None:
    """Return a time-out as the wire has it: whole milliseconds, rounded up, so that nothing expires early."""
    if timeout_s is None:
        return None
    return min(math.ceil(timeout_s * 1000), messages.MAX_TIMEOUT_MS)


def end_quietly(reply: Reply, error: Exception) -> None:
    """Fail `reply` without asyncio's warning if nobody awaits it: the caller of `close` knows that it failed."""
    reply.set_exception(error)
    reply.exception()


class Lookout(Persistence):
    """Spins: reads the socket until an awaited reply is there, instead of letting the event loop sleep.

    To wake a process takes about as long as a daemon of this host needs to answer. So a task that sends one request
    after the other should not sleep. Its request is sent when the reply is awaited. Requests of several tasks, or
    several in one turn of the loop, are gathered into one frame, and nothing spins.

    Each client has one Lookout. `alone()` says whether exactly one request waits to be sent.
    """

    __slots__ = ("_alone", "_connection", "_limit_s", "_loop", "_streak", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_us: float, alone: Callable[[], bool]) -> None:
        super().__init__()
        self._loop = loop
        self._limit_s = CATCH * limit_us * 1e-6
        self._alone = alone
        self._connection: Connection | None = None
        self._task = 0
        self._streak = 0

    def connected(self, connection: Connection, sock: socket.socket) -> None:
        """Use `connection` from now on, if the daemon is on this host and has another core to run on."""
        near = self._limit_s > 0 and (os.cpu_count() or 1) > 1 and same_host(sock)
        self._connection = connection if near and not served_here(sock.getpeername()[1]) else None

    def lost(self) -> None:
        """Stop spinning: the connection is gone."""
        self._connection = None

    def seek(self, reply: asyncio.Future[object]) -> bool:
        """Spin for `reply`, which is being awaited, if that can pay.

        Returns whether the task should let the event loop turn before it goes on.
        """
        connection = self._connection
        if connection is None:
            return False
        task = id(asyncio.current_task(self._loop))
        if task != self._task or not self._alone():
            self._task, self._streak = task, 0
            return False
        self._streak += 1
        if self._streak <= ALONE:
            return False
        if self._skip and self._skips():
            return False
        until_s = perf_counter() + self._limit_s
        connection.send()
        while connection.poll() and not reply.done():
            if perf_counter() >= until_s:
                return self._missed()
        self._misses = self._skip = 0
        now_s = perf_counter()  # as `turn_due`, which would be a call more for each request
        if now_s - self._last_turn_s < TURN_S:
            return False
        self._last_turn_s = now_s
        return True


def same_host(sock: object) -> bool:
    """Whether both ends of a connected socket have one address. False for a simulated socket."""
    if not isinstance(sock, socket.socket):
        return False
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except (OSError, IndexError):
        return False


class Listing(asyncio.Future[list[str]]):
    """The keys that `list_keys` returns. The daemon answers in parts; `ask(start)` requests the one from `start` on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ask: Callable[[bytes], asyncio.Future[Any]]) -> None:
        super().__init__(loop=loop)
        self._ask = ask
        self._keys: list[str] = []
        self._part = self._next(b"")

    def _next(self, start: bytes) -> asyncio.Future[Any]:
        part = self._ask(start)
        part.add_done_callback(self._took)
        return part

    def _took(self, part: asyncio.Future[Any]) -> None:
        if part.cancelled():
            super().cancel()
            return
        error = part.exception()
        if self.done():
            return
        if error is None:
            start, keys = part.result()
            self._keys += keys
            if start is None:
                self.set_result(self._keys)
                return
            try:
                self._part = self._next(start)
            except DistError as refused:
                error = refused
        if error is not None:
            self.set_exception(error)
            if isinstance(error, ClosedError):
                self.exception()  # so that asyncio does not warn: the caller of `close` knows

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the waiting and withdraw the request under way."""
        if not super().cancel(msg):
            return False
        self._part.cancel()
        return True
