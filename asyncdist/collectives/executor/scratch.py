"""ScratchPool: temporary memory for partial sums and staging, reused between operations.

Fresh large memory costs a page fault per 4 KiB, about as much as receiving into it; a training step asks for the
same few sizes over and over.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

from asyncdist.arrays.host import Array

__all__ = ["ALIGNMENT", "KEEP_BYTES", "ScratchPool"]

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
