"""Evidence: what shows that another rank ran something else in a place of the order, though each has ended its own.

Two ranks that each take themselves for the root send, and wait for nothing. The messages of one of them are all that
the other ever sees of it: they have come, and its operation of that number has ended without them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Container, Mapping
from functools import partial
from typing import Final

from asyncdist.collectives.backend import WorkKey
from asyncdist.collectives.shared.agreement import RESERVED
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.protocol.frame import key_prefix
from asyncdist.transport.protocol.matching import Unexpected

__all__ = ["EARLY_KEPT", "Evidence"]

EARLY_KEPT: Final = 1024
"""Operations remembered of which messages came early: more than peers have credit to be ahead. Those that were refused
meanwhile are forgotten so."""

DROPPED_KEPT: Final = 1024
"""Refused operations remembered, of which messages may still come: as many as peers have credit to be ahead."""

_PLACE: Final = struct.Struct("<II")
_PLACE_AT: Final = 8
_HALF: Final = 1 << 31  # numbers travel as 32 bits, and no two so far apart are under way


class Evidence:
    """Of one group. `works` are its operations under way, `sequences` how many of each tag were issued.

    `differs(tag, sequence, rank)` hears what is found. From then on nothing of the group may end well.
    """

    def __init__(
        self,
        mesh: BaseMesh,
        group_id: int,
        works: Collection[WorkKey],
        sequences: Mapping[int, int],
        differs: Callable[[int, int, int], None],
    ) -> None:
        self._mesh = mesh
        self._watched: list[bytes] = []
        self._works = works
        self._sequences = sequences
        self._differs = differs
        self._dropped: dict[WorkKey, None] = {}
        self.early: dict[WorkKey, list[tuple[int, bytes, Container[bytes]]]] = {}
        """Messages that came before their receives, by operation."""
        self._watch(group_id, self._came_early)

    def watch_parts(self, group_id: int, tag: int) -> None:
        """Messages with that id are parts of operations of `tag`, whose number is their tag."""
        self._watch(group_id, partial(self._part_came_early, tag))

    def left_over(self, key: WorkKey) -> bool:
        """Whether messages are left of an operation that has ended here; whoever sent them runs something else."""
        for rank, message, parked in self.early.pop(key, ()):
            if message in parked:
                self._differs(*key, rank)
                return True
        return False

    def forget(self, key: WorkKey) -> None:
        """That operation was refused or given up: messages of it may come all the same."""
        self.early.pop(key, None)
        if len(self._dropped) >= DROPPED_KEPT:
            del self._dropped[next(iter(self._dropped))]
        self._dropped[key] = None

    def stop(self) -> None:
        """Look for no more."""
        for group in self._watched:
            self._mesh.watchers.pop(group, None)
        self.early.clear()

    def _watch(self, group_id: int, watcher: Unexpected) -> None:
        group = key_prefix(group_id, 0, 0)[:_PLACE_AT]
        self._watched.append(group)
        self._mesh.watch(group, watcher)

    def _came_early(self, rank: int, message: bytes, parked: Container[bytes]) -> None:
        tag, low = _PLACE.unpack_from(message, _PLACE_AT)
        self._note(rank, tag, low, message, parked)

    def _part_came_early(self, tag: int, rank: int, message: bytes, parked: Container[bytes]) -> None:
        low, _ = _PLACE.unpack_from(message, _PLACE_AT)
        self._note(rank, tag, low, message, parked)

    def _note(self, rank: int, tag: int, low: int, message: bytes, parked: Container[bytes]) -> None:
        if low in RESERVED:
            return
        issued = self._sequences.get(tag, 0)
        number = low if issued < _HALF else issued + (low - issued + _HALF) % (2 * _HALF) - _HALF
        key: WorkKey = (tag, number)
        if number < issued and key not in self._works:
            if key not in self._dropped:
                self._differs(tag, number, rank)
            return
        messages = self.early.get(key)
        if messages is None:
            if len(self.early) >= EARLY_KEPT:
                del self.early[next(iter(self.early))]
            messages = self.early[key] = []
        messages.append((rank, message, parked))
