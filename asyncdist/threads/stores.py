"""StoreOfLoop: a store that belongs to one event loop, used from the communication thread's.

A verb runs on the loop where the store was opened; while that loop is blocked, none is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from asyncdist.errors import ClosedError
from asyncdist.store import Lease, Store, Watch, WatchEvent

__all__ = ["StoreOfLoop"]

P = ParamSpec("P")
T = TypeVar("T")


def _verb(verb: Callable[Concatenate[Any, P], Awaitable[T]]) -> Callable[Concatenate[Any, P], Awaitable[T]]:
    """The same verb of a store of another loop."""
    name = verb.__name__

    @functools.wraps(verb, updated=())  # else it would be abstract, too
    def there(self: Any, *arguments: P.args, **options: P.kwargs) -> Awaitable[T]:
        async def ask() -> T:
            asked: Awaitable[T] = getattr(self.underlying_store, name)(*arguments, **options)
            return await asked

        answer: Awaitable[T] = self.run_there(ask())
        return answer

    return cast(Callable[Concatenate[Any, P], Awaitable[T]], there)


class StoreOfLoop(Store):
    """`store`, which belongs to `loop`, for another loop."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(store.timeout)
        self.underlying_store = store
        self.loop = loop

    @property
    def is_connected(self) -> bool:
        return self.underlying_store.is_connected

    def set_timeout(self, timeout: Any) -> None:
        super().set_timeout(timeout)
        self.underlying_store.set_timeout(timeout)

    get = _verb(Store.get)
    add = _verb(Store.add)
    wait = _verb(Store.wait)
    check = _verb(Store.check)
    compare_set = _verb(Store.compare_set)
    delete_key = _verb(Store.delete_key)
    append = _verb(Store.append)
    multi_get = _verb(Store.multi_get)
    multi_set = _verb(Store.multi_set)
    num_keys = _verb(Store.num_keys)
    list_keys = _verb(Store.list_keys)
    queue_push = _verb(Store.queue_push)
    queue_pop = _verb(Store.queue_pop)
    queue_len = _verb(Store.queue_len)
    close = _verb(Store.close)
    _set = _verb(Store.set)
    _hold = _verb(Store.hold)
    _lease = _verb(Store.lease)

    def set(self, key: str, value: str | bytes, *, lease: Lease | None = None) -> Awaitable[None]:
        return self._set(key, value) if lease is None else self._set(key, value, lease=_inner(lease))

    def hold(self, prefix: str, lease: Lease, *, linger: Any = 0.0) -> Awaitable[None]:
        return self._hold(prefix, _inner(lease), linger=linger)

    async def lease(self, ttl: Any = 10.0, *, bound: bool = False) -> Lease:
        return cast(Lease, LeaseOfLoop(await self._lease(ttl, bound=bound), self.loop))

    def watch(self, prefix: str = "", from_revision: int | None = None) -> Watch:
        return cast(Watch, WatchOfLoop(self, prefix, from_revision))

    def run_there(self, coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Run `coroutine` on the store's loop."""
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:
            coroutine.close()
            raise ClosedError("the event loop of the store is closed") from None
        return asyncio.wrap_future(future)


class LeaseOfLoop:
    """What a rendezvous uses of a lease."""

    def __init__(self, inner: Lease, loop: asyncio.AbstractEventLoop) -> None:
        self.inner = inner
        self._loop = loop

    @property
    def lost(self) -> bool:
        """See `Lease`."""
        return self.inner.lost

    def abandon(self) -> None:
        """See `Lease`."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the store with it
            self._loop.call_soon_threadsafe(self.inner.abandon)


def _inner(lease: Lease | LeaseOfLoop) -> Lease:
    return lease.inner if isinstance(lease, LeaseOfLoop) else lease


class WatchOfLoop:
    """What a rendezvous uses of a watch. It begins when it is entered."""

    def __init__(self, store: StoreOfLoop, prefix: str, from_revision: int | None) -> None:
        self._store = store
        self._begin_at = prefix, from_revision
        self._strip = 0
        self._inner: Watch | None = None

    def strip(self, count: int) -> Self:
        """See `Watch`."""
        self._strip += count
        return self

    async def __aenter__(self) -> Self:
        async def there() -> None:
            self._inner = self._store.underlying_store.watch(*self._begin_at).strip(self._strip)
            await self._inner.__aenter__()

        await self._store.run_there(there())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._inner is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the store with it
                self._store.loop.call_soon_threadsafe(self._inner.close_with, StopAsyncIteration)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        assert self._inner is not None, "it is entered first"
        return await self._store.run_there(_next(self._inner))


async def _next(watch: Watch) -> WatchEvent:
    return await anext(watch)
