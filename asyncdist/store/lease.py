"""Lease and Lock, and LeaseKeeper, which keeps the leases of one store object alive."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

from asyncdist.concurrency.deadline import Timeout, timeout_seconds
from asyncdist.errors import ClosedError, DistError, LeaseLostError
from asyncdist.store.base import checked_key, encoded_key
from asyncdist_server.wire import messages
from asyncdist_server.wire.key_text import shown

if TYPE_CHECKING:
    from asyncdist.store.request_store import CoordinatingStore

DEFAULT_GRACE_S: Final = 10.0
"""How long what is bound to a connection outlives it: a broken connection is made anew within a second or two, and
nobody should wait much longer for a lock of a process that was killed."""

KEEP_ALIVES: Final = 3
"""How often a lease is renewed within its time to live, so that one lost packet does not end it."""

Ask = Callable[[int, tuple[Any, ...], float | None], asyncio.Future[Any]]
"""Issues a request: operation, arguments, seconds to wait for the answer."""


class Lease:
    """Keys that are bound to a lease go when it ends: `await store.set(key, value, lease=lease)`. See `store.lease`.

    The store object keeps the lease alive until `revoke`, which the end of `async with` calls too. When the store is
    closed, a lease bound to its connection ends at once, and a lease by time when its time is over. A lease is `lost`
    when the daemon says that it has ended, or could not be reached for `ttl` seconds, as it may have ended then. A lost
    lease never comes back: get a new one.
    """

    def __init__(self, keeper: LeaseKeeper, ttl_s: float, bound: bool) -> None:
        self._keeper = keeper
        self._id = secrets.randbelow(messages.MAX_LEASE_ID) + 1
        self._ttl_s = ttl_s
        self._bound = bound
        self._valid_until = math.inf
        self._outlives = False
        self._ended: asyncio.Future[str] = keeper.loop().create_future()

    def __repr__(self) -> str:
        kind = "connection, and" if self._bound else "time,"
        state = f"ended: {self._ended.result()}" if self._ended.done() else f"bound to {kind} {self._ttl_s:g} s"
        return f"<Lease {self._id:#x} {state}>"

    @property
    def id(self) -> int:
        """The number by which the store knows the lease; any client of the namespace may use it."""
        return self._id

    @property
    def ttl(self) -> float:
        """Seconds for which the lease outlives whoever vouches for it."""
        return self._ttl_s

    @property
    def lost(self) -> bool:
        """Whether the lease has ended, or may have."""
        return self._ended.done()

    async def wait_lost(self) -> str:
        """Wait until the lease has ended and return why. Cancelling ends the waiting only."""
        return await asyncio.shield(self._ended)

    def outlive_outages(self) -> None:
        """Lose the lease only when the daemon says so, not when the daemon could not be reached for long.

        For holders that learn in another way whether a process has taken their place.
        """
        self._outlives = True

    def raise_if_lost(self) -> None:
        """Raise LeaseLostError if the lease has ended."""
        if self._ended.done():
            raise LeaseLostError(f"the lease has ended: {self._ended.result()}")

    async def revoke(self) -> None:
        """End the lease and delete what is bound to it. May be called twice.

        Raises DistStoreError if the daemon cannot be reached; then the lease ends when its time is over. Cancelling
        ends the waiting, the lease is revoked all the same.
        """
        if not self._ended.done():
            await self._keeper.revoke(self)

    def abandon(self) -> None:
        """Revoke the lease without waiting for the answer."""
        self._keeper.abandon(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.revoke()


class LeaseKeeper:
    """Keeps the leases of one store object alive, with one timer for all of them.

    The store tells it when its connection is lost and made, and closes it.
    """

    def __init__(self, loop: Callable[[], asyncio.AbstractEventLoop], ask: Ask) -> None:
        self.loop = loop
        self._ask = ask
        self._leases: dict[int, Lease] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._asked: asyncio.Future[Any] | None = None
        self._renew_at = math.inf

    def grant(self, ttl_s: float, bound: bool, timeout_s: float | None) -> tuple[Lease, asyncio.Future[None]]:
        """Ask for a lease; it may be used in requests at once, which fail if it is refused."""
        lease = Lease(self, ttl_s, bound)
        ttl_ms = min(math.ceil(ttl_s * 1000), messages.MAX_TIMEOUT_MS)
        asked_at = self.loop().time()
        reply = self._ask(messages.GRANT, (lease.id, ttl_ms, bound), timeout_s)

        def answered(reply: asyncio.Future[None]) -> None:
            if reply.cancelled() or reply.exception() is not None:
                self._end(lease, "it was not granted")
            elif lease.id in self._leases and not bound:
                lease._valid_until = asked_at + ttl_s
                self._renew_at = min(self._renew_at, asked_at + ttl_s / KEEP_ALIVES)  # the answer may have taken longer
                self._schedule()

        self._leases[lease.id] = lease
        reply.add_done_callback(answered)
        return lease, reply

    async def granted(self, ttl_s: float, bound: bool, timeout_s: float | None) -> Lease:
        """Return a lease once the daemon has it."""
        lease, reply = self.grant(ttl_s, bound, timeout_s)
        try:
            await reply
        except asyncio.CancelledError:
            self.abandon(lease)
            raise
        return lease

    async def revoke(self, lease: Lease) -> bool:
        """End `lease` here and at the daemon; return whether it was still there."""
        self._end(lease, "it was revoked")
        reply = self._ask(messages.REVOKE, (lease.id,), None)
        reply.add_done_callback(_ignore)  # it may fail after whoever waits was cancelled
        there: bool = await asyncio.shield(reply)
        return there

    def abandon(self, lease: Lease) -> None:
        """Revoke `lease` without waiting for the answer."""
        if lease.lost:
            return
        self._end(lease, "it was revoked")
        with contextlib.suppress(DistError):  # a closed store: bound leases end with its goodbye, others by themselves
            self._ask(messages.REVOKE, (lease.id,), None).add_done_callback(_ignore)

    def connection_lost(self) -> None:
        """Let the time of leases that are bound to the connection begin."""
        now = self.loop().time()
        for lease in self._leases.values():
            if lease._bound:
                lease._valid_until = now + lease._ttl_s
        self._schedule()

    def connected(self) -> None:
        """Ask which leases are still there, after a connection was made anew.

        A question of the last connection is sent again, but does not name the leases granted since.
        """
        if self._asked is not None:
            self._asked.cancel()
        self._renew()

    def close(self) -> None:
        """Keep no lease alive any more: the store is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for lease in list(self._leases.values()):
            self._end(lease, "the store was closed")

    def _end(self, lease: Lease, why: str) -> None:
        self._leases.pop(lease.id, None)
        if not lease._ended.done():
            lease._ended.set_result(why)

    def _schedule(self) -> None:
        """Set the timer for the next renewal, or for when a lease may have ended."""
        loop = self.loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        by_time = [lease._ttl_s for lease in self._leases.values() if not lease._bound]
        self._renew_at = min(self._renew_at, loop.time() + min(by_time) / KEEP_ALIVES) if by_time else math.inf
        due = min((lease._valid_until for lease in self._leases.values() if not lease._outlives), default=math.inf)
        if self._asked is None:
            due = min(due, self._renew_at)
        if due < math.inf:
            self._timer = loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self.loop().time()
        for lease in list(self._leases.values()):
            if lease._valid_until <= now and not lease._outlives:
                self._end(lease, f"the store could not be reached for {lease.ttl:g} s")
        if self._asked is None and self._renew_at <= now:
            self._renew()
        else:
            self._schedule()

    def _renew(self) -> None:
        asked = tuple(self._leases.values())
        asked_at = self.loop().time()
        self._renew_at = math.inf

        def answered(reply: asyncio.Future[Any]) -> None:
            if reply is self._asked:
                self._asked = None
            if not reply.cancelled() and reply.exception() is None:
                unknown = set(reply.result())
                for lease in asked:
                    if lease.id in unknown:
                        self._end(lease, "it has expired, or the store was restarted without its data")
                    else:
                        lease._valid_until = math.inf if lease._bound else asked_at + lease._ttl_s
            self._schedule()

        if asked:
            try:
                self._asked = self._ask(messages.KEEP_ALIVE, (tuple(lease.id for lease in asked),), None)
            except ClosedError:
                return  # the store takes leave of the daemon, and `close` follows
            self._asked.add_done_callback(answered)
            self._schedule()  # the answer may be long in coming: leases end all the same


