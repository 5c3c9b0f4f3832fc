"""From the functions of the asynchronous API to those of the blocking one: one word each says how a call ends."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final, ParamSpec, TypeVar

from asyncdist.api import AWAITED, WITHDRAWN, point_to_point
from asyncdist.blocking.group import ProcessGroup, Session, current_session, inner_of, session_of
from asyncdist.blocking.work import Work, refuse_loop
from asyncdist.gpu.streams import carried
from asyncdist.group.unretrieved import watch

__all__ = ["P2POp", "asked", "collective", "completed", "issued", "original"]

P = ParamSpec("P")
T = TypeVar("T")

_ISSUED: Final = "Issued at the call; returns what is to be waited for at once."
_COMPLETED: Final = "Waits and returns the result. Ctrl-C ends the waiting; the operation goes on."
_WITHDRAWN: Final = """\
Waits and returns the result. Ctrl-C ends the waiting; if message and receive had not matched, the operation is
withdrawn, and no other message is lost."""
_COLLECTIVE: Final = """\
Waits and returns None, or what it makes; with `async_op=True` returns a `Work` at once. Ctrl-C ends the waiting; the
operation goes on."""
"""How a call ends, in place of what is said of awaiting."""

_ORIGINAL: Final = "_asyncdist_original"


def original(function: Callable[..., Any]) -> Callable[..., Any]:
    """The asynchronous function that `function` was made from, or `function`."""
    made_from: Callable[..., Any] = getattr(function, _ORIGINAL, function)
    return made_from


def asked(function: Callable[P, T]) -> Callable[P, T]:
    """A question, or something local: answered as it is, be it inside an event loop."""

    @functools.wraps(function)
    def lifted(*args: P.args, **kwargs: P.kwargs) -> T:
        session = _session(args, kwargs)
        if session is None:
            return function(*args, **kwargs)
        args, kwargs = _arguments(args, kwargs)  # type: ignore[assignment] # what stands for them there
        answer: T = session.call(function, *args, **kwargs)
        return answer

    return _marked(lifted, function, "", "")


def issued(function: Callable[P, Any]) -> Callable[P, Any]:
    """Issues its operations and returns their Works at once."""

    @functools.wraps(function)
    def lifted(*args: P.args, **kwargs: P.kwargs) -> Any:
        return _run(Session.call, function, args, kwargs)

    return _marked(lifted, function, _ISSUED, _ISSUED)


def completed(function: Callable[P, Awaitable[T]]) -> Callable[P, T]:
    """Waits for the end of what it begins, and returns that one's result."""

    @functools.wraps(function)
    def lifted(*args: P.args, **kwargs: P.kwargs) -> T:
        result: T = _run(Session.complete, function, args, kwargs)
        return result

    return _marked(lifted, function, _COMPLETED, _WITHDRAWN)


def collective(
    function: Callable[..., Awaitable[Any]], *, returns_result: bool = False, has_place: bool = True
) -> Callable[..., Any]:
    """Waits and returns None, as torch does (or the result, where that is new); with `async_op=True` gives a Work.

    `async_op` may be given in its place as in torch, right after `group`, unless torch has something else there.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    place = len(positional)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if has_place else inspect.Parameter.KEYWORD_ONLY
    async_op = inspect.Parameter("async_op", kind, default=False, annotation="bool")

    @functools.wraps(function)
    def lifted(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if has_place and len(args) == place + 1:
            *args, async_op = args  # type: ignore[assignment]
        if async_op:
            work: Work[Any] = _run(Session.call, function, tuple(args), kwargs)
            return work
        result = _run(Session.complete, function, tuple(args), kwargs)
        return result if returns_result else None

    every = [*parameters[:place], async_op, *parameters[place:]]
    lifted.__signature__ = signature.replace(parameters=every, return_annotation="Any")  # type: ignore[attr-defined]
    return _marked(lifted, function, _COLLECTIVE, _COLLECTIVE)


def _marked(lifted: Callable[P, T], function: Callable[..., Any], awaited: str, withdrawn: str) -> Callable[P, T]:
    lifted.__module__ = "asyncdist.blocking"
    if lifted.__doc__:
        lifted.__doc__ = inspect.cleandoc(lifted.__doc__).replace(AWAITED, awaited).replace(WITHDRAWN, withdrawn)
    setattr(lifted, _ORIGINAL, function)
    return lifted


def _run(how: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    refuse_loop(function.__name__)
    session = _session(args, kwargs)
    if session is None:
        function(*args, **kwargs)  # raises, as there is no group
        raise AssertionError(f"{function.__name__} found a group where there is none")
    args, kwargs = _arguments(args, kwargs)
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
        begin(original(op), tensor, peer, group, tag, group_peer)  # type: ignore[arg-type] # replaced on the way
