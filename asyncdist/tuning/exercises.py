"""Exercises: collectives as measurements run them, with inputs and results that are known exactly.

`nbytes` is what `asyncdist explain --bytes` takes: the whole vector, all blocks together, of all_to_all those of one
rank. Elements are float32 and small whole numbers, so that sums of them are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from asyncdist.group.process_group import ProcessGroup
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES
from asyncdist.work import Work

__all__ = ["EXERCISES", "ITEMSIZE", "Exercise"]

ITEMSIZE: Final = 4

PERIOD: Final = 61
"""Numbers of a pattern: a prime, so that a block in the place of another is noticed whatever their length."""

Array = np.ndarray[tuple[int], np.dtype[np.float32]]


class Exercise:
    """One collective on one size: `prepare`, then await what `issue` returns, then `wrong` says if it went wrong."""

    def __init__(self, group: ProcessGroup, collective: str, nbytes: int) -> None:
        self._group = group
        self._collective = collective
        world, rank = group.size, group.rank
        elements = -(-nbytes // ITEMSIZE)
        if collective in BLOCK_COLLECTIVES or collective in EXCHANGES:
            elements = -(-elements // world) * world
        block = slice(rank * (elements // world), (rank + 1) * (elements // world))
        whole = _pattern(elements)
        mine = whole + np.float32(rank)
        ranks_sum = np.float32(world * (world - 1) // 2)
        if collective == "all_gather":
            self._source = mine[block].copy()
            owners = np.repeat(np.arange(world, dtype=np.float32), elements // world)
            self._expected = whole + owners
        elif collective == "all_to_all":
            self._source = mine
            self._expected = np.concatenate([whole[block] + np.float32(peer) for peer in range(world)])
        elif collective == "broadcast":
            self._source = mine
            self._expected = whole
        else:
            self._source = mine
            reduced = whole * np.float32(world) + ranks_sum
            self._expected = reduced[block] if collective == "reduce_scatter" else reduced
        self._target = np.zeros_like(self._expected)

    def prepare(self) -> None:
        """Have the arrays as they are before the collective."""
        if self._collective in ("all_reduce", "broadcast"):
            self._target[...] = self._source
        else:
            self._target[...] = 0

    def issue(self) -> Work[Any]:
        """Begin the collective."""
        return EXERCISES[self._collective](self._group, self._target, self._source)

    def wrong(self) -> bool:
        """Whether the result is another than it should be."""
        return not np.array_equal(self._target, self._expected)


EXERCISES: Final[Mapping[str, Callable[[ProcessGroup, Array, Array], Work[Any]]]] = MappingProxyType(
    {
        "all_reduce": lambda group, target, _: group.all_reduce(target),
        "all_gather": lambda group, target, source: group.all_gather_into_tensor(target, source),
        "reduce_scatter": lambda group, target, source: group.reduce_scatter_tensor(target, source),
        "broadcast": lambda group, target, _: group.broadcast(target, 0),
        "all_to_all": lambda group, target, source: group.all_to_all_single(target, source),
    }
)
"""The collectives that can be exercised, with how each is issued."""


def _pattern(elements: int) -> Array:
    return (np.arange(elements) % PERIOD).astype(np.float32)
