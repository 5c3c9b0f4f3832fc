"""Words the store checks are written in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, TypeAlias, TypeVar

from asyncdist.store.base import Store

__all__ = [
    "LONG_S",
    "SHORT_S",
    "OpenStore",
    "StoreCheck",
    "clients",
    "expect",
    "expect_pending",
    "expect_raises",
    "task",
]

OpenStore: TypeAlias = Callable[[], Awaitable[Store]]
"""Opens one more client of the store under check."""

StoreCheck: TypeAlias = Callable[[OpenStore], Awaitable[None]]

SHORT_S: Final = 0.05
"""A time-out that is meant to expire."""

LONG_S: Final = 20.0
"""A time-out that only a store that hangs reaches."""

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


@asynccontextmanager
async def clients(open_store: OpenStore, count: int) -> AsyncIterator[list[Store]]:
    """Open `count` clients of one store and close them at the end; nothing may take longer than `LONG_S`."""
    async with AsyncExitStack() as stack, asyncio.timeout(LONG_S):
        yield [await stack.enter_async_context(await open_store()) for _ in range(count)]


def expect(actual: object, expected: object) -> None:
    """Raise AssertionError unless both are equal and of one type."""
    if type(actual) is not type(expected) or actual != expected:
        raise AssertionError(f"expected {expected!r}, got {actual!r}")


async def expect_none(awaitable: Awaitable[object]) -> None:
    """Raise AssertionError unless `awaitable` gives None."""
    expect(await awaitable, None)


async def expect_raises(kind: type[E], call: Callable[[], Awaitable[Any]]) -> E:
    """Return the exception of type `kind` that `call()`, or awaiting what it returns, raises."""
    try:
        result = await call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got the result {result!r}")


def task(awaitable: Awaitable[T]) -> asyncio.Future[T]:
    """Start waiting for `awaitable` without waiting here."""
    return asyncio.ensure_future(awaitable)


async def expect_pending(future: asyncio.Future[Any], store: Store) -> None:
    """Raise AssertionError if `future` is done although all that `store` was asked has had time to be answered.

    Two round trips: the first makes sure that a request issued before it was seen, the second that an answer would have
    come back.
    """
    for _ in range(2):
        await asyncio.sleep(0)
        await store.check([])
        await store.num_keys()
    if future.done():
        raise AssertionError(f"expected to be waiting, got {future!r}")
