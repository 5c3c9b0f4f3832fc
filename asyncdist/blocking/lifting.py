"""From the functions of the asynchronous API to those of the blocking one: one word each says how a call ends."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np

from asyncdist.api import point_to_point
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.blocking.group import ProcessGroup, Session, current_session, inner_of, session_of
from asyncdist.blocking.work import Work, refuse_loop
from asyncdist.gpu.streams import carried
from asyncdist.group.misuse import watch
from asyncdist.group.team import Reduced

P = ParamSpec("P")
T = TypeVar("T")

PLAIN: Final = frozenset([np.ndarray, ReduceOp, int, type(None)])
"""Types of arguments that name no group, and are there what they are here."""

_ISSUED: Final = "Issued at the call; returns what is to be waited for at once."
_COMPLETED: Final = """\
Waits and returns the result. Ctrl-C ends the waiting: a message that had not matched is withdrawn, and another
operation goes on."""
_COLLECTIVE: Final = """\
Waits and returns None, or what it makes; with `async_op=True` returns a `Work` at once. Ctrl-C ends the waiting; the
operation goes on."""


def asked(function: Callable[P, T]) -> Callable[P, T]:
    """A question, or something local: answered as it is, be it inside an event loop."""

    @functools.wraps(function)
    def lifted(*args: P.args, **kwargs: P.kwargs) -> T:
        session = _session(args, kwargs)
        if session is None:
            return function(*args, **kwargs)
        args, kwargs = _arguments(args, kwargs)  # type: ignore[assignment] # what stands for them there
        answer: T = session.ask(function, *args, **kwargs)
        return answer

    lifted.__module__ = "asyncdist.blocking"
    return lifted


def issued(function: Callable[P, Any]) -> Callable[P, Any]:
    """Issues its operations and returns their Works at once."""

    @_stands_for(function, _ISSUED)
    def lifted(*args: P.args, **kwargs: P.kwargs) -> Any:
        return _run(Session.call, function, args, kwargs)

    return lifted


def completed(function: Callable[P, Awaitable[T]]) -> Callable[P, T]:
    """Waits for the end of what it begins, and returns that one's result."""

    @_stands_for(function, _COMPLETED)
    def lifted(*args: P.args, **kwargs: P.kwargs) -> T:
        result: T = _run(Session.complete, function, args, kwargs)
        return result

    return lifted


def collective(
    function: Callable[..., Awaitable[Any]], *, returns_result: bool = False, has_place: bool = True
) -> Callable[..., Any]:
    """Waits and returns None, as torch does (or the result, where that is new); with `async_op=True` gives a Work.

    `async_op` may be given in its place as in torch, right after `group`, unless torch has something else there.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    place = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if has_place else inspect.Parameter.KEYWORD_ONLY
    async_op = inspect.Parameter("async_op", kind, default=False, annotation="bool")

    @_stands_for(function, _COLLECTIVE)
    def lifted(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if has_place and len(args) == place + 1:
            *args, async_op = args  # type: ignore[assignment]
        if async_op:
            return _run(Session.call, function, tuple(args), kwargs)
        result = _run(Session.complete, function, tuple(args), kwargs)
        return result if returns_result or isinstance(result, Reduced) else None

    every = [*parameters[:place], async_op, *parameters[place:]]
    lifted.__signature__ = signature.replace(parameters=every, return_annotation="Any")  # type: ignore[attr-defined]
    return lifted


def _stands_for(function: Callable[..., Any], ends: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Give what is decorated the name and the signature of `function`, and a docstring of its own."""

    def decorated(lifted: Callable[P, T]) -> Callable[P, T]:
        functools.update_wrapper(lifted, function)
        summary = (function.__doc__ or "").partition("\n")[0]
        lifted.__doc__ = f"{summary}\n\n{ends}\n\nArguments and errors are those of `asyncdist.{function.__name__}`."
        lifted.__module__ = "asyncdist.blocking"
        return lifted

    return decorated


def _run(how: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    refuse_loop(function.__name__)
    if not kwargs and PLAIN.issuperset(map(type, args)):  # as a rule; small operations count nanoseconds
        session = current_session()
    else:
        session = _session(args, kwargs)
        args, kwargs = _arguments(args, kwargs)
    if session is None:
        function(*args, **kwargs)  # raises, as there is no group
        raise AssertionError(f"{function.__name__} found a group where there is none")
    result = how(session, function, *args, **kwargs)
    return watch(result) if session.core.watches and isinstance(result, Work) else result


def _session(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Session | None:
    """The session of a group among the arguments, or of a batch of messages, or the current one."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, ProcessGroup):
            return value._session
        if isinstance(value, list | tuple) and value and isinstance(value[0], point_to_point.P2POp):
            return session_of(value[0].group)
    return current_session()


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_there, args)), {name: _there(value) for name, value in kwargs.items()}


def _there(value: Any) -> Any:
    """What stands for an argument in the communication thread."""
    return inner_of(carried(value))


class P2POp(point_to_point.P2POp):
    """One send or receive of a batch: `op` is `asyncdist.blocking.isend` or `irecv`; see `asyncdist.P2POp`."""

    __slots__ = ()

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Any,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        begin = asked(super().__init__)
        begin(inspect.unwrap(op), tensor, peer, group, tag, group_peer)  # type: ignore[arg-type] # replaced on the way
