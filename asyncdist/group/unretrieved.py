"""Failures: works of a group that failed, kept until somebody asks, so that closing can raise what nobody saw."""

from __future__ import annotations

import functools
import sys
import warnings
from asyncio import AbstractEventLoop
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from asyncdist.concurrency.call_site import calling_frame
from asyncdist.transport.protocol.kept_error import anew
from asyncdist.work import Work

__all__ = ["FAILED_KEPT", "Failures", "watch", "watches"]

FAILED_KEPT: Final = 64
"""Failed works kept until somebody asks: each holds the arrays it was given."""


class Failures:
    """See the module. `abort_seen`: somebody was told that the group is aborted, which explains all later failures."""

    __slots__ = ("_seen", "_works", "abort_seen")

    def __init__(self) -> None:
        self._works: list[Work[Any]] = []
        self._seen = 0  # of those forgotten somebody has asked about, or will be told of
        self.abort_seen = False

    def keep(self, work: Work[Any]) -> None:
        """A work has failed. One that somebody waits for need not be kept: who does is told, perhaps after the end."""
        if work._retrieved or work._waiters:
            self._seen += 1
        else:
            self._add(work)

    def untold(self, work: Work[Any]) -> None:
        """All who waited for a work that has failed were cancelled in that very turn."""
        if work not in self._works:
            self._seen -= 1
            self._add(work)

    def _add(self, work: Work[Any]) -> None:
        unasked = [failed for failed in self._works if not failed._retrieved]
        self._seen += len(self._works) - len(unasked)
        self._works = [*unasked[-FAILED_KEPT + 1 :], work]

    def take_unasked(self, otherwise: BaseException | None = None, *, aborted: bool) -> BaseException | None:
        """The first failure nobody asked about, if any, or `otherwise`; forget all.

        In an aborted group one that was seen is enough.
        """
        works, self._works = self._works, []
        if aborted and (self.abort_seen or self._seen or any(work._retrieved for work in works)):
            for work in works:
                work._retrieved = True  # as good as told
            return None
        for work in works:
            error = None if work._retrieved else work._error
            if error is not None:
                return anew(error)  # the work, which may be kept, is not to hold the frames it comes through
        return otherwise


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
