"""StoreOfLoop: a store that belongs to one event loop, used from the communication thread's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from asyncdist.errors import ClosedError
from asyncdist.store import Lease, Store

__all__ = ["StoreOfLoop", "store_of_loop"]


class StoreOfLoop(Store):
    """Every verb runs on `loop`, where `store` was opened; while that loop is blocked, none is answered."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(store.timeout)
        self.underlying_store = store
        self._loop = loop

    def set_timeout(self, timeout: Any) -> None:
        super().set_timeout(timeout)
        self.underlying_store.set_timeout(timeout)

    async def lease(self, ttl: Any = 10.0, *, bound: bool = False) -> Lease:
        return _LeaseOfLoop(await self._there("lease", ttl, bound=bound), self._loop)

    def hold(self, prefix: str, lease: Lease, *, linger: Any = 0.0) -> Awaitable[None]:
        return self._there("hold", prefix, lease.inner if isinstance(lease, _LeaseOfLoop) else lease, linger=linger)

    def _there(self, name: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        async def there() -> Any:
            return await getattr(self.underlying_store, name)(*arguments, **options)

        coroutine = there()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise ClosedError("the event loop of the store is closed") from None
        return asyncio.wrap_future(future)


class _LeaseOfLoop(Lease):
    """What a rendezvous uses of a lease, from another loop than that of its store."""

    def __init__(self, inner: Lease, loop: asyncio.AbstractEventLoop) -> None:
        # Not Lease's own: the store knows `inner`.
        self.inner = inner
        self._loop = loop

    @property
    def lost(self) -> bool:
        return self.inner.lost

    def abandon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the store with it
            self._loop.call_soon_threadsafe(self.inner.abandon)


def _verb(name: str) -> Callable[..., Awaitable[Any]]:
    def verb(self: StoreOfLoop, *arguments: Any, **options: Any) -> Awaitable[Any]:
        return self._there(name, *arguments, **options)

    verb.__name__ = name
    verb.__doc__ = "See Store."
    return verb


for _name in Store.__abstractmethods__:
    setattr(StoreOfLoop, _name, _verb(_name))
StoreOfLoop.__abstractmethods__ = frozenset()


def store_of_loop(store: Store, loop: asyncio.AbstractEventLoop) -> Store:
    """Return `store`, which belongs to `loop`, for use from another thread."""
    return StoreOfLoop(store, loop)  # type: ignore[abstract] # its verbs are made above
