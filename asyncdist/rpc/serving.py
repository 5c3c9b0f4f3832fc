"""Calls as their callee sees them: `Caller`, a rank that calls, with what runs and what is kept for it."""

from __future__ import annotations

import asyncio
import inspect
import struct
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from asyncdist.arrays.host import Array
from asyncdist.arrays.objects import decode, encode
from asyncdist.errors import ClosedError, DistError, DistNetworkError, PeerLostError, RemoteProtocolError
from asyncdist.rpc import messages
from asyncdist.rpc.calls import AHEAD
from asyncdist.rpc.messages import (
    CALLS,
    CANCEL,
    CREATE,
    FAILURE,
    GONE,
    HEAD,
    ITEM,
    MORE,
    RELEASE,
    RESULT,
    STREAM,
    Arrivals,
    Inbox,
    octets_of,
)
from asyncdist.rpc.registry import look_up
from asyncdist.transport.protocol.operations import Receive

if TYPE_CHECKING:
    from asyncdist.rpc.agent import Agent

__all__ = ["Caller"]

MAX_TRACEBACK: Final = 16_384
"""Characters of a traceback, the last, that travel: a recursion without end has many megabytes."""

_HEADS: Final = {kind: bytes((kind,)) for kind in (RESULT, ITEM, FAILURE, GONE)}


@dataclass(slots=True)
class Running:
    """A call under way here: first its arguments' arrays come, then it runs as a task."""

    arrivals: Arrivals | None = None
    task: asyncio.Future[Any] | None = None
    wanted: asyncio.Semaphore | None = None
    """Of a stream: how many items may be sent."""


