"""What `help(asyncdist.all_reduce)` says: a function's own words, its group's method's, and what all of a kind share.

What operations on one subject share is said at the class of theirs, below its first line; the rest once, here. It is
put together when the package is imported, which costs a few string operations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

from asyncdist.concurrency.deadline import INHERIT
from asyncdist.group.process_group import ProcessGroup

__all__ = ["AWAITED", "WITHDRAWN", "complete_help"]

AWAITED: Final = """\
Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; cancelling a
waiter ends only its waiting."""

WITHDRAWN: Final = """\
Issued at the call, in call order; returns a `Work` at once. `await work` gives the result or raises; when the last
waiter is cancelled before message and receive have matched, it is withdrawn, and no other message is lost."""

_COLLECTIVE: Final = """\
All ranks of the group call it, in the same order for each `tag`: tasks that call at the same time take different tags.
`timeout` (seconds, a timedelta, None for no limit; by default the group's) bounds the operation.

Raises TypeError and ValueError at the call for wrong arguments, before a byte moves: the other ranks raise
CollectiveMismatchError then, and the group goes on. So do all where ranks differ in operation, size, dtype, reduction
or root. CollectiveTimeoutError (`.missing`: ranks that did not come) and PeerLostError (`.rank`) end the group on all
ranks: later calls raise GroupAbortedError."""

_RECEIVED: Final = """\
Matched by source and `tag` (an int of at least 0), in order. `timeout` (seconds or a timedelta; None, the default, is
no limit) bounds the operation: CollectiveTimeoutError, and nothing is lost if no message has matched."""

_SENT: Final = """\
Matched by source and `tag` (an int of at least 0), in order. `timeout` (seconds or a timedelta; None, the default, is
no limit) bounds the operation: CollectiveTimeoutError, and the message is withdrawn if no receive has matched it."""

_MESSAGE: Final = """\
Raises TypeError and ValueError at the call for wrong arguments, PeerLostError (`.rank`) where the other rank is lost;
messages between other ranks go on."""

_ARRAYS: Final = """\
Arrays are numpy's, torch's tensors on the CPU, and whatever exposes its memory (buffer protocol, DLPack), also a GPU's
(`__cuda_array_interface__`), of any dtype of bools, integers, floats or complex numbers in native byte order; those of
host memory may be strided. Until the Work is done they belong to the operation."""

_REDUCED: Final = "Which dtypes an `op` takes is said at `ReduceOp`."
_RANKS: Final = "`{0}` is a global rank, also in a smaller group; `group_{0}` is one of the group, as its methods take."

_ARRAY_NAMES: Final = ("tensor", "array", "input", "output")
_NO_ARRAYS: Final = "object"
"""In the names of functions whose inputs and outputs are lists of anything."""


def complete_help(functions: Iterable[Callable[..., Any]]) -> None:
    """Complete the docstrings of module functions that act on a group; those that say all themselves stay."""
    for function in dict.fromkeys(functions):  # some have two names
        own = function.__doc__
        if not own or "see `ProcessGroup." not in own.replace("See", "see"):  # no docstrings under -OO
            continue
        method = getattr(ProcessGroup, function.__name__, None)
        parts = [inspect.cleandoc(own), *_of_method(method), *_shared(function)]
        function.__doc__ = "\n\n".join(parts)


def _of_method(method: Callable[..., Any] | None) -> list[str]:
    text = inspect.getdoc(method) if method is not None else None
    if not text:
        return []
    subject = getattr(method, "__qualname__", "").partition(".")[0]
    said = next((inspect.getdoc(base) or "" for base in ProcessGroup.__mro__ if base.__name__ == subject), "")
    shared = said.partition("\n\n")[2]
    return [f"ProcessGroup.{getattr(method, '__name__', '')}: {text}", *filter(None, [shared])]


def _shared(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters
    if "timeout" not in parameters:
        return []
    parts = []
    roots = [name for name in ("src", "dst") if name in parameters]
    if roots:
        parts.append(_RANKS.format(roots[0]))
    takes_arrays = any(kind in name for name in parameters for kind in _ARRAY_NAMES)
    if takes_arrays and _NO_ARRAYS not in function.__name__:
        parts.append(_ARRAYS + (f"\n{_REDUCED}" if "op" in parameters else ""))
    if parameters["timeout"].default is INHERIT:
        parts.append(_COLLECTIVE)
    else:
        parts += [_SENT if "send" in function.__name__ else _RECEIVED, _MESSAGE]
    if "stream" not in function.__name__:  # what those return is iterated over, as their own words say
        parts.append(WITHDRAWN if function.__name__.startswith(("recv", "send")) else AWAITED)
    return parts
