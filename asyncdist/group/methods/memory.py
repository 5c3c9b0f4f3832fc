"""Arrays in memory that the ranks of this host share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.concurrency import trace as events
from asyncdist.group.methods.issuer import Issuer

__all__ = ["DTypeLike", "Memory", "Shape"]

Shape: TypeAlias = int | Sequence[int]
DTypeLike: TypeAlias = type[Any] | np.dtype[Any] | str


class Memory(Issuer):
    """Ordinary arrays whose memory the other ranks of this host can read, so that nothing of them need be copied there.

    They stay valid as long as anyone uses them, whatever becomes of the group, and their memory goes with the last view
    of them. A forked child has the parent's memory, not a copy of it: what either writes, both see.
    """

    def empty(self, shape: Shape, dtype: DTypeLike = np.float32) -> Array:
        """A C-contiguous array of `shape` and `dtype`, not initialized, as `numpy.empty` makes it.

        Where memory is not shared (another transport or system, ASYNCDIST_EMPTY_BYTES reached) it is just that. Local:
        the other ranks need not call it. Raises TypeError and ValueError as numpy does.
        """
        self._core.check_usable("empty")
        made = np.empty(0, dtype).dtype
        extents = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        shared = None
        if not made.hasobject and all(extent > 0 for extent in extents):
            shared = self._core.shared_array(extents, made)
        if shared is None:
            events.info("an array of shape %s and dtype %s is not in shared memory", extents, made)
            return np.empty(extents, made)
        return shared

    def zeros(self, shape: Shape, dtype: DTypeLike = np.float32) -> Array:
        """As `empty`, filled with zeros."""
        array = self.empty(shape, dtype)
        array[...] = 0
        return array
