"""Bound buffers: where a plan's slices lie in memory for one operation.

Each buffer answers the same two questions about a run of elements: the elements themselves, and the bytes they
occupy. A list of arrays (torch's `all_gather(tensor_list, ...)`) is one buffer whose blocks lie apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Protocol

import numpy as np

from asyncdist.arrays.host import Array

__all__ = ["NO_BUFFER", "BlockBuffer", "Bound", "FlatBuffer", "PieceBuffer"]


class Bound(Protocol):
    """Memory of one plan buffer; `start` and `stop` count elements."""

    @property
    def whole(self) -> memoryview | None:
        """All its bytes, if they lie in a row."""

    @property
    def array(self) -> Array | None:
        """All its elements, if they lie in a row."""

    def elements(self, start: int, stop: int) -> Array:
        """The run of elements, as a view."""

    def octets(self, start: int, stop: int) -> memoryview:
        """The bytes of the run, as a view."""

    def run(self, start: int, stop: int) -> tuple[memoryview, int, int]:
        """All bytes of the array that the run is of, the same object at each call, and which of them are the run."""


class FlatBuffer:
    """One contiguous array."""

    __slots__ = ("_itemsize", "_size", "array", "whole")

    def __init__(self, array: Array, octets: memoryview | None = None) -> None:
        self.array: Array = array
        self._size = array.size
        self._itemsize = array.itemsize
        self.whole: memoryview = array.view(np.uint8).data if octets is None else octets

    def elements(self, start: int, stop: int) -> Array:
        """The run of elements, as a view."""
        return self.array if stop - start == self._size else self.array[start:stop]

    def octets(self, start: int, stop: int) -> memoryview:
        """The bytes of the run, as a view."""
        if stop - start == self._size:
            return self.whole
        itemsize = self._itemsize
        return self.whole[start * itemsize : stop * itemsize]

    def run(self, start: int, stop: int) -> tuple[memoryview, int, int]:
        """All bytes, and which of them are the run."""
        return self.whole, start * self._itemsize, stop * self._itemsize


NO_BUFFER = FlatBuffer(np.empty(0, np.uint8))
"""What an operation without data, or a rank without that buffer, binds: only its empty slices are asked for."""


class BlockBuffer:
    """Several contiguous arrays in a row; no run may cross from one to the next (`Plan.block_aligned`)."""

    __slots__ = ("_blocks", "_starts")
    array: Final = None
    whole: Final = None

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._blocks = [FlatBuffer(array) for array in arrays]
        self._starts = [0, *accumulate(array.size for array in arrays)]

    def _locate(self, start: int, stop: int) -> tuple[FlatBuffer, int]:
        index = min(bisect_right(self._starts, start), len(self._blocks)) - 1
        if stop > self._starts[index + 1]:
            raise AssertionError(f"elements {start}..{stop} cross the end of block {index}")
        return self._blocks[index], self._starts[index]

    def elements(self, start: int, stop: int) -> Array:
        """The run of elements, as a view."""
        block, origin = self._locate(start, stop)
        return block.elements(start - origin, stop - origin)

    def octets(self, start: int, stop: int) -> memoryview:
        """The bytes of the run, as a view."""
        block, origin = self._locate(start, stop)
        return block.octets(start - origin, stop - origin)

    def run(self, start: int, stop: int) -> tuple[memoryview, int, int]:
        """All bytes of the block, and which of them are the run."""
        block, origin = self._locate(start, stop)
        return block.run(start - origin, stop - origin)


class PieceBuffer:
    """Arrays of any lengths, each of which stands for one element of the plan.

    So a plan serves all lengths, which not every rank knows, and pieces travel whole.
    """

    __slots__ = ("_octets", "_pieces")
    array: Final = None
    whole: Final = None

    def __init__(self, pieces: Sequence[Array]) -> None:
        self._pieces = pieces
        self._octets: dict[int, memoryview] = {}

    def elements(self, start: int, stop: int) -> Array:
        """The piece, as a view."""
        if stop != start + 1:
            raise AssertionError(f"pieces travel one by one, not {start}..{stop}")
        return self._pieces[start]

    def octets(self, start: int, stop: int) -> memoryview:
        """The bytes of the piece, as a view."""
        found = self._octets.get(start)
        if found is None:
            found = self._octets[start] = self.elements(start, stop).view(np.uint8).data
        return found

    def run(self, start: int, stop: int) -> tuple[memoryview, int, int]:
        """All bytes of the piece."""
        octets = self.octets(start, stop)
        return octets, 0, len(octets)
