"""Lock: one holder at a time, and a number that tells later holders from earlier ones."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from asyncdist.concurrency.deadline import Timeout, timeout_seconds
from asyncdist.errors import ClosedError, LeaseLostError
from asyncdist.store.arguments import checked_key, encoded_key
from asyncdist.store.lease import Lease
from asyncdist_server.wire import messages
from asyncdist_server.wire.key_text import shown

if TYPE_CHECKING:
    from asyncdist.store.coordinating_store import CoordinatingStore

__all__ = ["Lock"]


class Lock:
    """A lock between processes. Made by `store.lock`; `async with store.lock(name) as token: ...`.

    Who waits gets it in the order they asked. It is released at the end, or when the holder's process is gone for
    longer than the grace. No lock can stop a holder that was suspended, or cut off from the store, from going on after
    that: hand `token`, which is larger for every later holder, to whatever you write to, and let that refuse a smaller
    one than it has seen. After a restart of a daemon in memory mode tokens begin with its host's clock: one that must
    grow over restarts needs a daemon with a journal (docs/store.md). `LeaseLostError` at the end of the block says that
    the lock was lost inside it.
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