class Caller(Inbox):
    """A rank that calls this one. Its messages come one at a time, each once the one before is handled."""

    def __init__(self, agent: Agent, rank: int) -> None:
        self.agent = agent
        self.rank = rank
        self.running: dict[int, Running] = {}
        self.objects: dict[int, Any] = {}
        """What its CREATE calls have made, by their numbers, until released."""
        self._head = b""

    def listen(self) -> None:
        """Receive a message."""
        self.post_receive(self.agent.mesh, self.rank, self.agent.keys.requests)

    def message_received(self, token: object, receive: Receive) -> None:
        """A message is here: the agent's task will handle it."""
        self._head = receive.meta
        self.agent.arrivals.add(self)

    def message_failed(self, token: object, error: BaseException) -> None:
        """The rank is gone: so are its calls and its objects."""
        if not isinstance(error, PeerLostError | ClosedError):  # no memory for its message
            self.agent.mesh.break_pair(self.rank, DistNetworkError(f"a call of rank {self.rank} fails here: {error}"))
        self.agent.callers.pop(self.rank, None)
        self.end()

    def end(self) -> None:
        """Cancel its calls and drop its objects."""
        self.objects.clear()
        for number in list(self.running):
            self._cancel(number)

    def leave(self) -> None:
        """Answer those that go on although they are cancelled: they are not waited for."""
        while self.running:
            number, _ = self.running.popitem()
            self._fail(number, asyncio.CancelledError())

    def handle(self) -> None:
        """Do what the message says, and receive the next one."""
        octets, self.octets = self.octets, self.octets[:0]
        try:
            kind, number, argument = HEAD.unpack(self._head)
            if kind in CALLS:
                self._begin(kind, number, argument, octets)
            elif kind == CANCEL:
                self._cancel(number)
            elif kind == RELEASE:
                self.objects.pop(number, None)
            elif kind == MORE:
                running = self.running.get(number)
                if running is not None and running.wanted is not None:
                    for _ in range(min(argument, AHEAD)):
                        running.wanted.release()
            else:
                raise RemoteProtocolError(f"a message of unknown kind {kind}")
        except (struct.error, RemoteProtocolError) as error:
            self.agent.mesh.break_pair(self.rank, RemoteProtocolError(f"rank {self.rank} sent a call wrongly: {error}"))
        self.listen()

    def _begin(self, kind: int, number: int, target: int, octets: memoryview) -> None:
        apart: list[Array] = []
        value = decode(octets, apart=apart)
        match value:
            case [str(), list(), dict()] | [str(), list(), dict(), dict()] if number not in self.running:
                pass
            case _:
                raise RemoteProtocolError("a malformed call")
        if not apart or self.agent.closing:
            self._run(kind, number, target, value)
            return
        arrived = partial(self._arrived, kind, number, target, value)
        arrivals = Arrivals(self.agent.mesh, self.rank, apart, arrived)
        self.running[number] = Running(arrivals)
        arrivals.begin(self.agent.keys.request_arrays(number))

    def _arrived(self, kind: int, number: int, target: int, value: list[Any], error: BaseException | None) -> None:
        """The arrays are here, or will not come."""
        del self.running[number]
        if error is None:
            self._run(kind, number, target, value)
        else:
            self._fail(number, error)

    def _run(self, kind: int, number: int, target: int, value: list[Any]) -> None:
        """Call the function; `value` is what came: name, args, kwargs, and a trace context where there is one."""
        agent, tracing = self.agent, messages.tracing
        name, args, kwargs, *carried = value
        with tracing.served(*carried) if carried and tracing is not None else nullcontext():
            try:
                if len(self.running) >= agent.max_calls or agent.closing:
                    raise RuntimeError(
                        f"more than max_calls={agent.max_calls} calls at a time; it is to be the same everywhere"
                    )
                result = self._function(target, name)(*args, **kwargs)
                wanted = None
                if kind == STREAM:
                    wanted = asyncio.Semaphore(AHEAD)
                    result = self._send_items(number, wanted, _iterator(result, name))
                elif hasattr(type(result), "__anext__"):
                    raise TypeError(f"{name!r} gives a stream: use rpc.stream")
                elif not hasattr(type(result), "__await__"):
                    self._finish(kind, number, result)
                    return
                task = agent.start(result)
            except (Exception, asyncio.CancelledError) as error:
                self._fail(number, error)
                return
            self.running[number] = Running(None, task, wanted)
            task.add_done_callback(partial(self._ended, kind, number))

    def _function(self, target: int, name: str) -> Callable[..., Any]:
        if not target:
            return look_up(name)
        if target not in self.objects:
            raise LookupError("the object is released")
        if name.startswith("_"):
            raise LookupError(f"{name!r} is private")
        method: Callable[..., Any] = getattr(self.objects[target], name)
        return method

    async def _send_items(self, number: int, wanted: asyncio.Semaphore, items: AsyncIterator[Any]) -> None:
        try:
            while True:
                await wanted.acquire()  # first, so that the generator does not run ahead
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
                self._send(ITEM, number, item)
        finally:
            if inspect.isasyncgen(items):
                await items.aclose()

    def _ended(self, kind: int, number: int, task: asyncio.Future[Any]) -> None:
        """The task of a call has ended, be it before it began."""
        if self.running.pop(number, None) is None:  # nobody waits any more
            return
        if task.cancelled():
            self._fail(number, asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._fail(number, error)
        else:
            self._finish(kind, number, task.result())

    def _cancel(self, number: int) -> None:
        running = self.running.get(number)
        if running is None:  # it has ended, and its answer is on the way
            return
        if running.task is not None:
            running.task.cancel()
        elif running.arrivals is not None:
            running.arrivals.cancel()
            del self.running[number]
            self._fail(number, asyncio.CancelledError())

    # Answers.

    def _finish(self, kind: int, number: int, result: Any) -> None:
        if kind == CREATE:
            if self.agent.callers.get(self.rank) is self:
                self.objects[number] = result
            result = None
        try:
            self._send(RESULT, number, result)
        except Exception as error:  # it cannot be encoded, or there is no memory for it
            self._fail(number, error)

    def _fail(self, number: int, error: BaseException) -> None:
        if self.agent.closing:
            self._send(GONE, number, None)
            return
        inner = error.__traceback__
        while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
            inner = inner.tb_next
        lines = "".join(traceback.format_exception(type(error), error, inner))[-MAX_TRACEBACK:]
        self._send(FAILURE, number, [type(error).__name__, *map(_sendable, (error, lines))])

    def _send(self, kind: int, number: int, value: Any) -> None:
        apart: list[Array] = []
        payload, arrays = encode(value, apart=apart), octets_of(apart)
        agent = self.agent
        try:
            agent.outbox.post(self.rank, agent.keys.answer(number), _HEADS[kind], payload)
            agent.outbox.post_arrays(self.rank, agent.keys.answer_arrays(number), arrays)
        except DistError:  # the caller is gone
            return


def _iterator(result: Any, name: str) -> AsyncIterator[Any]:
    if not hasattr(type(result), "__aiter__"):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(f"{name!r} is no asynchronous generator: use rpc.call")
    return aiter(result)


def _sendable(text: object) -> str:
    """A text as it can be encoded, whatever an exception of the program makes of itself."""
    try:
        return str(text)[:MAX_TRACEBACK].encode(errors="backslashreplace").decode()
    except Exception as error:
        return f"(its text raises {type(error).__name__})"
