"""ProcessGroup: what stands for a group outside the communication thread."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from asyncdist.blocking.refuse_loop import refuse_loop
from asyncdist.blocking.session import Session
from asyncdist.group import WORLD
from asyncdist.group.process_group import ProcessGroup as InnerGroup

__all__ = ["WORLD", "ProcessGroup", "inner_of"]


class ProcessGroup:
    """A group: pass it as `group=`, or call its methods, which are `asyncdist.ProcessGroup`'s with group ranks.

    Operations wait and return their result; with `async_op=True` they return a `Work`. `isend` and `irecv` always do.
    `with group:` closes it at the end, or aborts it on an exception.
    """

    def __init__(self, inner: InnerGroup, session: Session) -> None:
        self._inner = inner
        self._session = session

    def __repr__(self) -> str:
        return f"<blocking {repr(self._inner)[1:]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessGroup) and other._inner is self._inner

    def __hash__(self) -> int:
        return id(self._inner)

    def abort(self, reason: str = "") -> None:
        """Give up now: every operation under way raises `GroupAbortedError`, here and on all connected members."""
        self._session.thread.call(self._inner.abort, reason)

    def close(self) -> None:
        """Wait for everything under way, then leave; see `asyncdist.ProcessGroup.close`. May be called again."""
        refuse_loop("ProcessGroup.close")
        self._session.close(self._inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        refuse_loop("ProcessGroup.__exit__")
        self._session.close(self._inner, error)

    def __getattr__(self, name: str) -> Any:
        """Every attribute and operation of a group exists here too."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._inner, name)
        return _method(self, name, value) if inspect.ismethod(value) else value


def _method(group: ProcessGroup, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    session = group._session

    @functools.wraps(method)
    def call(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
        refuse_loop(f"ProcessGroup.{name}")
        if async_op or name in ("isend", "irecv"):
            return session.call(method, arguments, options)
        return session.complete(method, arguments, options)

    return call


def inner_of(value: Any) -> Any:
    """`value` as the communication thread knows it: a group's handle replaced by the group."""
    return value._inner if isinstance(value, ProcessGroup) else value
