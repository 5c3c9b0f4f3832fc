"""The verbs of a store as requests: what TCPStore, HashStore and FileStore have in common."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, cast

from asyncdist.concurrency.deadline import INHERIT, Deadline, Timeout, timeout_seconds
from asyncdist.store.arguments import checked_amount, checked_value, checked_values, encoded_key, encoded_keys
from asyncdist.store.base import Store
from asyncdist.store.listing import Listing
from asyncdist.store.reply import NonBlockingPop, Reply
from asyncdist_server.wire import messages

if TYPE_CHECKING:
    from asyncdist.store.lease import Lease

__all__ = ["RequestStore"]


class RequestStore(Store):
    """Turns each verb into an operation and arguments of the wire contract; a subclass has them answered.

    All verbs but `queue_pop` are plain functions that issue the request at the call and return a future; `queue_pop` is
    issued when first awaited.
    """

    @abstractmethod
    def _request(
        self,
        operation: int,
        arguments: tuple[Any, ...],
        timeout_s: float | None,
        size_bytes: int = 0,
        kind: type[Reply] = Reply,
    ) -> asyncio.Future[Any]:
        """Issue a request and return its reply, an instance of `kind`.

        `arguments` lack the `timeout_ms` of the waiting operations. `size_bytes` is how much data they hold, as far as
        it can be large.
        """

    @abstractmethod
    def _give_back(self, reply: Reply) -> None:
        """Undo what a request of an operation in `TAKING` took for somebody who no longer wants it."""

    def set(self, key: str, value: str | bytes, *, lease: Lease | None = None) -> asyncio.Future[None]:
        if lease is not None:
            self._not_offered("leases")
        data = checked_value(value)
        return self._request(messages.SET, (encoded_key(key), data), self._timeout_s, len(data))

    def get(self, key: str, *, timeout: Timeout = INHERIT) -> asyncio.Future[bytes]:
        timeout_s = self._timeout_s if timeout is INHERIT else timeout_seconds(timeout, None)
        return self._request(messages.GET, (encoded_key(key),), timeout_s)

    def add(self, key: str, amount: int) -> asyncio.Future[int]:
        return self._request(messages.ADD, (encoded_key(key), checked_amount(amount)), self._timeout_s)

    def wait(self, keys: Iterable[str], timeout: Timeout = INHERIT) -> asyncio.Future[None]:
        timeout_s = timeout_seconds(timeout, self._timeout_s)
        return self._with_keys(messages.WAIT, keys, timeout_s)

    def check(self, keys: Iterable[str]) -> asyncio.Future[bool]:
        return self._with_keys(messages.CHECK, keys, self._timeout_s)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> asyncio.Future[bytes]:
        old, new = checked_value(expected), checked_value(desired)
        arguments = (encoded_key(key), old, new)
        return self._request(messages.COMPARE_SET, arguments, self._timeout_s, len(old) + len(new))

    def delete_key(self, key: str) -> asyncio.Future[bool]:
        return self._request(messages.DELETE, (encoded_key(key),), self._timeout_s)

    def append(self, key: str, value: str | bytes) -> asyncio.Future[None]:
        data = checked_value(value)
        return self._request(messages.APPEND, (encoded_key(key), data), self._timeout_s, len(data))

    def multi_get(self, keys: Iterable[str], *, timeout: Timeout = INHERIT) -> asyncio.Future[list[bytes]]:
        timeout_s = timeout_seconds(timeout, self._timeout_s)
        return self._with_keys(messages.MULTI_GET, keys, timeout_s)

    def multi_set(self, keys: Iterable[str], values: Iterable[str | bytes]) -> asyncio.Future[None]:
        names = encoded_keys(keys)
        data = checked_values(len(names), values)
        size_bytes = sum(map(len, names)) + sum(map(len, data))
        return self._request(messages.MULTI_SET, (names, data), self._timeout_s, size_bytes)

    def num_keys(self) -> asyncio.Future[int]:
        return self._request(messages.NUM_KEYS, (), self._timeout_s)

    def list_keys(self, prefix: str = "") -> asyncio.Future[list[str]]:
        loop, name = asyncio.get_running_loop(), encoded_key(prefix)
        deadline = Deadline.after(self._timeout_s, loop.time())

        def ask(start: bytes) -> asyncio.Future[Any]:
            return self._request(messages.LIST_KEYS, (name, start), deadline.remaining_s(loop.time()))

        return Listing(loop, ask)

    def queue_push(self, key: str, value: str | bytes) -> asyncio.Future[None]:
        data = checked_value(value)
        return self._request(messages.QUEUE_PUSH, (encoded_key(key), data), self._timeout_s, len(data))

    def queue_pop(self, key: str, block: bool = True, *, timeout: Timeout = INHERIT) -> Coroutine[Any, Any, bytes]:
        timeout_s = timeout_seconds(timeout, self._timeout_s)
        return self._pop(encoded_key(key), timeout_s if block else 0.0, Reply if block else NonBlockingPop)

    async def _pop(self, key: bytes, timeout_s: float | None, kind: type[Reply]) -> bytes:
        reply = self._request(messages.QUEUE_POP, (key,), timeout_s, 0, kind)
        try:
            item: bytes = await reply
        except asyncio.CancelledError:
            # The item may have come between the cancellation and now; a future alone would drop it.
            if not reply.cancelled() and reply.exception() is None:
                self._give_back(cast(Reply, reply))
            raise
        return item

    def queue_len(self, key: str) -> asyncio.Future[int]:
        return self._request(messages.QUEUE_LEN, (encoded_key(key),), self._timeout_s)

    def _with_keys(self, operation: int, keys: Iterable[str], timeout_s: float | None) -> asyncio.Future[Any]:
        names = encoded_keys(keys)
        return self._request(operation, (names,), timeout_s, sum(map(len, names)))
