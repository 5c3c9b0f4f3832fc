"""OverlapWatch: warns when collectives of one (group, tag) overlap from two tasks.

The order of issue must be the same on all ranks. One task's order is its program; the order between two tasks is the
scheduler's, so such collectives meet the wrong partners sooner or later, and silently. Tags or groups cure it.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
import weakref
from types import CodeType
from typing import Any, NamedTuple, Protocol

__all__ = ["OverlapWatch"]

_PACKAGE = __name__.partition(".")[0] + "."


class _Owner(Protocol):
    _works: dict[tuple[int, int], Any]
    name: str


class _Issue(NamedTuple):
    task: weakref.ref[asyncio.Task[Any]] | None
    code: CodeType
    instruction: int

    def place(self) -> str:
        """File and line of the call; worked out when wanted, as it is not cheap."""
        for start, end, line in self.code.co_lines():
            if start <= self.instruction < end:
                return f"{self.code.co_filename}:{line}"
        return self.code.co_filename


class OverlapWatch:
    """Remembers, per tag, which task issued last and where."""

    def __init__(self, owner: _Owner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._last: dict[int, _Issue] = {}
        self._warned = False

    def issued(self, tag: int) -> None:
        """The current task issues a collective of `tag`."""
        if self._warned:
            return
        task = asyncio.current_task(self._loop)
        frame = sys._getframe(3)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
            frame = frame.f_back
        self._last[tag] = _Issue(None if task is None else weakref.ref(task), frame.f_code, frame.f_lasti)

    def check(self, tag: int, operation: str) -> None:
        """Warn once if another task's collective of `tag` is under way; call before `issued`."""
        last = self._last.get(tag)
        if self._warned or last is None or last.task is None or last.task() is asyncio.current_task(self._loop):
            return
        if not any(work_tag == tag for work_tag, _ in self._owner._works):
            return
        self._warned = True
        warnings.warn(
            f"group {self._owner.name}: {operation} overlaps a collective of the same tag {tag} that another task "
            f"issued at {last.place()}. Ranks may order the two differently and exchange the wrong data; give each "
            "task a tag= or a group of its own.",
            RuntimeWarning,
            stacklevel=5,
        )
