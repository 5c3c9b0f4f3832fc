"""StoreOfLoop: a store that belongs to one event loop, used from the communication thread's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from asyncdist.errors import ClosedError
from asyncdist.store import Store

__all__ = ["store_of_loop"]


class StoreOfLoop(Store):
    """Every verb runs on `loop`, where `store` was opened; while that loop is blocked, none is answered."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(store.timeout)
        self._store = store
        self._loop = loop

    def set_timeout(self, timeout: Any) -> None:
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)


def _verb(name: str) -> Callable[..., Awaitable[Any]]:
    def verb(self: StoreOfLoop, *arguments: Any, **options: Any) -> Awaitable[Any]:
        async def there() -> Any:
            return await getattr(self._store, name)(*arguments, **options)

        coroutine = there()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise ClosedError("the event loop of the store is closed") from None
        return asyncio.wrap_future(future)

    verb.__name__ = name
    verb.__doc__ = "See Store."
    return verb


for _name in Store.__abstractmethods__:
    setattr(StoreOfLoop, _name, _verb(_name))
StoreOfLoop.__abstractmethods__ = frozenset()


def store_of_loop(store: Store, loop: asyncio.AbstractEventLoop) -> Store:
    """Return `store`, which belongs to `loop`, for use from another thread."""
    return StoreOfLoop(store, loop)  # type: ignore[abstract] # its verbs are made above
