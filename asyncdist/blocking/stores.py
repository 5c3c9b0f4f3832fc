"""Stores for ordinary threads: every verb waits for its answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from contextvars import Context
from types import TracebackType
from typing import Any, Self

from asyncdist import store as stores
from asyncdist.blocking.refuse_loop import refuse_loop
from asyncdist.blocking.session import await_there
from asyncdist.errors import ClosedError
from asyncdist.threads.thread import CommunicationThread, acquire, release

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore", "inner_store"]


class Store:
    """A store of `asyncdist` whose verbs wait; arguments, results and errors are the same.

    `close` it, or enter it with `with`: the communication thread runs as long as a store is open. One that is forgotten
    is closed when nothing refers to it any more; an open world refers to its store. Ctrl-C gives up opening, and what a
    verb waits for: an item that comes is left in its queue.
    """

    _kind: type[stores.Store]
    _inner: stores.Store

    def __init_subclass__(cls) -> None:
        cls.__signature__ = inspect.signature(cls._kind)  # type: ignore[attr-defined] # for `help`

    def __init__(self, *arguments: Any, **options: Any) -> None:
        refuse_loop(type(self).__name__)
        self._uses = [value for value in (*arguments, *options.values()) if isinstance(value, Store)]
        arguments = tuple(map(inner_store, arguments))
        options = {name: inner_store(value) for name, value in options.items()}
        self._thread: CommunicationThread | None = acquire()
        try:
            self._inner = self._thread.call(lambda: self._kind(*arguments, **options))
            await_there(self._thread, self._inner.__aenter__, Context(), cancels=True)
        except BaseException as error:
            if isinstance(error, Exception) or not hasattr(self, "_inner"):
                release(self._thread)
            else:
                _forget(self._thread, self._inner)  # Ctrl-C: it may be open already
            raise
        self._forgotten = weakref.finalize(self, _forget, self._thread, self._inner)
        self._forgotten.atexit = False

    @property
    def timeout(self) -> float | None:
        """Seconds after which a verb gives up unless it says otherwise; None for never."""
        return self._inner.timeout

    def set_timeout(self, timeout: Any) -> None:
        """Change `timeout` for the calls that follow."""
        self._inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """True: every store has append, multi_get, multi_set and queues."""
        return self._inner.has_extended_api()

    def close(self) -> None:
        """Give up what the store holds. May be called twice."""
        refuse_loop(f"{type(self).__name__}.close")
        thread, self._thread = self._thread, None
        if thread is not None:
            self._forgotten.detach()
            try:
                await_there(thread, self._inner.close, Context())
            finally:
                release(thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<blocking {self._inner!r}>"


class TCPStore(Store):
    """A client of the store daemon, or with `is_master` its host, open when made; arguments as `asyncdist.TCPStore`'s.

    The daemon of a master ends when its store is closed, or forgotten.
    """

    _kind = stores.TCPStore
    _inner: stores.TCPStore

    @property
    def host(self) -> str:
        """Where the daemon listens."""
        return self._inner.host

    @property
    def port(self) -> int:
        """The port it listens on; of a master that gave 0 the one it got."""
        return self._inner.port


class FileStore(Store):
    """A store in a file that all ranks can open; arguments as `asyncdist.FileStore`'s."""

    _kind = stores.FileStore
    _inner: stores.FileStore

    @property
    def path(self) -> str:
        """The file."""
        return self._inner.path


class HashStore(Store):
    """A store within this process; arguments as `asyncdist.HashStore`'s."""

    _kind = stores.HashStore


class PrefixStore(Store):
    """A part of another store, whose keys begin with a prefix; arguments as `asyncdist.PrefixStore`'s."""

    _kind = stores.PrefixStore
    _inner: stores.PrefixStore

    @property
    def prefix(self) -> str:
        """The prefix as it was given."""
        return self._inner.prefix

    @property
    def underlying_store(self) -> Store:
        """The store this is a part of."""
        return self._uses[0]


def _forget(thread: CommunicationThread, inner: stores.Store) -> None:
    """Close a store that was not, without waiting for anything: the garbage collector calls it, in any thread."""

    async def close() -> None:
        await inner.close()

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()
            release(thread)

    with contextlib.suppress(ClosedError):
        thread.submit(lambda: thread.start_task(close(), Context(), ended))


def inner_store(value: Any) -> Any:
    """The store of the communication thread that `value` stands for, or `value`."""
    return value._inner if isinstance(value, Store) else value


def _verb(name: str, like: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(like)
    def verb(self: Store, *arguments: Any, **options: Any) -> Any:
        refuse_loop(f"{type(self).__name__}.{name}")
        if self._thread is None:
            raise ClosedError(f"{self!r} is closed")
        ask = functools.partial(getattr(self._inner, name), *arguments, **options)
        return await_there(self._thread, ask, Context(), cancels=True)

    return verb


for _name in sorted(stores.Store.__abstractmethods__ - {"close"} | {"barrier"}):
    setattr(Store, _name, _verb(_name, inspect.getattr_static(stores.Store, _name)))
