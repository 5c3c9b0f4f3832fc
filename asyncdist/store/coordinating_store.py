"""The verbs for processes that come and go: leases, watches, locks, jobs. TCPStore and HashStore have them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.errors import DistStoreError, StoreTimeoutError
from asyncdist.store.arguments import checked_integer, checked_key, checked_value, decoded_key, encoded_key
from asyncdist.store.lease import DEFAULT_GRACE_S, Lease, LeaseKeeper
from asyncdist.store.lock import Lock
from asyncdist.store.member import DEFAULT_SETTLE_S, Membership, default_name
from asyncdist.store.reply import timeout_ms
from asyncdist.store.request_store import RequestStore
from asyncdist.store.watch import Watch
from asyncdist_server.wire import messages
from asyncdist_server.wire.key_text import shown

__all__ = ["CoordinatingStore", "NamespaceSize", "WaitingClient"]


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


@dataclass(frozen=True, slots=True)
class NamespaceSize:
    """A namespace, and how many keys, queues with items and connected clients it has."""

    name: str
    keys: int
    queues: int
    clients: int


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


def seconds(name: str, value: Timeout) -> float:
    """Return a duration in seconds; ValueError for none."""
    duration_s = timeout_seconds(value, None)
    if duration_s is None:
        raise ValueError(f"{name} must be a number of seconds or a timedelta")
    return duration_s
