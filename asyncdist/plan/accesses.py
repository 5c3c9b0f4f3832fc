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

    def read(self, start: int, end: int, step: int, wait: set[int]) -> None:
        """Note that `step` reads elements from `start` up to `end`; add the steps it must follow to `wait`."""
        index = bisect_left(self._starts, start)
        if self._is_free(index, start, end):
            self._insert(index, start, end, NOBODY, [step])
            return
        first, last = (index, index + 1) if self._is_one(index, start, end) else self._segments(start, end)
        for index in range(first, last):
            writer = self._writers[index]
            if writer != NOBODY:
                wait.add(writer)
            self._readers[index].append(step)

    def write(self, start: int, end: int, step: int, wait: set[int]) -> None:
        """Note that `step` writes these elements (perhaps reading them first); add what it must follow to `wait`."""
        first = bisect_left(self._starts, start)
        if self._is_free(first, start, end):
            self._insert(first, start, end, step, [])
            return
        if self._is_one(first, start, end):
            readers = self._readers[first]
            if readers:  # each of them follows the last writer already
                wait.update(readers)
                self._readers[first] = []
            elif self._writers[first] != NOBODY:
                wait.add(self._writers[first])
            self._writers[first] = step
            return
        first, last = self._segments(start, end)
        for index in range(first, last):
            if self._readers[index]:
                wait.update(self._readers[index])
            elif self._writers[index] != NOBODY:
                wait.add(self._writers[index])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self._writers[first:last] = [step]
        self._readers[first:last] = [[]]

    def _is_free(self, index: int, start: int, end: int) -> bool:
        """Whether nothing of it was touched; `index` is that of the first segment that begins there or later."""
        return (index == len(self._starts) or end <= self._starts[index]) and (
            index == 0 or self._ends[index - 1] <= start
        )

    def _is_one(self, index: int, start: int, end: int) -> bool:
        return index < len(self._starts) and self._starts[index] == start and self._ends[index] == end

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
