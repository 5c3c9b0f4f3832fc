"""Collectives that some rank rejected at the call because of its arguments, so that no rank waits for them.

A rejected collective takes its place in the order on all ranks. On the other ranks it raises CollectiveMismatchError,
which names the rank, whether it is under way or still to be issued; the group stays usable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from asyncdist.collectives.backend import CollectiveWork, WorkKey
from asyncdist.errors import CollectiveMismatchError
from asyncdist.world.control import Refused
from asyncdist.world.world import World

REFUSALS_KEPT: Final = 64
"""Rejections kept until the operation is issued here: how far ahead a rank can be whose calls all fail."""


class RejectedCalls:
    """The rejected collectives of one group.

    `works` are the operations under way, `sequences` how many of each tag were issued. `drop(tag, sequence)` makes the
    backends forget an operation. `fail(key, error)` ends one under way, `abort(error, kind, text, rank)` the group.
    """

    __slots__ = ("_abort", "_drop", "_fail", "_group_id", "_ranks", "_sequences", "_works", "_world", "early")

    def __init__(
        self,
        world: World,
        group_id: int,
        ranks: tuple[int, ...],
        drop: Callable[[int, int], None],
        works: Mapping[WorkKey, CollectiveWork],
        sequences: Mapping[int, int],
        fail: Callable[[WorkKey, CollectiveMismatchError], None],
        abort: Callable[[CollectiveMismatchError, str, str, int], None],
    ) -> None:
        self._world = world
        self._group_id = group_id
        self._ranks = ranks
        self._drop = drop
        self._works = works
        self._sequences = sequences
        self._fail = fail
        self._abort = abort
        self.early: dict[WorkKey, CollectiveMismatchError] = {}
        """Rejections heard of before the operation was issued here, which takes its own out."""

    def tell(self, tag: int, sequence: int, error: BaseException) -> None:
        """Tell all other ranks that this one rejects an operation."""
        self._drop(tag, sequence)
        message = Refused(self._group_id, tag, sequence, self._world.rank, str(error))
        self._world.tell(self._ranks, message, dial=True)

    def heard(self, tag: int, sequence: int, rank: int, text: str) -> None:
        """Rank `rank` has rejected an operation."""
        error = CollectiveMismatchError(f"rank {rank} refused the operation: {text}", rank)
        key = (tag, sequence)
        if key not in self._works:
            if self._sequences.get(tag, 0) > sequence or key in self.early:
                return
            if len(self.early) >= REFUSALS_KEPT:
                self._abort(error, "mismatch", f"{error} (one of {REFUSALS_KEPT} refusals in a row)", rank)
                return
            self.early[key] = error
        self._drop(tag, sequence)
        # Passed on, so that a rank that hears of a member's leaving has heard of this before.
        self._world.tell(self._ranks, Refused(self._group_id, tag, sequence, rank, text), dial=False)
        if key in self._works:
            self._fail(key, error)
