"""JoinedWork: several operations of a group as one Work."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from asyncdist.errors import CollectiveMismatchError
from asyncdist.group.process_group import ProcessGroup
from asyncdist.work import Work


class JoinedWork(Work[Any]):
    """Done once all `parts` are; the result is `value`.

    When this Work ends, well or not, the arrays of all parts are free. A part fails with its group, as do the others
    then, or because some rank refused it; that rank does not issue the parts that come after, and is out of step with
    all others from then on, so the group is aborted.
    """

    __slots__ = ("_asked", "_group", "_left", "_parts", "_value")

    def __init__(self, group: ProcessGroup, operation: str, parts: Sequence[Work[Any]], value: Any) -> None:
        self._parts = tuple(parts)
        self._asked = False
        super().__init__(asyncio.get_running_loop(), operation, sum(part.nbytes for part in parts))
        self._group = group
        self._value = value
        self._left = len(self._parts)
        for part in self._parts:
            part.add_done_callback(self._part_ended)
        if not self._parts:
            self._finish(value)

    @property
    def where(self) -> str:
        """See Work; of its parts the number is known, of all together there is none."""
        return self._group.where(self.operation)

    # The group must know, when it closes, whether the program has asked about a failure; the group knows the parts.

    @property
    def _retrieved(self) -> bool:
        return self._asked

    @_retrieved.setter
    def _retrieved(self, asked: bool) -> None:
        self._asked = asked
        if asked:
            for part in self._parts:
                part._retrieved = True

    def _part_ended(self, part: Work[Any]) -> None:
        self._left -= 1
        if self._done:
            return
        if part._error is not None:
            if self._waiters:
                self._retrieved = True  # they will be told
            if len(self._parts) > 1 and isinstance(part._error, CollectiveMismatchError):
                self._group.abort(f"{self.operation} failed in part: {part._error}")
            self._fail(part._error)
        elif not self._left:
            self._finish(self._value)
