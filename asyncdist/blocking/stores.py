"""Stores for ordinary threads: every verb waits for its answer."""

from __future__ import annotations

import functools
import inspect
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable
from contextvars import Context
from types import TracebackType
from typing import Any, Self

from asyncdist import store as stores
from asyncdist.blocking.work import refuse_loop
from asyncdist.errors import ClosedError
from asyncdist.threads.bridge import call_forgotten, complete
from asyncdist.threads.thread import CommunicationThread, acquire, release


def _verb(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The same verb, which waits for its answer."""
    name = verb.__name__

    @functools.wraps(verb)
    def waiting(self: Store, *arguments: Any, **options: Any) -> Any:
        if _get_running_loop() is not None:
            refuse_loop(f"{type(self).__name__}.{name}")
        if self._thread is None:
            raise ClosedError(f"{self!r} is closed")
        ask = functools.partial(getattr(self._inner, name), *arguments, **options)
        return complete(self._thread, ask, Context())

    return waiting


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
        self._open(lambda: self._kind(*arguments, **options))

    def _open(self, make: Callable[[], Any]) -> None:
        self._thread: CommunicationThread | None = acquire()
        try:
            self._inner = self._thread.call(make)
            complete(self._thread, self._inner.__aenter__, Context())
        except BaseException as error:
            if isinstance(error, Exception) or not hasattr(self, "_inner"):
                release(self._thread)
            else:
                call_forgotten(self._thread, self._inner.close)  # Ctrl-C: it may be open already
            raise
        self._forgotten = weakref.finalize(self, call_forgotten, self._thread, self._inner.close)
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

    set = _verb(stores.Store.set)
    get = _verb(stores.Store.get)
    add = _verb(stores.Store.add)
    wait = _verb(stores.Store.wait)
    check = _verb(stores.Store.check)
    compare_set = _verb(stores.Store.compare_set)
    delete_key = _verb(stores.Store.delete_key)
    append = _verb(stores.Store.append)
    multi_get = _verb(stores.Store.multi_get)
    multi_set = _verb(stores.Store.multi_set)
    num_keys = _verb(stores.Store.num_keys)
    list_keys = _verb(stores.Store.list_keys)
    queue_push = _verb(stores.Store.queue_push)
    queue_pop = _verb(stores.Store.queue_pop)
    queue_len = _verb(stores.Store.queue_len)
    barrier = _verb(stores.Store.barrier)

    def clone(self) -> Self:
        """Return another client of the same data, open, with this one's time-out."""
        refuse_loop(f"{type(self).__name__}.clone")
        other = type(self).__new__(type(self))
        other._uses = self._uses
        other._open(self._inner.clone)
        return other

    def close(self) -> None:
        """Give up what the store holds. May be called twice."""
        refuse_loop(f"{type(self).__name__}.close")
        thread, self._thread = self._thread, None
        if thread is not None:
            self._forgotten.detach()
            try:
                complete(thread, self._inner.close, Context(), cancels=False)
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


def inner_store(value: Any) -> Any:
    """The store of the communication thread that `value` stands for, or `value`."""
    return value._inner if isinstance(value, Store) else value
