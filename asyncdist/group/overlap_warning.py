"""Warns when collectives of one (group, tag) overlap from two tasks.

All ranks must issue in the same order. Within one task the program sets the order; between two tasks the scheduler sets
it, so sooner or later such collectives silently meet the wrong partners. Tags or groups of their own prevent that.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
import weakref
from typing import Any, Final, Protocol

from asyncdist.concurrency.trace import calling_frame

__all__ = ["TAGS_KEPT", "OverlapWatch"]

TAGS_KEPT: Final = 1024
"""Tags whose last task is remembered: a program has a few tags, or uses each once, which never overlaps."""


class _Owner(Protocol):
    _works: dict[tuple[int, int], Any]
    name: str


class OverlapWatch:
    """Remembers, per tag, which task issued last."""

    def __init__(self, owner: _Owner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self.last_task: dict[int, weakref.ref[asyncio.Task[Any]]] = {}
        """By tag. The task that is here need not call `issue` again."""
        self._warned = False

    def issue(self, tag: int, operation: str) -> None:
        """The current task issues a collective of `tag`; warn once if another task's is under way."""
        if self._warned:
            return
        task = asyncio.current_task(self._loop)
        last = self.last_task.get(tag)
        if last is not None:
            earlier = last()
            if earlier is task:
                return
            if earlier is not None and any(work_tag == tag for work_tag, _ in self._owner._works):
                self._warn(tag, operation, earlier)
        if task is not None:
            if last is None and len(self.last_task) >= TAGS_KEPT:
                self.last_task.clear()
            self.last_task[tag] = weakref.ref(task)

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