def _ignore(reply: asyncio.Future[Any]) -> None:
    """Look at an answer nobody waits for."""
    if not reply.cancelled():
        reply.exception()


class Lock:
    """A lock between processes. Made by `store.lock`; `async with store.lock(name) as token: ...`.

    Clients get it in the order in which they asked. It is released at the end of the block, or when the holder's
    process is gone for longer than the grace. No lock can stop a holder that was suspended, or cut off from the store,
    from going on after that: hand `token`, which is larger for every later holder, to whatever you write to, and let
    that refuse a smaller one than it has seen. After a restart of a daemon in memory mode tokens begin with its host's
    clock: one that must grow over restarts needs a daemon with a journal (docs/store.md). `LeaseLostError` at the end
    of the block says that the lock was lost inside it.
    """

    def __init__(self, store: CoordinatingStore, name: str, grace_s: float, timeout: Timeout) -> None:
        self._store = store
        self._key = f"lock/{checked_key(name)}"
        self._grace_s = grace_s
        self._timeout = timeout
        self._lease: Lease | None = None
        self._token: int | None = None

    def __repr__(self) -> str:
        return f"<Lock '{shown(self._key[5:])}' {'free' if self._token is None else f'held with token {self._token}'}>"

    @property
    def token(self) -> int | None:
        """The fencing token while the lock is held here, else None."""
        return self._token

    @property
    def lost(self) -> bool:
        """Whether the lock was held here and is, or may be, somebody else's now."""
        return self._lease is not None and self._lease.lost

    async def acquire(self) -> int:
        """Wait for the lock and return the fencing token.

        Raises StoreTimeoutError when the time-out ends. Cancelling takes nothing. RuntimeError if it is held here.
        """
        if self._lease is not None:
            raise RuntimeError(f"{self!r} is in use already; make another Lock object for another task")
        timeout_s = timeout_seconds(self._timeout, self._store.timeout)
        keeper = self._store.lease_keeper
        self._lease, granted = keeper.grant(self._grace_s, True, self._store.timeout)
        granted.add_done_callback(lambda reply: reply.cancelled() or reply.exception())
        try:
            arguments = (encoded_key(self._key), self._lease.id)
            token: int = await self._store.ask(messages.LOCK, arguments, timeout_s)
        except BaseException:
            # Whatever the daemon made of the request, the lock goes with the lease.
            lease, self._lease = self._lease, None
            keeper.abandon(lease)
            if granted.done() and not granted.cancelled() and (error := granted.exception()) is not None:
                raise error from None
            raise
        self._token = token
        return token

    async def release(self) -> None:
        """Give the lock back; LeaseLostError if it was lost before, RuntimeError if it was not held."""
        lease, self._lease, self._token = self._lease, None, None
        if lease is None:
            raise RuntimeError(f"{self!r} was not acquired")
        lease.raise_if_lost()
        if not await self._store.lease_keeper.revoke(lease):
            raise LeaseLostError(f"{self!r} was lost before it was released: its lease had ended")

    async def __aenter__(self) -> int:
        return await self.acquire()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.release()
            return
        lease, self._lease, self._token = self._lease, None, None
        if lease is not None and not lease.lost:
            try:
                await lease.revoke()
            except (asyncio.CancelledError, ClosedError):
                raise
            except Exception:
                pass  # the error of the block counts; the lock goes with the connection
