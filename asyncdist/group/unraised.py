"""Failures: works of a group that failed, kept until somebody asks, so that closing can raise what nobody saw."""

from __future__ import annotations

from typing import Any, Final

from asyncdist.transport.protocol.kept_error import anew
from asyncdist.work import Work

__all__ = ["FAILED_KEPT", "Failures"]

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
