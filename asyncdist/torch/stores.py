"""Stores between torch and asyncdist: `Store` is asyncdist's for torch, `StoreOfTorch` torch's for asyncdist."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from datetime import timedelta
from typing import Any, ClassVar, Final, NoReturn

import torch.distributed as dist

from asyncdist import blocking, store
from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.errors import (
    ClosedError,
    DistError,
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
    StoreTimeoutError,
)
from asyncdist.store.credentials import FROM_ENVIRONMENT
from asyncdist.threads.bridge import complete
from asyncdist.torch.work import outside_loop

POLL_S: Final = (1e-3, 0.05)
"""How often torch's store is asked for a key that is not there yet: at first, and in the end."""
LEASE_S: Final = 30.0
"""How long keys of a prefix outlive the last of its stores: a program that is started anew finds them."""


def store_of(given: dist.Store, group_id: str) -> store.Store:
    """What the ranks of a group meet by: the client of an asyncdist daemon inside of `given`, or `given` itself."""
    inner = given
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, Store):
        return store.PrefixStore(f"torch/{group_id}", inner.inner)
    # torchrun's store has what the ranks before a restart left, and no leases that would tell which of them are gone.
    return StoreOfTorch(dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", given))


class StoreOfTorch(store.Store):
    """A store of torch's for the rendezvous of a world. Its verbs take their turns in a thread of their own.

    A client of torch's TCPStore does nothing else while it waits for a key, so keys are asked for again and again.
    """

    lookout: ClassVar[None] = None

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self._inner = inner
        self._turns = ThreadPoolExecutor(1, "asyncdist torch store")

    def __repr__(self) -> str:
        return f"StoreOfTorch({type(self._inner).__name__})"

    def _ask(self, verb: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        def ask() -> Any:
            try:
                return verb(*arguments)
            except RuntimeError as error:  # torch's errors are, of any store
                raise DistStoreError(f"torch's store: {error}") from error

        try:
            return asyncio.get_running_loop().run_in_executor(self._turns, ask)
        except RuntimeError:
            raise ClosedError(f"{self!r} is closed") from None

    def set(self, key: str, value: str | bytes, *, lease: Any = None) -> Awaitable[None]:
        return self._ask(self._inner.set, key, value)

    async def get(self, key: str, *, timeout: Timeout = INHERIT) -> bytes:
        return (await self.multi_get([key], timeout=timeout))[0]

    def add(self, key: str, amount: int) -> Awaitable[int]:
        return self._ask(self._inner.add, key, amount)

    async def wait(self, keys: Iterable[str], timeout: Timeout = INHERIT) -> None:
        keys = list(keys)
        timeout_s = timeout_seconds(timeout, self.timeout)
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s, longest_s = POLL_S
        while not await self.check(keys):
            if end_s is not None and time.monotonic() >= end_s:
                raise StoreTimeoutError(f"torch's store: {', '.join(keys)} did not come within {timeout_s:g} s", keys)
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)

    def check(self, keys: Iterable[str]) -> Awaitable[bool]:
        return self._ask(self._inner.check, list(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> Awaitable[bytes]:
        return self._ask(self._inner.compare_set, key, expected, desired)

    def delete_key(self, key: str) -> Awaitable[bool]:
        return self._ask(self._inner.delete_key, key)

    def append(self, key: str, value: str | bytes) -> Awaitable[None]:
        return self._ask(self._inner.append, key, value)

    async def multi_get(self, keys: Iterable[str], *, timeout: Timeout = INHERIT) -> list[bytes]:
        keys = list(keys)
        await self.wait(keys, timeout)
        values: list[bytes] = await self._ask(lambda: [self._inner.get(key) for key in keys])
        return values

    def multi_set(self, keys: Iterable[str], values: Iterable[str | bytes]) -> Awaitable[None]:
        pairs = list(zip(keys, values, strict=True))
        return self._ask(lambda: [self._inner.set(key, value) for key, value in pairs] and None)

    def num_keys(self) -> Awaitable[int]:
        return self._ask(self._inner.num_keys)

    async def list_keys(self, prefix: str = "") -> list[str]:
        """The keys, or none where torch's store cannot list them: then nobody is named who is missing."""
        try:
            keys = await self._ask(self._inner.list_keys)
        except DistStoreError:
            return []
        return [key for key in keys if key.startswith(prefix)]

    def queue_push(self, key: str, value: str | bytes) -> Awaitable[None]:
        self._not_offered("queues")

    def queue_pop(self, key: str, block: bool = True, *, timeout: Timeout = INHERIT) -> Awaitable[bytes]:
        self._not_offered("queues")

    def queue_len(self, key: str) -> Awaitable[int]:
        self._not_offered("queues")

    async def close(self) -> None:
        """End the thread; torch's store stays open."""
        self._turns.shutdown(wait=False)


def _verb(name: str) -> Callable[..., Any]:
    """The verb of `blocking.TCPStore`, with torch's errors."""

    @functools.wraps(getattr(blocking.Store, name))
    def verb(self: Store, *arguments: Any, **options: Any) -> Any:
        try:
            with outside_loop():
                return getattr(self._keys, name)(*arguments, **options)
        except DistError as error:
            _raise_as_torch(error)

    return verb


def _raise_as_torch(error: DistError) -> NoReturn:
    kinds = {QueueEmptyError: dist.QueueEmptyError, DistNetworkError: dist.DistNetworkError}
    kind = next((kinds[each] for each in kinds if isinstance(error, each)), dist.DistStoreError)
    raise kind(str(error)) from error


class Store(dist.Store):  # type: ignore[misc] # torch is not typed here
    """A client of the asyncdist daemon as torch's store: for `init_process_group(store=...)`, agents, your own keys.

    It proves the daemon's token, reconnects after a restart, and never gives up half of what it was asked. With
    `prefix` the store sees keys of that beginning only, and they are deleted 30 s after the last store of that prefix
    has gone, however it went. Errors are torch's: DistStoreError for what the daemon refuses and what does not come in
    time, DistNetworkError for a daemon out of reach.

    It stays open until `close`, as torch itself does not keep what it was given.
    """

    _open: ClassVar[set[Store]] = set()

    def __init__(
        self,
        host_name: str,
        port: int,
        prefix: str = "",
        timeout: timedelta = timedelta(seconds=300),
        *,
        token: Any = FROM_ENVIRONMENT,
        tls: Any = FROM_ENVIRONMENT,
        namespace: str = "",
    ) -> None:
        """`token`, `tls` and `namespace` are those of `asyncdist.TCPStore`."""
        super().__init__()
        self._arguments = {"token": token, "tls": tls, "namespace": namespace}
        try:
            with outside_loop():
                self._store = blocking.TCPStore(host_name, port, timeout=timeout, **self._arguments)
                self._keys: blocking.Store = blocking.PrefixStore(prefix, self._store) if prefix else self._store
                if prefix:
                    thread = self._store._thread
                    assert thread is not None, "it is open"
                    complete(thread, self._hold, Context())
        except DistError as error:
            _raise_as_torch(error)
        self._prefix = prefix
        self._open.add(self)

    async def _hold(self) -> None:
        lease = await self.inner.lease(LEASE_S, bound=True)
        await self.inner.hold("", lease, linger=LEASE_S)

    @property
    def inner(self) -> store.Store:
        """The store of the communication thread."""
        return self._keys._inner

    set = _verb("set")
    get = _verb("get")
    add = _verb("add")
    wait = _verb("wait")
    check = _verb("check")
    compare_set = _verb("compare_set")
    append = _verb("append")
    multi_get = _verb("multi_get")
    multi_set = _verb("multi_set")
    list_keys = _verb("list_keys")
    queue_push = _verb("queue_push")
    queue_pop = _verb("queue_pop")
    queue_len = _verb("queue_len")
    barrier = _verb("barrier")
    delete_key = deleteKey = _verb("delete_key")  # torch calls some verbs by their names in C++
    num_keys = getNumKeys = _verb("num_keys")

    @property
    def timeout(self) -> timedelta:
        """After which time a verb that waits for a key gives up."""
        return timedelta(seconds=self._keys.timeout or 0)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change `timeout`."""
        self._keys.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """True: there are append, multi_get and multi_set."""
        return True

    def clone(self) -> Store:
        """Another client of the same daemon and prefix."""
        return type(self)(self._store.host, self._store.port, self._prefix, self.timeout, **self._arguments)

    def close(self) -> None:
        """Disconnect. May be called twice."""
        self._open.discard(self)
        with outside_loop():
            self._store.close()
