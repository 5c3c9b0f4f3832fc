"""The functions of this process that other ranks may call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])

RESERVED: Final = frozenset({"timeout", "group"})
"""Keywords that `call` and `create` take for themselves."""

_registered: dict[str, Callable[..., Any]] = {}


@overload
def register(function: F, /) -> F: ...


@overload
def register(name: str, /) -> Callable[[F], F]: ...


def register(function: F | str, /) -> F | Callable[[F], F]:
    """Let other ranks call `function` by its name, or by another: `@rpc.register` or `@rpc.register("name")`.

    It may be a function, a coroutine function, an asynchronous generator function, or a class. A function runs in the
    event loop of the callee, which does nothing else meanwhile: one that computes for long is `async` and awaits
    `asyncio.to_thread(...)`. Nothing else of the process can be called.

    Raises ValueError for a name that another function has, and for parameters named `timeout` or `group`.
    """
    if isinstance(function, str):
        name = function

        def named(other: F) -> F:
            return _add(name, other)

        return named
    return _add(function.__name__, function)


def look_up(name: str) -> Callable[..., Any]:
    """The function registered as `name`. Raises LookupError."""
    found = _registered.get(name)
    if found is None:
        names = ", ".join(sorted(_registered)) or "nothing"
        raise LookupError(f"nothing is registered as {name!r}; {names} is")
    return found


def _add(name: str, function: F) -> F:
    other = _registered.get(name)
    if other is not None and _place(other) != _place(function):  # else its module was loaded again
        raise ValueError(f"{name!r} is registered already: {_place(other)}")
    taken = RESERVED.intersection(inspect.signature(function).parameters)
    if taken:
        raise ValueError(f"{name!r} has a parameter {min(taken)!r}, which rpc.call takes for itself: name it otherwise")
    _registered[name] = function
    return function


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"
