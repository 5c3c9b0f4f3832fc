"""Arrays of random layouts in memory that is used again at once: whoever writes late, or beside an array, is found."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from spmd_values import Array

FREE, AROUND = 0xA5, 0x5A
LAYOUTS = ("plain", "plain", "plain", "plain", "step", "back")
ALIGNMENT = 16
"""Of elements: the largest there are."""
KEPT_BYTES = 64 << 20


class Loan:
    """An array in a block, and what it must hold in the end; None as long as that is what it holds now."""

    def __init__(self, block: Array, offset: int, layout: str, initial: Array, expected: Array) -> None:
        self.block = block
        self.span = block[: offset + initial.nbytes * (2 if layout == "step" else 1)]
        self.span.fill(AROUND)
        self._offset, self._layout = offset, layout
        self._dtype, self._shape = initial.dtype, initial.shape
        self.array = self._view(self.span)
        self.array[...] = initial
        self.expected = expected

    def wrong(self) -> str:
        """What is wrong with the array and the bytes around it, if anything."""
        image = np.full(self.span.size, AROUND, np.uint8)
        right = self._view(image)
        right[...] = self.expected.reshape(self._shape)
        if np.array_equal(image, self.span):
            return ""
        different = np.flatnonzero((self.array != right).reshape(-1))
        if not different.size:
            return f"bytes around an array were written, at {np.flatnonzero(image != self.span)[:8]}"
        at = different[0]
        have, want = (array.reshape(-1)[at : at + 6] for array in (self.array, right))
        return (
            f"{different.size} of {right.size} elements ({right.dtype}, {self._layout}) are wrong, "
            f"from {at} to {different[-1]}: {have} instead of {want}"
        )

    def _view(self, octets: Array) -> Array:
        size = int(np.prod(self._shape))
        if self._layout == "step":
            flat = np.frombuffer(octets.data, self._dtype, 2 * size, self._offset)[::2]
        else:
            flat = np.frombuffer(octets.data, self._dtype, size, self._offset)
        if self._layout == "back":
            flat = flat[::-1]
        return np.lib.stride_tricks.as_strided(flat, self._shape, _strides(self._shape, flat.strides[0]))


def _strides(shape: tuple[int, ...], step: int) -> tuple[int, ...]:
    return tuple(step * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))


class Pool:
    """Lends arrays in blocks that `allocate(octets)` gives, again and again."""

    def __init__(self, allocate: Callable[[int], Array], dice: random.Random) -> None:
        self._allocate, self._dice = allocate, dice
        self._free: list[Array] = []
        self.problems: list[str] = []

    def lend(self, initial: Array, expected: Array | None = None, layout: str = "") -> Array:
        """An array of `initial`'s shape, dtype and elements; see `loan`."""
        return self.loan(initial, expected, layout).array

    def loan(self, initial: Array, expected: Array | None = None, layout: str = "") -> Loan:
        """Lend an array with the elements of `initial`, that holds `expected` in the end (None: the same)."""
        layout = layout or self._dice.choice(LAYOUTS)
        offset = self._dice.choice((0, 0, 64, ALIGNMENT))
        need = offset + initial.nbytes * 2 + ALIGNMENT
        return Loan(self._block(need), offset, layout, initial, initial if expected is None else expected)

    def give_back(self, loan: Loan) -> None:
        """Nobody writes there until it is lent again."""
        loan.block.fill(FREE)
        self._free.append(loan.block)

    def check(self) -> None:
        """See whether something was written where nobody may; and forget the blocks."""
        for block in self._free:
            self._check(block)
        self._free.clear()

    def _block(self, need: int) -> Array:
        for index, block in enumerate(self._free):
            if need <= block.size <= 8 * need + 65_536:
                del self._free[index]
                self._check(block)
                return block
        while sum(block.size for block in self._free) > KEPT_BYTES:
            self._check(self._free.pop(0))
        return self._allocate(need)

    def _check(self, block: Array) -> None:
        if not (block == FREE).all():
            self.problems.append(f"memory was written while it was free, at {np.flatnonzero(block != FREE)[:8]}")
