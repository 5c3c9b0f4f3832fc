"""Hooks: functions of the program that see each operation of a group begin and end. Without one nothing is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from asyncdist.work import Work

Hook: TypeAlias = Callable[[Work[Any]], object]

ISSUING_MESSAGES: Final = "send", "send_objects", "receive", "receive_array", "receive_objects"
"""The methods of `Pairs` that issue an operation."""


class Hooks:
    """Those of one group, in the order in which they came."""

    def __init__(self) -> None:
        self._hooks: list[tuple[Hook | None, Hook | None]] = []

    def add(self, before: Hook | None, after: Hook | None) -> Callable[[], None]:
        """Add a pair of hooks; return what removes it, which may be called again."""
        hook = before, after
        self._hooks = [*self._hooks, hook]

        def remove() -> None:
            self._hooks = [one for one in self._hooks if one is not hook]

        return remove

    def around(self, issue: Callable[..., Work[Any]]) -> Callable[..., Work[Any]]:
        """Return what issues as `issue` does, and calls the hooks."""

        def hooked(*arguments: Any, **options: Any) -> Work[Any]:
            work = issue(*arguments, **options)
            for before, after in self._hooks:
                if before is not None:
                    before(work)
                if after is not None:
                    Work.add_done_callback(work, after)  # not as its user asks: see `asyncdist.group.misuse`
            return work

        return hooked
