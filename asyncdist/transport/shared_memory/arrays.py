"""SharedArrays: memory for arrays that the ranks beside us can read where it is. Linux only.

Arrays lie in *arenas*, each a segment of its own: large ones alone, smaller ones together. An arena goes when nothing
of it is in use any more, except for one that is kept for the next array. Peers map an arena when something in it is
first exposed to them, and are told when it goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.concurrency import trace as events
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.shared_memory.segment import PAGE_BYTES, Segment

ALIGNMENT: Final = 64
"""A cache line, and the widest vector register."""
ARENA_BYTES: Final = 64 << 20
"""An arena for arrays up to half its size. Untouched memory of it costs nothing, what was touched stays until all of
it is unused."""
FEW_ARENAS: Final = 64
"""Arenas from which on new ones take in more: each costs a descriptor here, and address space in every peer."""
ARENA_SHARE: Final = 16
"""Beyond FEW_ARENAS a new one is at least this part of all memory of arrays: so there are some hundred in any case."""


class _Arena:
    """One segment, and what is free in it: `holes`, in order, as (begin, end)."""

    def __init__(self, number: int, segment: Segment) -> None:
        self.number = number
        self.segment = segment
        self.address = address_of(segment.view)
        self.holes = [(0, segment.size)]

    @property
    def unused(self) -> bool:
        return self.holes == [(0, self.segment.size)]

    def take(self, nbytes: int) -> int:
        """Where `nbytes` are free now; -1 if nowhere."""
        for index, (begin, end) in enumerate(self.holes):
            if end - begin >= nbytes:
                self.holes[index : index + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                return begin
        return -1

    def give(self, begin: int, nbytes: int) -> None:
        """These bytes are free again."""
        holes, end = self.holes, begin + nbytes
        insort(holes, (begin, end))
        index = holes.index((begin, end))
        if index + 1 < len(holes) and holes[index + 1][0] == end:
            end = holes.pop(index + 1)[1]
            holes[index] = (begin, end)
        if index and holes[index - 1][1] == begin:
            begin = holes.pop(index - 1)[0]
            holes[index - 1] = (begin, end)


class SharedArrays:
    """Arrays of one rank. `new_number` numbers segments, `on_gone(number)` is told that an arena is no more.

    For one event loop's thread, but arrays may end in any. Every array stays valid as long as anyone uses it, whatever
    becomes of this. `limit_bytes` bounds the arenas; None does not.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fds: SocketSet,
        new_number: Callable[[], int],
        on_gone: Callable[[int], None],
        limit_bytes: int | None = None,
    ) -> None:
        self._loop = loop
        self._fds = fds
        self._new_number = new_number
        self._on_gone = on_gone
        self._limit_bytes = limit_bytes
        self._arenas: list[_Arena] = []  # by address
        self._starts: list[int] = []
        self._freed: deque[tuple[int, int, int]] = deque()
        self._waking = False
        self.nbytes = 0
        """Size of all arenas."""

    def __len__(self) -> int:
        return len(self._arenas)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        """A new array, not initialized; None if there is no memory for it (or nothing in it)."""
        count = 1
        for extent in shape:
            count *= extent
        nbytes = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if nbytes >= PAGE_BYTES:
            nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if not nbytes:
            return None
        self._reclaim()
        place = self._place(nbytes)
        if place is None:
            return None
        arena, begin = place
        flat = np.frombuffer(arena.segment.view[begin : begin + count * dtype.itemsize], np.uint8)
        # All views of it keep it: numpy goes no further down, as what is below is no array.
        weakref.finalize(flat, _give, weakref.ref(self), (arena.address, begin, nbytes)).atexit = False
        array: Array = flat.view(dtype).reshape(shape)
        return array

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Number of the segment and offset in it of memory that lies in an arena, else None."""
        starts = self._starts
        if not starts:
            return None
        index = bisect_right(starts, address) - 1
        if index < 0:
            return None
        arena = self._arenas[index]
        offset = address - arena.address
        return (arena.number, offset) if offset + nbytes <= arena.segment.size else None

    def segment(self, number: int) -> Segment:
        """The segment of that number. Raises LookupError."""
        for arena in self._arenas:
            if arena.number == number:
                return arena.segment
        raise LookupError(f"no array lies in a segment {number}")

    def close(self) -> None:
        """Give all descriptors back and expose nothing any more. Idempotent."""
        for arena in self._arenas:
            arena.segment.close()
        self._arenas.clear()
        self._starts.clear()
        self.nbytes = 0
        self._limit_bytes = 0

    # -- inside

    def _place(self, nbytes: int) -> tuple[_Arena, int] | None:
        for arena in self._arenas:
            begin = arena.take(nbytes)
            if begin >= 0:
                return arena, begin
        size = nbytes if nbytes > ARENA_BYTES // 2 else ARENA_BYTES
        if len(self._arenas) >= FEW_ARENAS:
            size = max(size, self.nbytes // ARENA_SHARE)
        if self._limit_bytes is not None:
            left = (self._limit_bytes - self.nbytes) // PAGE_BYTES * PAGE_BYTES
            if nbytes > left:
                events.info("no shared memory for an array of %d bytes: the limit leaves %d", nbytes, left)
                return None
            size = min(size, left)
        try:
            segment = Segment(size, self._fds, "asyncdist-arrays")
        except (OSError, AttributeError, ValueError, OverflowError) as error:
            events.info("no shared memory for an array of %d bytes: %s", nbytes, error)
            return None
        made = _Arena(self._new_number(), segment)
        index = bisect_right(self._starts, made.address)
        self._starts.insert(index, made.address)
        self._arenas.insert(index, made)
        self.nbytes += segment.size
        return made, made.take(nbytes)

    def _array_gone(self, place: tuple[int, int, int]) -> None:
        """From any thread, and from within anything: collecting garbage may lead here."""
        self._freed.append(place)
        if not self._waking:
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._reclaim)

    def _reclaim(self) -> None:
        self._waking = False
        freed = self._freed
        while freed:
            address, begin, nbytes = freed.popleft()
            index = bisect_right(self._starts, address) - 1
            if index < 0 or self._starts[index] != address:
                continue  # closed meanwhile
            arena = self._arenas[index]
            arena.give(begin, nbytes)
            if arena.unused and not self._kept(arena):
                del self._arenas[index], self._starts[index]
                self.nbytes -= arena.segment.size
                self._on_gone(arena.number)
                arena.segment.close()

    def _kept(self, arena: _Arena) -> bool:
        """Whether an unused arena is kept for the next array."""
        others: Sequence[_Arena] = [other for other in self._arenas if other is not arena and other.unused]
        return not others and arena.segment.size <= ARENA_BYTES


def _give(arrays: weakref.ref[SharedArrays], place: tuple[int, int, int]) -> None:
    owner = arrays()
    if owner is not None:
        owner._array_gone(place)


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous view of format 'B' are in this process."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
