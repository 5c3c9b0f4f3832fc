"""PrefixStore: a view of another store in which all keys begin alike."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import NoReturn, TypeVar

from asyncdist.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.errors import ClosedError, StoreTimeoutError
from asyncdist.store.arguments import checked_key, checked_keys
from asyncdist.store.base import DEFAULT_STORE_TIMEOUT_S, Store

__all__ = ["PrefixStore"]

T = TypeVar("T")


class PrefixStore(Store):
    """Shows the keys of `store` that begin with `prefix` and a slash, without them.

    `PrefixStore("b", PrefixStore("a", store)).set("k", v)` writes `a/b/k`. `num_keys` and `list_keys` see this prefix
    only (`pre` never shows `pref/x`). `timeout` is the underlying store's until `set_timeout` gives this view its own.
    `close` ends the view and leaves the underlying store open. The verbs that change nothing are coroutines here,
    issued when first awaited.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"PrefixStore needs a Store, not {type(store).__name__}")
        super().__init__()
        self._prefix = checked_key(prefix) + "/"
        self._store = store
        self._own_timeout = False
        self._closed = False

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix[:-1]!r}, {self._store!r})"

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

    def set_timeout(self, timeout: Timeout) -> None:
        """Change `timeout` of this view; `INHERIT` means the underlying store's again."""
        self._timeout_s = timeout_seconds(timeout, DEFAULT_STORE_TIMEOUT_S)
        self._own_timeout = timeout is not INHERIT

    def set(self, key: str, value: str | bytes) -> Awaitable[None]:
        """Store `value` under `key`, replacing what was there."""
        return self._store.set(self._full(key), value)

    def get(self, key: str, *, timeout: Timeout = INHERIT) -> Awaitable[bytes]:
        """Return the value of `key`, waiting until it exists."""
        return self._get(self._full(key), timeout_seconds(timeout, self.timeout))

    async def _get(self, key: str, timeout_s: float | None) -> bytes:
        try:
            return await self._store.get(key, timeout=timeout_s)
        except StoreTimeoutError as error:
            self._raise_stripped(error)

    def add(self, key: str, amount: int) -> Awaitable[int]:
        """Add `amount` to the counter `key` and return the sum."""
        return self._store.add(self._full(key), amount)

    def wait(self, keys: Iterable[str], timeout: Timeout = INHERIT) -> Awaitable[None]:
        """Wait until all `keys` exist at one moment."""
        return self._wait(self._all_full(keys), timeout_seconds(timeout, self.timeout))

    async def _wait(self, keys: Sequence[str], timeout_s: float | None) -> None:
        try:
            await self._store.wait(keys, timeout_s)
        except StoreTimeoutError as error:
            self._raise_stripped(error)

    def check(self, keys: Iterable[str]) -> Awaitable[bool]:
        """Return whether all `keys` exist now."""
        return self._store.check(self._all_full(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> Awaitable[bytes]:
        """Set `key` to `desired` if its value is `expected`; see `Store.compare_set`."""
        return self._store.compare_set(self._full(key), expected, desired)

    def delete_key(self, key: str) -> Awaitable[bool]:
        """Delete `key`; return whether it existed."""
        return self._store.delete_key(self._full(key))

    def append(self, key: str, value: str | bytes) -> Awaitable[None]:
        """Append `value` to the value of `key`, which is empty when missing."""
        return self._store.append(self._full(key), value)

    def multi_get(self, keys: Iterable[str], *, timeout: Timeout = INHERIT) -> Awaitable[list[bytes]]:
        """Return the values of `keys` in their order, waiting until all exist at one moment."""
        return self._multi_get(self._all_full(keys), timeout_seconds(timeout, self.timeout))

    async def _multi_get(self, keys: Sequence[str], timeout_s: float | None) -> list[bytes]:
        try:
            return await self._store.multi_get(keys, timeout=timeout_s)
        except StoreTimeoutError as error:
            self._raise_stripped(error)

    def multi_set(self, keys: Iterable[str], values: Iterable[str | bytes]) -> Awaitable[None]:
        """Set each of `keys` to its value, all at one moment."""
        return self._store.multi_set(self._all_full(keys), values)

    def num_keys(self) -> Awaitable[int]:
        """Return how many keys exist under the prefix."""
        self._raise_if_closed()
        return self._num_keys()

    async def _num_keys(self) -> int:
        return len(await self._store.list_keys(self._prefix))

    def list_keys(self, prefix: str = "") -> Awaitable[list[str]]:
        """Return the keys under the prefix that go on with `prefix`, without the view's prefix."""
        return self._list_keys(self._full(prefix))

    async def _list_keys(self, prefix: str) -> list[str]:
        length = len(self._prefix)
        return [key[length:] for key in await self._store.list_keys(prefix)]

    def queue_push(self, key: str, value: str | bytes) -> Awaitable[None]:
        """Append `value` to the queue `key`; one waiting `queue_pop` gets it."""
        return self._store.queue_push(self._full(key), value)

    def queue_pop(self, key: str, block: bool = True, *, timeout: Timeout = INHERIT) -> Awaitable[bytes]:
        """Take the oldest value from the queue `key`, waiting for one; `QueueEmptyError` with `block=False`."""
        return self._queue_pop(self._full(key), block, timeout_seconds(timeout, self.timeout))

    async def _queue_pop(self, key: str, block: bool, timeout_s: float | None) -> bytes:
        try:
            return await self._store.queue_pop(key, block, timeout=timeout_s)
        except StoreTimeoutError as error:
            self._raise_stripped(error)

    def queue_len(self, key: str) -> Awaitable[int]:
        """Return how many values the queue `key` holds."""
        return self._store.queue_len(self._full(key))

    async def close(self) -> None:
        """End this view; the underlying store stays open."""
        self._closed = True

    def _full(self, key: str) -> str:
        self._raise_if_closed()
        return self._prefix + checked_key(key)

    def _all_full(self, keys: Iterable[str]) -> list[str]:
        self._raise_if_closed()
        return [self._prefix + key for key in checked_keys(keys)]

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed")

    def _raise_stripped(self, error: StoreTimeoutError) -> NoReturn:
        """Raise what the underlying store raised, with the keys as the caller of this view knows them."""
        raise StoreTimeoutError(str(error), [key.removeprefix(self._prefix) for key in error.keys]) from error
