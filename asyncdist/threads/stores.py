"""StoreOfLoop: a store that belongs to one event loop, used from the communication thread's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

from asyncdist.errors import ClosedError
from asyncdist.store import Lease, Store, Watch, WatchEvent

__all__ = ["StoreOfLoop", "store_of_loop"]

T = TypeVar("T")


class StoreOfLoop(Store):
    """Every verb runs on `loop`, where `store` was opened; while that loop is blocked, none is answered."""

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

    async def lease(self, ttl: Any = 10.0, *, bound: bool = False) -> Lease:
        return _LeaseOfLoop(await self._there("lease", ttl, bound=bound), self.loop)

    def set(self, key: str, value: str | bytes, *, lease: Lease | None = None) -> Awaitable[None]:
        if lease is None:
            return self._there("set", key, value)
        return self._there("set", key, value, lease=_inner(lease))

    def hold(self, prefix: str, lease: Lease, *, linger: Any = 0.0) -> Awaitable[None]:
        return self._there("hold", prefix, _inner(lease), linger=linger)

    def watch(self, prefix: str = "", from_revision: int | None = None) -> Watch:
        return _WatchOfLoop(self, prefix, from_revision)

    def _there(self, name: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        async def there() -> Any:
            return await getattr(self.underlying_store, name)(*arguments, **options)

        return self.run_there(there())

    def run_there(self, coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Run `coroutine` on the store's loop."""
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
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


def _inner(lease: Lease) -> Lease:
    return lease.inner if isinstance(lease, _LeaseOfLoop) else lease


class _WatchOfLoop(Watch):
    """A watch of a store of another loop. It begins when it is entered."""

    def __init__(self, store: StoreOfLoop, prefix: str, from_revision: int | None) -> None:
        # Not Watch's own: the store asks for the inner one.
        self._store = store
        self._begin_at = prefix, from_revision
        self._strip = 0
        self._inner: Watch | None = None

    def __repr__(self) -> str:
        return f"<Watch of {self._begin_at[0]!r} from another loop>"

    async def __aenter__(self) -> Self:
        async def there() -> None:
            self._inner = self._store.underlying_store.watch(*self._begin_at).strip(self._strip)
            await self._inner.__aenter__()

        await self._store.run_there(there())
        return self

    async def __anext__(self) -> WatchEvent:
        assert self._inner is not None, "it is entered first"
        return await self._store.run_there(_next(self._inner))

    def close_with(self, error: Callable[[], Exception]) -> None:
        if self._inner is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the store with it
                self._store.loop.call_soon_threadsafe(self._inner.close_with, error)


async def _next(watch: Watch) -> WatchEvent:
    return await anext(watch)


def _verb(name: str) -> Callable[..., Awaitable[Any]]:
    def verb(self: StoreOfLoop, *arguments: Any, **options: Any) -> Awaitable[Any]:
        return self._there(name, *arguments, **options)

    verb.__name__ = name
    verb.__doc__ = "See Store."
    return verb


for _name in Store.__abstractmethods__ - vars(StoreOfLoop).keys():
    setattr(StoreOfLoop, _name, _verb(_name))
StoreOfLoop.__abstractmethods__ = frozenset()


def store_of_loop(store: Store, loop: asyncio.AbstractEventLoop) -> Store:
    """Return `store`, which belongs to `loop`, for use from another thread."""
    return StoreOfLoop(store, loop)  # type: ignore[abstract] # its verbs are made above
