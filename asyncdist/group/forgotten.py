"""Forgotten Works: a warning, as for coroutines, where nobody ever asks what became of an operation.

Without `await` a program goes on with numbers that are not there yet, and nothing says so. To watch costs a look at the
stack for every operation, so it is done where somebody looks for mistakes: with `python -X dev`, in asyncio's debug
mode, or with ASYNCDIST_CHECK=full.
"""

from __future__ import annotations

import functools
import sys
import warnings
from asyncio import AbstractEventLoop
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from asyncdist.concurrency.call_site import calling_frame

__all__ = ["watch", "watches"]

W = TypeVar("W")

_ASKING: Final = frozenset(
    {"add_done_callback", "cancel", "done", "enqueued", "exception", "is_completed", "is_success", "result", "wait"}
    | {"wait_stream"}
)
"""What somebody calls who asks what has become of a Work."""


def watches(loop: AbstractEventLoop, options: Mapping[str, Any]) -> bool:
    """Whether to watch what is issued on `loop`, in a world with these options."""
    return sys.flags.dev_mode or loop.get_debug() or options.get("check") == "full"


def watch(work: W) -> W:
    """Warn with the calling line if `work`, which was just issued, goes before anybody has asked about it.

    Returns `work`. Nothing is watched that no line of a program has called, as in the communication thread.
    """
    frame = calling_frame()
    if frame is not None:
        watched: Any = work
        watched._issued_at = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
        kind: Any = type(work)
        watched.__class__ = _watched(kind)
    return work


class _Watched:
    """What a Work does besides while it is watched."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        return getattr(_asked(self), name) if name in _ASKING else super().__getattribute__(name)

    def __await__(self) -> Generator[Any, None, Any]:
        awaited: Generator[Any, None, Any] = _asked(self).__await__()
        return awaited

    def __del__(self) -> None:
        if self._retrieved or sys.is_finalizing():
            return
        filename, line, module = self._issued_at
        text = f"{self.where}, issued at {Path(filename).name}:{line}, was never awaited"
        warnings.warn_explicit(text, RuntimeWarning, filename, line, module)


def _asked(work: Any) -> Any:
    """Somebody asks about `work`: watch it no more."""
    work.__class__ = type(work).__mro__[2]
    return work


@functools.cache
def _watched(kind: type) -> type:
    return type(kind.__name__, (_Watched, kind), {"__slots__": (), "__module__": kind.__module__})
