"""HashStore: the store's engine in this process, without sockets."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Self

from asyncdist.deadline import Timeout
from asyncdist.errors import ClosedError
from asyncdist.store.base import DEFAULT_STORE_TIMEOUT_S
from asyncdist.store.reply import WAITING, Reply, settle, timeout_ms
from asyncdist.store.request_store import RequestStore
from asyncdist_server import messages
from asyncdist_server.engine import StoreEngine

__all__ = ["HashStore"]


class HashStore(RequestStore):
    """A store for the tasks of one event loop: what the daemon does, in process.

    `clone()` gives further clients of the same data, each with its own time-out and `close`. The data lives as long as
    one of them. All of them belong to the event loop that uses the first one.
    """

    def __init__(self, *, timeout: Timeout = DEFAULT_STORE_TIMEOUT_S) -> None:
        super().__init__(timeout)
        self._attach(SharedEngine())

    def _attach(self, shared: SharedEngine) -> None:
        self._shared = shared
        self._client = shared.engine.open("", self._deliver)
        self._blocked: dict[int, Reply] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"HashStore(at {id(self._shared):#x})"

    def clone(self) -> Self:
        """Return another client of the same data, with this one's time-out."""
        self._raise_if_closed()
        other = type(self).__new__(type(self))
        RequestStore.__init__(other, self._timeout_s)
        other._attach(self._shared)
        return other

    async def close(self) -> None:
        """End this client: what it waits for raises `ClosedError`. Others of the same data go on."""
        if self._closed:
            return
        self._closed = True
        self._shared.engine.close(self._client, 0.0)
        for reply in self._blocked.values():
            reply.set_exception(ClosedError(f"{self!r} was closed"))
            reply.exception()  # whoever closes knows; nobody has to look at an abandoned reply
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
        self._blocked[request[0]] = reply
        answer = shared.run(self._client, request)
        if answer is not None:
            self._deliver(answer)
        return reply

    def _give_back(self, key: bytes, item: bytes) -> None:
        self._shared.run(self._client, (self._shared.next_id(), messages.QUEUE_RETURN, key, item))

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
        elif self._loop is not loop:
            raise RuntimeError("this store belongs to another event loop")
        return loop

    def run(self, client: Any, request: tuple[Any, ...]) -> tuple[int, int, Any] | None:
        """Run one request; what is due at once (a time-out of 0) is answered before this returns."""
        assert self._loop is not None
        now = self._loop.time()
        answer = self.engine.request(client, request, now)
        if answer is None:
            self._expire()
        return answer

    def _expire(self) -> None:
        """Answer what is due and arm the timer for what comes next."""
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.engine.expire(self._loop.time())
        deadline = self.engine.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._expire)
