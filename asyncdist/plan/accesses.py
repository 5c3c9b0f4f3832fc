"""Accesses: which step wrote, and which steps have read, each element of a buffer; so, who must wait for whom."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

__all__ = ["Accesses"]

NOBODY: Final = -1


class Accesses:
    """Disjoint segments of one buffer, in order, each with its last writer and the readers since.

    Segments exist only where something was touched. Their boundaries are those of the slices used, so an operation
    with n chunks keeps n segments and each access costs a bisection.
    """

    __slots__ = ("_ends", "_readers", "_starts", "_writers")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._writers: list[int] = []
        self._readers: list[list[int]] = []

    def read(self, start: int, end: int, step: int) -> tuple[int, ...]:
        """Note that `step` reads elements from `start` up to `end`; return the steps it must follow."""
        starts = self._starts
        index = bisect_left(starts, start)
        beyond = index == len(starts) or starts[index] >= end
        if beyond and (index == 0 or self._ends[index - 1] <= start):  # nobody has touched it
            self._insert(index, start, end, NOBODY, [step])
            return ()
        if not beyond and starts[index] == start and self._ends[index] == end:  # one segment, as a rule
            self._readers[index].append(step)
            writer = self._writers[index]
            return () if writer == NOBODY else (writer,)
        first, last = self._segments(start, end)
        for readers in self._readers[first:last]:
            readers.append(step)
        return tuple(set(self._writers[first:last]) - {NOBODY})

    def write(self, start: int, end: int, step: int) -> tuple[int, ...]:
        """Note that `step` writes these elements (perhaps reading them first); return the steps it must follow."""
        starts = self._starts
        index = bisect_left(starts, start)
        beyond = index == len(starts) or starts[index] >= end
        if beyond and (index == 0 or self._ends[index - 1] <= start):
            self._insert(index, start, end, step, [])
            return ()
        if not beyond and starts[index] == start and self._ends[index] == end:
            readers, writer = self._readers[index], self._writers[index]
            self._writers[index] = step
            if readers:  # each of them follows the last writer already
                self._readers[index] = []
                return tuple(readers)
            return () if writer == NOBODY else (writer,)
        first, last = self._segments(start, end)
        wait: set[int] = set()
        for readers, writer in zip(self._readers[first:last], self._writers[first:last], strict=True):
            wait.update(readers or [writer])
        wait.discard(NOBODY)
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self._writers[first:last] = [step]
        self._readers[first:last] = [[]]
        return tuple(wait)

    def _segments(self, start: int, end: int) -> tuple[int, int]:
        """Cut and fill so that segments first .. last-1 cover exactly [start, end)."""
        self._cut(start)
        self._cut(end)
        first = bisect_left(self._starts, start)
        index, position = first, start
        while position < end:
            if index < len(self._starts) and self._starts[index] == position:
                position = self._ends[index]
            else:
                gap_end = min(end, self._starts[index]) if index < len(self._starts) else end
                self._insert(index, position, gap_end, NOBODY, [])
                position = gap_end
            index += 1
        return first, index

    def _cut(self, position: int) -> None:
        index = bisect_right(self._starts, position) - 1
        if index >= 0 and self._starts[index] < position < self._ends[index]:
            end = self._ends[index]
            self._ends[index] = position
            self._insert(index + 1, position, end, self._writers[index], self._readers[index].copy())

    def _insert(self, index: int, start: int, end: int, writer: int, readers: list[int]) -> None:
        self._starts.insert(index, start)
        self._ends.insert(index, end)
        self._writers.insert(index, writer)
        self._readers.insert(index, readers)
