"""HashStore: the store's engine in this process, without sockets."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, ClassVar, Self

from asyncdist.concurrency.deadline import Timeout
from asyncdist.errors import ClosedError
from asyncdist.store.base import DEFAULT_STORE_TIMEOUT_S
from asyncdist.store.reply import WAITING, Reply, record_wait, settle, timeout_ms, undoing
from asyncdist.store.request_store import CoordinatingStore
from asyncdist_server.clock import exact_clock
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.wire import messages

__all__ = ["HashStore"]


class HashStore(CoordinatingStore):
    """A store for the tasks of one event loop: what the daemon does, in process.

    `clone()` gives further clients of the same data, each with its own time-out and `close`. The data lives as long as
    one of them. All of them belong to the event loop that uses the first one.
    """

    lookout: ClassVar[None] = None

    def __init__(self, *, timeout: Timeout = DEFAULT_STORE_TIMEOUT_S, _shared: SharedEngine | None = None) -> None:
        super().__init__(timeout)
        self._shared = _shared or SharedEngine()
        self._client = self._shared.open(self._deliver)
        self._blocked: dict[int, Reply] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"HashStore(at {id(self._shared):#x})"

    def clone(self) -> Self:
        """Return another client of the same data, with this one's time-out."""
        self._raise_if_closed()
        return type(self)(timeout=self._timeout_s, _shared=self._shared)

    async def close(self) -> None:
        """End this client: what it waits for raises `ClosedError`. Others of the same data go on."""
        self.cut()

    def cut(self) -> None:
        """Close as `close` does, without a coroutine."""
        if self._closed:
            return
        self._closed = True
        self.lease_keeper.close()
        self._shared.close(self._client)
        for reply in self._blocked.values():
            reply.set_exception(ClosedError(f"{self!r} was closed"))
            reply.exception()  # so that asyncio does not warn: the caller of `close` knows
        self._blocked.clear()

    def withdraw(self, reply: Reply) -> None:
        """Take a cancelled request back."""
        request_id = reply.request[0]
        if self._blocked.pop(request_id, None) is not None:
            self._shared.run(self._client, (self._shared.next_id(), messages.CANCEL, request_id))

    def _request(
        self,
        operation: int,
        arguments: tuple[Any, ...],
        timeout_s: float | None,
        size_bytes: int = 0,
        kind: type[Reply] = Reply,
    ) -> asyncio.Future[Any]:
        self._raise_if_closed()
        shared = self._shared
        loop = shared.own_loop()
        request = (shared.next_id(), operation, *arguments)
        if operation in WAITING:
            request = (*request, timeout_ms(timeout_s))
        reply = kind(loop=loop)
        reply.request = request
        reply.owner = self
        record_wait(reply, loop)
        self._blocked[request[0]] = reply
        answer = shared.run(self._client, request)
        if answer is not None:
            self._deliver(answer)
        return reply

    def _give_back(self, reply: Reply) -> None:
        self._shared.run(self._client, (self._shared.next_id(), *undoing(reply.request, reply.result())))

    def _deliver(self, answer: tuple[int, int, Any]) -> None:
        reply = self._blocked.pop(answer[0], None)
        if reply is not None:
            settle(reply, answer[1], answer[2], "HashStore")

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed")


class SharedEngine:
    """An engine and the loop timer it needs, shared by the stores of one process."""

    def __init__(self) -> None:
        self.engine = StoreEngine(secrets.token_bytes(messages.INCARNATION_BYTES))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None  # when the timer fires
        self._clients = 0
        self._last_id = 0

    def next_id(self) -> int:
        """Return an unused request id."""
        self._last_id += 1
        return self._last_id

    def own_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop; RuntimeError if it is not the one that used this engine first."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self.engine.tell_time(exact_clock(loop))
        elif self._loop is not loop:
            raise RuntimeError("this store belongs to another event loop")
        return loop

    def run(self, client: Any, request: tuple[Any, ...]) -> tuple[int, int, Any] | None:
        """Run one request; what is due at once (a time-out of 0) is answered before this returns."""
        assert self._loop is not None
        now = self._loop.time()
        answer = self.engine.request(client, request, now)
        if answer is None or self.engine.next_deadline() != self._due:
            self._expire()
        return answer

    def open(self, deliver: Callable[[tuple[int, int, Any]], None]) -> Any:
        """Return a new client."""
        self._clients += 1
        return self.engine.open("", deliver)

    def close(self, client: Any) -> None:
        """End a client; the data goes with the last one, and so does what would still become due."""
        self.engine.close(client, 0.0 if self._loop is None else self._loop.time())
        self._clients -= 1
        if self._timer is not None and (not self._clients or self._loop is None or self._loop.is_closed()):
            self._timer.cancel()
            self._timer = None
        elif self._clients and self._loop is not None:
            self._expire()

    def _expire(self) -> None:
        """Answer what is due and arm the timer for what comes next."""
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.engine.expire(self._loop.time())
        self._due = self.engine.next_deadline()
        if self._due is not None:
            self._timer = self._loop.call_at(self._due, self._expire)
