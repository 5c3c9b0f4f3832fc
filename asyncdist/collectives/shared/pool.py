"""ItemPool: where a rank's items lie in its segment, first in, first out."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["ItemPool"]

ALIGNMENT: Final = 64
"""Items begin at cache lines, which suits every dtype."""


class ItemPool:
    """Places for items of up to `size` bytes in all, at most `most` at a time."""

    __slots__ = ("_most", "_tail", "items", "size")

    def __init__(self, size: int, most: int) -> None:
        self.size = size
        self._most = most
        self.items: deque[tuple[int, int]] = deque()
        """Number and place of the items that are there."""
        self._tail = 0

    def place(self, length: int) -> int:
        """Where `length` bytes fit now; -1 if nowhere. An empty pool begins anew, so that few pages stay in use."""
        items = self.items
        if not items:
            self._tail = 0
            return 0 if length <= self.size else -1
        if len(items) >= self._most:
            return -1
        tail, oldest = self._tail, items[0][1]
        taken = length or 1  # so that two items never lie at one place
        if tail > oldest:  # free: from the tail to the end, and from the beginning to the oldest
            if tail + taken <= self.size:
                return tail
            return 0 if taken <= oldest else -1
        return tail if tail + taken <= oldest else -1

    def add(self, number: int, at: int, length: int) -> None:
        """Item `number` lies at `at`, which `place` has said."""
        self.items.append((number, at))
        self._tail = -(-(at + max(length, 1)) // ALIGNMENT) * ALIGNMENT

    def free(self, number: int) -> None:
        """Items before `number` are needed no more."""
        items = self.items
        while items and items[0][0] < number:
            items.popleft()
