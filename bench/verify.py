"""Inputs that differ with every sample, and the checks of what came out. All of it is outside the timed parts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PERIOD = 251
"""The pattern repeats after this prime number of elements, so that a shifted or stale slice shows."""

Array = npt.NDArray[np.float32]


def bytes_of(array: Array) -> memoryview:
    """Return the array's memory as a view of bytes."""
    return array.data.cast("B")


class MessagePattern:
    """A message whose every element depends on its place and on the sample's number."""

    def __init__(self, nbytes: int) -> None:
        self.base = np.arange(nbytes // 4, dtype=np.float32) % PERIOD
        self._scratch = np.empty_like(self.base)

    def empty(self) -> Array:
        """Return an array of the message's size, filled with a value no message has."""
        return np.full_like(self.base, -1.0)

    def fill(self, array: Array, number: int) -> None:
        np.add(self.base, np.float32(number), out=array)

    def is_right(self, array: Array, number: int) -> bool:
        """Whether every element is message ``number``'s."""
        if array.size == 1:
            return float(array[0]) == float(self.base[0]) + number
        np.subtract(array, self.base, out=self._scratch)
        return bool(self._scratch.min() == number == self._scratch.max())


class SumPattern:
    """Operands of an all_reduce with SUM and the exact result (small integers, so float32 rounds nothing)."""

    def __init__(self, nbytes: int, rank: int, world_size: int) -> None:
        self._pattern = MessagePattern(nbytes)
        self._rank = rank
        self._world_size = world_size
        self._total = self._pattern.base * np.float32(world_size)
        self._scratch = np.empty_like(self._total)

    def empty(self) -> Array:
        """Return an array of the operand's size."""
        return self._pattern.empty()

    def fill(self, array: Array, number: int) -> None:
        self._pattern.fill(array, number + self._rank)

    def is_right(self, array: Array, number: int) -> bool:
        """Whether every element is the sum over all ranks."""
        expected = self._world_size * number + self._world_size * (self._world_size - 1) // 2
        if array.size == 1:
            return float(array[0]) == float(self._total[0]) + expected
        np.subtract(array, self._total, out=self._scratch)
        return bool(self._scratch.min() == expected == self._scratch.max())
