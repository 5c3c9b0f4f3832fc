"""PrefixStore: a view of another store in which all keys begin alike."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.errors import ClosedError, StoreTimeoutError
from asyncdist.store.base import DEFAULT_STORE_TIMEOUT_S, Store, checked_key, checked_keys
from asyncdist_server.wire.key_text import shown

if TYPE_CHECKING:
    from asyncdist.store.lease import Lease, Lock
    from asyncdist.store.member import Membership
    from asyncdist.store.watch import Watch

P = ParamSpec("P")
T = TypeVar("T")


class PrefixStore(Store):
    """Shows the keys of `store` that begin with `prefix` and a slash, without them.

    `PrefixStore("b", PrefixStore("a", store)).set("k", v)` writes `a/b/k`. `num_keys` and `list_keys` see this prefix
    only (`pre` never shows `pref/x`). `timeout` is the underlying store's until `set_timeout` gives this view its own.
    `close` ends the view and leaves the underlying store open. Verbs that wait for others, and those that count
    and list keys, are coroutines here: issued when first awaited.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"PrefixStore needs a Store, not {type(store).__name__}")
        super().__init__()
        self._prefix = checked_key(prefix) + "/"
        self._store = store
        self._own_timeout = False
        self._owns_store = False
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"PrefixStore('{shown(self._prefix[:-1])}', {self._store!r})"

    @property
    def prefix(self) -> str:
        """The prefix as it was given."""
        return self._prefix[:-1]

    @property
    def underlying_store(self) -> Store:
        """The store this is a view of."""
        return self._store

    @property
    def timeout(self) -> float | None:
        """Seconds after which a waiting verb of this view gives up; None for never."""
        return self._timeout_s if self._own_timeout else self._store.timeout

    @property
    def is_connected(self) -> bool:
        """Whether requests reach the daemon now."""
        return self._store.is_connected

    def set_timeout(self, timeout: Timeout) -> None:
        """Change `timeout` of this view; `INHERIT` means the underlying store's again."""
        self._timeout_s = timeout_seconds(timeout, DEFAULT_STORE_TIMEOUT_S)
        self._own_timeout = timeout is not INHERIT

    def set(self, key: str, value: str | bytes, *, lease: Lease | None = None) -> Awaitable[None]:
        if lease is None:
            return self._bounded(self._store.set, self._full(key), value)
        return self._bounded(self._store.set, self._full(key), value, lease=lease)

    def get(self, key: str, *, timeout: Timeout = INHERIT) -> Awaitable[bytes]:
        return self._waiting(self._store.get, self._full(key), timeout=timeout_seconds(timeout, self.timeout))

    def add(self, key: str, amount: int) -> Awaitable[int]:
        return self._bounded(self._store.add, self._full(key), amount)

    def wait(self, keys: Iterable[str], timeout: Timeout = INHERIT) -> Awaitable[None]:
        return self._waiting(self._store.wait, self._all_full(keys), timeout_seconds(timeout, self.timeout))

    def check(self, keys: Iterable[str]) -> Awaitable[bool]:
        return self._bounded(self._store.check, self._all_full(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> Awaitable[bytes]:
        return self._bounded(self._store.compare_set, self._full(key), expected, desired)

    def delete_key(self, key: str) -> Awaitable[bool]:
        return self._bounded(self._store.delete_key, self._full(key))

    def append(self, key: str, value: str | bytes) -> Awaitable[None]:
        return self._bounded(self._store.append, self._full(key), value)

    def multi_get(self, keys: Iterable[str], *, timeout: Timeout = INHERIT) -> Awaitable[list[bytes]]:
        timeout_s = timeout_seconds(timeout, self.timeout)
        return self._waiting(self._store.multi_get, self._all_full(keys), timeout=timeout_s)

    def multi_set(self, keys: Iterable[str], values: Iterable[str | bytes]) -> Awaitable[None]:
        return self._bounded(self._store.multi_set, self._all_full(keys), values)

    def num_keys(self) -> Awaitable[int]:
        """Return how many keys exist under the prefix."""
        self._raise_if_closed()
        return self._num_keys()

    async def _num_keys(self) -> int:
        return len(await self._bounded(self._store.list_keys, self._prefix))

    def list_keys(self, prefix: str = "") -> Awaitable[list[str]]:
        """Return the keys under the prefix that go on with `prefix`, without the view's prefix."""
        return self._list_keys(self._full(prefix))

    async def _list_keys(self, prefix: str) -> list[str]:
        length = len(self._prefix)
        return [key[length:] for key in await self._bounded(self._store.list_keys, prefix)]

    def queue_push(self, key: str, value: str | bytes) -> Awaitable[None]:
        return self._bounded(self._store.queue_push, self._full(key), value)

    def queue_pop(self, key: str, block: bool = True, *, timeout: Timeout = INHERIT) -> Awaitable[bytes]:
        timeout_s = timeout_seconds(timeout, self.timeout)
        return self._waiting(self._store.queue_pop, self._full(key), block, timeout=timeout_s)

    def queue_len(self, key: str) -> Awaitable[int]:
        return self._bounded(self._store.queue_len, self._full(key))

    def lease(self, ttl: Timeout = 10.0, *, bound: bool = False) -> Awaitable[Lease]:
        """Return a lease of the underlying store; leases have no names, so that views share them."""
        self._raise_if_closed()
        return self._bounded(self._store.lease, ttl, bound=bound)

    def hold(self, prefix: str, lease: Lease, *, linger: Timeout = 0.0) -> Awaitable[None]:
        """Delete what begins with this view's prefix and `prefix` once no lease holds it; see `Store.hold`."""
        return self._bounded(self._store.hold, self._full(prefix), lease, linger=linger)

    def watch(self, prefix: str = "", from_revision: int | None = None) -> Watch:
        """Return what happens to this view's keys that begin with `prefix`; see `Store.watch`."""
        watch = self._store.watch(self._full(prefix), from_revision).strip(len(self._prefix))
        self._watches.add(watch)
        return watch

    def lock(self, name: str, *, grace: Timeout = 10.0, timeout: Timeout = INHERIT) -> Lock:
        """Return a lock of its own for this view; see `Store.lock`."""
        return self._store.lock(self._full(name), grace=grace, timeout=timeout_seconds(timeout, self.timeout))

    def join(
        self,
        job: str,
        min: int,
        max: int | None = None,
        timeout: Timeout = INHERIT,
        *,
        name: str | None = None,
        settle: Timeout = 3.0,
        grace: Timeout = 10.0,
        bound: bool = True,
    ) -> Awaitable[Membership]:
        """Meet the members of a job of this view; see `Store.join`. Its keys are outside the view's prefix."""
        timeout_s = timeout_seconds(timeout, self.timeout)
        return self._store.join(
            self._full(job), min, max, timeout_s, name=name, settle=settle, grace=grace, bound=bound
        )

    def expel(self, job: str, member: str) -> Awaitable[None]:
        """Take a member out of a job of this view; see `Store.expel`."""
        return self._bounded(self._store.expel, self._full(job), member)

    def clone(self) -> PrefixStore:
        """See `Store.clone`: a view of a clone of the underlying store, which it opens and closes."""
        self._raise_if_closed()
        other = PrefixStore(self.prefix, self._store.clone())
        other._timeout_s, other._own_timeout, other._owns_store = self._timeout_s, self._own_timeout, True
        return other

    async def __aenter__(self) -> Self:
        if self._owns_store:
            await self._store.__aenter__()
        return self

    async def close(self) -> None:
        """End this view and what it waits for; the underlying store stays open, unless it is a clone's own."""
        self._closed = True
        for watch in list(self._watches):
            watch.close_with(lambda: ClosedError(f"{self!r} was closed"))
        for task in self._tasks:
            task.cancel()
        if self._owns_store:
            await self._store.close()

    def _bounded(self, verb: Callable[P, Awaitable[T]], *arguments: P.args, **options: P.kwargs) -> Awaitable[T]:
        """Call `verb` of the underlying store, which takes its bound from that store's time-out at the call."""
        if not self._own_timeout:
            return verb(*arguments, **options)
        before = self._store.timeout
        self._store.set_timeout(self._timeout_s)
        try:
            return verb(*arguments, **options)
        finally:
            self._store.set_timeout(before)

    def _full(self, key: str) -> str:
        self._raise_if_closed()
        return self._prefix + checked_key(key)

    def _all_full(self, keys: Iterable[str]) -> list[str]:
        self._raise_if_closed()
        return [self._prefix + key for key in checked_keys(keys)]

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed")

    async def _waiting(self, verb: Callable[P, Awaitable[T]], *arguments: P.args, **options: P.kwargs) -> T:
        """Wait for a verb until `close`. Errors name keys as the caller of this view knows them.

        `close` cancels the task, and the cancellation becomes a ClosedError here, as `asyncio.timeout` makes a
        TimeoutError of one. To cancel is the only way to end a wait in any store without losing an item of a queue.
        """
        self._raise_if_closed()
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        self._tasks.add(task)
        try:
            return await verb(*arguments, **options)
        except asyncio.CancelledError:
            if self._closed and task.uncancel() <= cancelling:
                raise ClosedError(f"{self!r} was closed") from None
            raise
        except StoreTimeoutError as error:
            keys = [key.removeprefix(self._prefix) for key in error.keys]
            raise StoreTimeoutError(str(error), keys) from error.__cause__
        finally:
            self._tasks.discard(task)
