"""The verbs of a store as requests: keys in RequestStore; leases, watches, locks and jobs in CoordinatingStore."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, cast

from asyncdist.concurrency.deadline import INHERIT, Deadline, Timeout, timeout_seconds
from asyncdist.errors import DistStoreError, StoreTimeoutError
from asyncdist.store.base import (
    Store,
    checked_amount,
    checked_integer,
    checked_key,
    checked_value,
    checked_values,
    decoded_key,
    encoded_key,
    encoded_keys,
)
from asyncdist.store.lease import DEFAULT_GRACE_S, Lease, LeaseKeeper, Lock
from asyncdist.store.member import DEFAULT_SETTLE_S, Membership, default_name
from asyncdist.store.reply import Listing, NonBlockingPop, Reply, timeout_ms
from asyncdist.store.watch import Watch
from asyncdist_server.wire import messages
from asyncdist_server.wire.key_text import shown

__all__ = ["CoordinatingStore", "NamespaceSize", "RequestStore", "StoreClient", "WaitingClient"]


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


@dataclass(frozen=True, slots=True)
class WaitingClient:
    """One request that waits, and whose it is: who waits for `keys`, by which `operation`, for how many seconds.

    `client` is host and pid of the process, `rank` what it told the daemon, `address` where its connection comes from.
    """

    operation: str
    keys: tuple[str, ...]
    waited: float
    namespace: str
    client: str
    rank: int | None
    address: str

    @property
    def for_keys(self) -> bool:
        """Whether a client has to set those keys. What else waits may wait long by nature."""
        return self.operation in ("get", "wait", "multi_get")


@dataclass(frozen=True, slots=True)
class NamespaceSize:
    """A namespace, and how many keys, queues with items and connected clients it has."""

    name: str
    keys: int
    queues: int
    clients: int


@dataclass(frozen=True, slots=True)
class StoreClient:
    """A client of the daemon; `client`, `rank` and `address` are as in WaitingClient.

    `waits` is how many of its requests wait. One that is `away` has lost its connection, and may come back.
    """

    namespace: str
    client: str
    rank: int | None
    address: str
    waits: int
    away: bool


class CoordinatingStore(RequestStore):
    """Adds to the verbs of RequestStore those that need a daemon which knows its clients."""

    def __init__(self, timeout: Timeout) -> None:
        super().__init__(timeout)
        self.lease_keeper = LeaseKeeper(asyncio.get_running_loop, self.ask)
        """Keeps the leases of this object alive; for the objects that this one makes."""

    def ask(self, operation: int, arguments: tuple[Any, ...], timeout_s: float | None) -> asyncio.Future[Any]:
        """Issue a request of the wire contract; for the objects that this one makes."""
        return self._request(operation, arguments, timeout_s)

    def set(self, key: str, value: str | bytes, *, lease: Lease | None = None) -> asyncio.Future[None]:
        if lease is None:
            return super().set(key, value)
        if not isinstance(lease, Lease):
            raise TypeError(f"a lease must be one that store.lease() gave, not {type(lease).__name__}")
        data = checked_value(value)
        arguments = (encoded_key(key), data, lease.id)
        lease.raise_if_lost()
        return self._request(messages.SET_LEASED, arguments, self._timeout_s, len(data))

    def lease(self, ttl: Timeout = DEFAULT_GRACE_S, *, bound: bool = False) -> Coroutine[Any, Any, Lease]:
        ttl_s = seconds("ttl", ttl)
        if not ttl_s:
            raise ValueError("a lease needs a ttl of more than 0 s")
        return self.lease_keeper.granted(ttl_s, bound, self._timeout_s)

    def hold(self, prefix: str, lease: Lease, *, linger: Timeout = 0.0) -> asyncio.Future[None]:
        if not isinstance(lease, Lease):
            raise TypeError(f"a lease must be one that store.lease() gave, not {type(lease).__name__}")
        linger_ms = timeout_ms(seconds("linger", linger))
        return self._request(messages.HOLD, (encoded_key(prefix), lease.id, linger_ms), self._timeout_s)

    def watch(self, prefix: str = "", from_revision: int | None = None) -> Watch:
        if from_revision is not None:
            from_revision = checked_integer("a revision", from_revision)
        return Watch(
            lambda arguments: self._request(messages.WATCH, arguments, None), checked_key(prefix), from_revision
        )

    def lock(self, name: str, *, grace: Timeout = DEFAULT_GRACE_S, timeout: Timeout = INHERIT) -> Lock:
        return Lock(self, name, seconds("grace", grace) or 0.001, timeout)

    def join(
        self,
        job: str,
        min: int,
        max: int | None = None,
        timeout: Timeout = INHERIT,
        *,
        name: str | None = None,
        settle: Timeout = DEFAULT_SETTLE_S,
        grace: Timeout = DEFAULT_GRACE_S,
        bound: bool = True,
    ) -> Coroutine[Any, Any, Membership]:
        most = min if max is None else max
        for count in (min, most):
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"a job's members must be counted by int, not {type(count).__name__}")
        if not 0 < min <= most <= messages.MAX_MEMBERS:
            raise ValueError(f"a job has 1 to {messages.MAX_MEMBERS} members, not {min} to {most}")
        member_name = checked_key(default_name() if name is None else name)
        member = Membership(self, checked_key(job), int(min), int(most), seconds("settle", settle), member_name)
        return member.enter(self, seconds("grace", grace) or 0.001, bound, timeout)

    def expel(self, job: str, member: str) -> Coroutine[Any, Any, None]:
        return self._expel(f"job/{checked_key(job)}/members/{checked_key(member)}", self._timeout_s)

    async def _expel(self, key: str, timeout_s: float | None) -> None:
        try:
            value = await self.get(key, timeout=0)
        except StoreTimeoutError:
            return  # it has gone
        try:
            lease_id = int(value)
        except ValueError:
            lease_id = 0
        if not 0 < lease_id <= messages.MAX_LEASE_ID:
            raise DistStoreError(
                f"the value of '{shown(key)}' is no lease: the daemon is an older one, or it was overwritten"
            )
        await self._request(messages.REVOKE, (lease_id,), timeout_s)

    def status(self) -> asyncio.Future[dict[str, Any]]:
        """Return what the daemon says of itself: incarnation, keys, clients, waiters, leases, memory, age and more."""
        return self._request(messages.STATUS, (), self._timeout_s)

    async def namespaces(self) -> list[NamespaceSize]:
        """Return what all namespaces hold, those with most keys first (the daemon names at most 1,000)."""
        _, *rows = await self._request(messages.NAMESPACES, (), self._timeout_s)
        return [NamespaceSize(*row) for row in rows]

    async def waits(self, *, all_namespaces: bool = False) -> list[WaitingClient]:
        """Return who waits for what, longest first (the daemon names at most 1,000): the first question in a hang."""
        _, *rows = await self._request(messages.WAITS, (all_namespaces,), self._timeout_s)
        return [
            WaitingClient(operation, tuple(map(decoded_key, keys)), waited_ms / 1000, *who)
            for operation, keys, waited_ms, *who in rows
        ]

    async def clients(self, *, all_namespaces: bool = False) -> list[StoreClient]:
        """Return the other clients of the daemon (it names at most 1,000), those that lost their connection last."""
        _, *rows = await self._request(messages.CLIENTS, (all_namespaces,), self._timeout_s)
        return [StoreClient(*row) for row in rows]


def seconds(name: str, value: Timeout) -> float:
    """Return a duration in seconds; ValueError for none."""
    duration_s = timeout_seconds(value, None)
    if duration_s is None:
        raise ValueError(f"{name} must be a number of seconds or a timedelta")
    return duration_s
