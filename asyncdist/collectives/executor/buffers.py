"""Where a plan's slices lie in memory for one operation, and memory for those that only the plan needs.

A bound buffer gives the elements of a run, and the bytes that they occupy. A list of arrays (torch's
`all_gather(tensor_list, ...)`) is one buffer whose blocks lie apart.

`ScratchPool` keeps temporary memory for the next operation: fresh memory costs a page fault per 4 KiB, about as much as
receiving into it, and a training step asks for the same few sizes over and over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Protocol

import numpy as np

from asyncdist.arrays.host import Array


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


ALIGNMENT: Final = 64
"""A cache line, and the widest vector register: reductions then start on whole vectors."""

SMALLEST_BYTES: Final = 256
"""Smallest size class: below it bookkeeping costs more memory than rounding up."""

KEEP_BYTES: Final = 64 << 20
"""Idle memory kept: four collectives with their windows of four 1 MiB chunks and as much again of partial sums. What is
in use is not limited here, only by the operations under way."""


class ScratchPool:
    """Lends buffers of bytes; belongs to one event loop's thread.

    Sizes are rounded up to 2^k or 3 * 2^k bytes, so at most half as much again is wasted and buffers are found again by
    size. Beyond `keep_bytes` of idle memory the class unused for longest is given back to the system.
    """

    __slots__ = ("_idle", "_idle_bytes", "_keep_bytes", "_lent")

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._idle_bytes = 0
        self._idle: OrderedDict[int, list[Array]] = OrderedDict()
        self._lent: set[int] = set()

    @property
    def idle_bytes(self) -> int:
        """Memory kept for reuse."""
        return self._idle_bytes

    @property
    def lent(self) -> int:
        """Buffers taken and not given back."""
        return len(self._lent)

    def take(self, nbytes: int) -> Array:
        """Return `nbytes` of undefined memory as a one-dimensional uint8 array aligned to ALIGNMENT."""
        if nbytes < 0:
            raise ValueError(f"a buffer has at least 0 bytes, got {nbytes}")
        size = _size_class(nbytes)
        idle = self._idle.get(size)
        if idle:
            whole = idle.pop()
            self._idle_bytes -= size
            if not idle:
                del self._idle[size]
        else:
            whole = _allocate(size)
        self._lent.add(id(whole))
        return whole[:nbytes]

    def give(self, buffer: Array) -> None:
        """Take back what `take` returned; nothing may use it any more. Raises ValueError for anything else."""
        whole = buffer.base
        if whole is None or id(whole) not in self._lent:
            raise ValueError("the buffer was not taken from this pool, or was given back already")
        self._lent.remove(id(whole))
        size = whole.nbytes
        if size > self._keep_bytes:
            return
        self._idle.setdefault(size, []).append(whole)
        self._idle.move_to_end(size)
        self._idle_bytes += size
        while self._idle_bytes > self._keep_bytes:
            oldest, buffers = next(iter(self._idle.items()))
            buffers.pop()
            self._idle_bytes -= oldest
            if not buffers:
                del self._idle[oldest]


def _size_class(nbytes: int) -> int:
    """Round up to 2^k or 3 * 2^(k-1)."""
    if nbytes <= SMALLEST_BYTES:
        return SMALLEST_BYTES
    power = 1 << (nbytes - 1).bit_length()
    three_quarters = power // 4 * 3
    return three_quarters if nbytes <= three_quarters else power


def _allocate(size: int) -> Array:
    """Aligned memory whose views have exactly the returned array as their base (numpy would skip to the owner)."""
    owner = np.empty(size + ALIGNMENT, np.uint8)
    start = -owner.ctypes.data % ALIGNMENT
    return np.frombuffer(owner.data[start : start + size], np.uint8)
