"""What a program does wrong without noticing: overlapping tasks, and Works whose outcome it never asks about.

All ranks must issue collectives of one (group, tag) in the same order. Within one task the program sets the order.
Between two tasks the scheduler sets it, so sooner or later such collectives silently meet the wrong partners; tags or
groups of their own prevent that. `OverlapWatch` warns.

Without `await` a program goes on with numbers that are not there yet, and nothing says so. Closing the group raises the
first error that the program did not ask about (`UnretrievedErrors`). Forgotten Works cause a warning where Works are
watched: with `python -X dev`, in asyncio's debug mode, or with ASYNCDIST_CHECK=full, as watching costs a look at the
stack.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import warnings
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from asyncdist.concurrency.trace import calling_frame
from asyncdist.group.hooks import ISSUING_MESSAGES
from asyncdist.transport.protocol.operations import anew
from asyncdist.work import Work

FAILED_KEPT: Final = 64
"""Failed Works kept until the program asks about them: each holds the arrays it was given."""


class UnretrievedErrors:
    """Failed Works of a group that the program has not asked about.

    `abort_seen`: a call has raised that the group is aborted, which explains all later failures.
    """

    __slots__ = ("_seen", "_works", "abort_seen", "at_close")

    def __init__(self) -> None:
        self._works: list[Work[Any]] = []
        self._seen = 0  # failures that the program has asked about, or will be told of
        self.abort_seen = False
        self.at_close: BaseException | None = None
        """What closing the group is to raise."""

    def take_at_close(self) -> BaseException | None:
        """Return what closing is to raise, once."""
        error, self.at_close = self.at_close, None
        return error

    def keep(self, work: Work[Any]) -> None:
        """Keep a Work that has failed, unless the program knows: a waiter is told, perhaps after the group's end."""
        if work._retrieved or work._waiters:
            self._seen += 1
        else:
            self._add(work)

    def untold(self, work: Work[Any]) -> None:
        """Keep a failed Work after all: its waiters were cancelled in the turn in which it failed."""
        if work not in self._works:
            self._seen -= 1
            self._add(work)

    def _add(self, work: Work[Any]) -> None:
        unasked = [failed for failed in self._works if not failed._retrieved]
        self._seen += len(self._works) - len(unasked)
        self._works = [*unasked[-FAILED_KEPT + 1 :], work]

    def take_unasked(self, otherwise: BaseException | None = None, *, aborted: bool) -> BaseException | None:
        """Return the first error that the program has not asked about, or `otherwise`; forget all Works.

        None in an aborted group of which the program has seen one failure.
        """
        works, self._works = self._works, []
        if aborted and (self.abort_seen or self._seen or any(work._retrieved for work in works)):
            for work in works:
                work._retrieved = True  # as good as told
            return None
        for work in works:
            error = None if work._retrieved else work._error
            if error is not None:
                return anew(error)  # a Work that is kept must not hold the frames that its error comes through
        return otherwise


W = TypeVar("W")

_ASKING: Final = frozenset(
    {"add_done_callback", "cancel", "done", "enqueued", "exception", "is_completed", "is_success", "result", "wait"}
    | {"wait_stream"}
)
"""Methods of a Work that ask about its outcome."""


def watches(loop: AbstractEventLoop, options: Mapping[str, Any]) -> bool:
    """Whether to watch what is issued on `loop`, in a world with these options."""
    return sys.flags.dev_mode or loop.get_debug() or options.get("check") == "full"


def watch(work: W) -> W:
    """Return `work`, which has just been issued; warn with the calling line if nobody asks about it before it goes.

    What no line of a program has called, as in the communication thread, is not watched.
    """
    frame = calling_frame()
    if frame is not None:
        watched: Any = work
        watched._issued_at = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
        kind: Any = type(work)
        watched.__class__ = _watched(kind)
    return work


def watch_issued(core: object, pairs: object) -> None:
    """Replace what issues operations of a group, so that it costs nothing where nothing is watched."""

    def watched(issue: Callable[..., Work[Any]]) -> Callable[..., Work[Any]]:
        return lambda *arguments, **options: watch(issue(*arguments, **options))

    for owner, name in (core, "issue"), *((pairs, name) for name in ISSUING_MESSAGES):
        setattr(owner, name, watched(getattr(owner, name)))


class _Watched:
    """Put in front of a Work's class while the Work is watched."""

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
    """Watch `work` no longer: the program asks about it."""
    work.__class__ = type(work).__mro__[2]
    return work


@functools.cache
def _watched(kind: type) -> type:
    return type(kind.__name__, (_Watched, kind), {"__slots__": (), "__module__": kind.__module__})


TAGS_KEPT: Final = 1024
"""Tags whose last task is remembered: a program has a few tags, or uses each once, which never overlaps."""


TaskRef: TypeAlias = Callable[[], asyncio.Task[Any] | None]
"""A weak reference to a task, or `_no_task`."""


def _no_task() -> None:
    """What stands for the task of calls outside any, as of callbacks and of ordinary threads."""


class _Owner(Protocol):
    _works: dict[tuple[int, int], Any]
    name: str


class OverlapWatch:
    """Remembers, per tag, which task issued last."""

    def __init__(self, owner: _Owner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self.last_task: dict[int, TaskRef] = {}
        """By tag. The task that is here need not call `issue` again."""
        self._warned = False

    def issue(self, tag: int, operation: str) -> TaskRef:
        """The current task issues a collective of `tag`; warn once if another task's is under way. Returns the task."""
        task = asyncio.current_task(self._loop)
        last = self.last_task.get(tag)
        if last is not None and not self._warned:
            earlier = last()
            if earlier is task:
                return last
            if earlier is not None and any(work_tag == tag for work_tag, _ in self._owner._works):
                self._warn(tag, operation, earlier)
        if last is None and len(self.last_task) >= TAGS_KEPT:
            self.last_task.clear()
        found = self.last_task[tag] = _no_task if task is None else weakref.ref(task)
        return found

    def _warn(self, tag: int, operation: str, earlier: asyncio.Task[Any]) -> None:
        self._warned = True
        stack = earlier.get_stack(limit=1)
        place = f" at {stack[-1].f_code.co_filename}:{stack[-1].f_lineno}" if stack else ""
        caller = calling_frame() or sys._getframe()
        warnings.warn_explicit(
            f"group {self._owner.name}: {operation} overlaps a collective of the same tag {tag} that another task, "
            f"{earlier.get_name()}{place}, has under way. Ranks may order the two differently and exchange the wrong "
            "data; give each task a tag= or a group of its own.",
            RuntimeWarning,
            caller.f_code.co_filename,
            caller.f_lineno,
            caller.f_globals.get("__name__"),
            caller.f_globals.setdefault("__warningregistry__", {}),
        )
