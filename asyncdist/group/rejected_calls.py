"""Refusals: collectives whose arguments some rank refused at the call, so that nobody waits for them.

A refused collective takes its place in the order, there and here; here it raises CollectiveMismatchError naming the
rank, whether it is under way or still to be issued, and the group stays usable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from asyncdist.collectives.backend import CollectiveWork, GroupBackend, WorkKey
from asyncdist.errors import CollectiveMismatchError
from asyncdist.world.world import World

__all__ = ["REFUSALS_KEPT", "Refusals"]

REFUSALS_KEPT: Final = 64
"""Refusals heard of before the operation is issued here: how far ahead another rank can be that fails at each call."""


class Refusals:
    """The refusals of one group.

    `works` are the operations under way, `sequences` how many of each tag were issued. `fail(key, error)` ends one that
    is under way; `abort(error, kind, text, rank)` ends the group.
    """

    __slots__ = ("_abort", "_backend", "_fail", "_group_id", "_ranks", "_sequences", "_works", "_world", "early")

    def __init__(
        self,
        world: World,
        group_id: int,
        ranks: tuple[int, ...],
        backend: GroupBackend,
        works: Mapping[WorkKey, CollectiveWork],
        sequences: Mapping[int, int],
        fail: Callable[[WorkKey, CollectiveMismatchError], None],
        abort: Callable[[CollectiveMismatchError, str, str, int], None],
    ) -> None:
        self._world = world
        self._group_id = group_id
        self._ranks = ranks
        self._backend = backend
        self._works = works
        self._sequences = sequences
        self._fail = fail
        self._abort = abort
        self.early: dict[WorkKey, CollectiveMismatchError] = {}
        """Heard of before the operation was issued here: who issues it takes it out."""

    def tell(self, tag: int, sequence: int, error: BaseException) -> None:
        """This rank refuses: tell all others."""
        self._backend.drop(tag, sequence)
        message = ["refused", self._group_id, tag, sequence, self._world.rank, str(error)]
        self._world.tell(self._ranks, message, dial=True)

    def heard(self, tag: int, sequence: int, rank: int, text: str) -> None:
        """Rank `rank` refused."""
        error = CollectiveMismatchError(f"rank {rank} refused the operation: {text}", rank)
        key = (tag, sequence)
        if key not in self._works:
            if self._sequences.get(tag, 0) > sequence or key in self.early:
                return
            if len(self.early) >= REFUSALS_KEPT:
                self._abort(error, "mismatch", f"{error} (one of {REFUSALS_KEPT} refusals in a row)", rank)
                return
            self.early[key] = error
        self._backend.drop(tag, sequence)
        # Passed on, so that who hears of our leaving, or of others', has heard of this before.
        self._world.tell(self._ranks, ["refused", self._group_id, tag, sequence, rank, text], dial=False)
        if key in self._works:
            self._fail(key, error)
