"""What is measured: buffers, inputs that differ with every sample, and the exact results.

``nbytes`` of a case is what nccl-tests calls the size: the vector of all_reduce, broadcast and reduce; elsewhere all
ranks' blocks together (the output of all_gather, the input of reduce_scatter, the buffers of one rank in all_to_all,
the root's buffer of gather and scatter). Elements are float32, the root is rank 0. In all_to_all_uneven every rank
sends more to those further after it, from about half the average to half as much again, and receives likewise.

Inputs are a pattern of small integers plus the number of the sample and the rank, so float32 rounds nothing and every
result is known exactly: a reference times a factor, plus a constant that grows with the sample's number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

PERIOD = 251
"""The pattern repeats after this prime number of elements, so that a shifted or stale slice shows."""

Array = npt.NDArray[np.float32]


def bytes_of(array: Array) -> memoryview:
    """Return the array's memory as a view of bytes."""
    return array.data.cast("B")


ITEM_BYTES: Final = 4

FULL_CHECK_BYTES: Final = 1 << 20
"""Results up to this size are checked whole every time; larger ones whole at the end of a run and at some
places before, because checking 64 MiB takes longer than reducing it."""

SPOT_STRIDE: Final = 1009
"""Every so many elements of a large result are checked each time: a prime, so that no power of two hides."""

Allocate = Callable[[int], Array]
"""Return a float32 array of so many elements."""


@dataclass(frozen=True)
class Operation:
    """A collective: how nccl-tests turns its time into bandwidth, and which rank holds what.

    ``bus_factor`` turns bytes a second of the case's size into those that a perfect bus had to carry, given the ranks.
    """

    name: str
    bus_factor: Callable[[int], float]
    blocks: bool = False


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _once(_ranks: int) -> float:
    return 1.0


OPERATIONS: Final[Mapping[str, Operation]] = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", lambda ranks: 2 * _share(ranks)),
        Operation("broadcast", _once),
        Operation("reduce", _once),
        Operation("all_gather", _share, blocks=True),
        Operation("reduce_scatter", _share, blocks=True),
        Operation("all_to_all", _share, blocks=True),
        Operation("all_to_all_uneven", _share, blocks=True),
        Operation("gather", _share, blocks=True),
        Operation("scatter", _share, blocks=True),
        Operation("barrier", _once),
    )
}

COLLECTIVES: Final = frozenset(OPERATIONS)


@dataclass
class _Filling:
    target: Array
    reference: Array
    constant: int

    def fill(self, number: int) -> None:
        np.add(self.reference, np.float32(number + self.constant), out=self.target)


@dataclass
class _Check:
    """``target`` must be ``reference`` + ``slope`` * number + ``constant``."""

    target: Array
    reference: Array
    slope: int
    constant: int

    def is_right(self, number: int, scratch: Array) -> bool:
        expected = float(self.slope * number + self.constant)
        if self.target.size == 1:
            return float(self.target[0]) == float(self.reference[0]) + expected
        difference = np.subtract(self.target, self.reference, out=scratch[: self.target.size])
        return bool(difference.min() == expected == difference.max())

    def spots(self) -> _Check:
        return _Check(self.target[::SPOT_STRIDE], self.reference[::SPOT_STRIDE], self.slope, self.constant)


@dataclass
class Buffers:
    """One rank's arrays for one case. ``input`` is ``output`` where the operation works in place."""

    input: Array
    output: Array
    ranks: int
    fillings: list[_Filling] = field(default_factory=list)
    checks: list[_Check] = field(default_factory=list)
    scratch: Array = field(default_factory=lambda: np.empty(0, np.float32))
    splits: tuple[list[int], list[int]] = ([], [])
    """Of all_to_all_uneven: elements for each rank, and from each."""

    def blocks(self, array: Array) -> list[Array]:
        """Return the array's block of each rank, as views."""
        return np.split(array, self.ranks)

    def fill(self, number: int) -> None:
        """Write the inputs of sample ``number``."""
        for filling in self.fillings:
            filling.fill(number)

    def is_right(self, number: int, *, whole: bool = True) -> bool:
        """Whether the results of sample ``number`` are right, everywhere or (large ones) at some places."""
        if self.output.nbytes <= FULL_CHECK_BYTES or whole:
            return all(check.is_right(number, self.scratch) for check in self.checks)
        return all(check.spots().is_right(number, self.scratch) for check in self.checks)


def make_buffers(name: str, nbytes: int, rank: int, ranks: int, allocate: Allocate, *, in_place: bool) -> Buffers:
    """Allocate and describe what ``rank`` of ``ranks`` holds. ``in_place`` shares one array where the operation may."""
    block = max(1, nbytes // ITEM_BYTES // (ranks if OPERATIONS[name].blocks else 1))
    whole = block * ranks if OPERATIONS[name].blocks else block
    base = np.resize(np.arange(PERIOD, dtype=np.float32), whole)
    parts = np.split(base, ranks) if OPERATIONS[name].blocks else [base]
    sizes = {"all_gather": (block, whole), "gather": (block, whole), "scatter": (whole, block)}
    sizes["reduce_scatter"] = (whole, block)
    input_size, output_size = sizes.get(name, (whole, whole))
    same = in_place and name in ("all_reduce", "broadcast", "reduce")
    output = allocate(output_size)
    output.fill(-1.0)
    source = output if same else allocate(input_size)
    found = Buffers(source, output, ranks, scratch=np.zeros(output_size, np.float32))
    root, ranks_sum = rank == 0, ranks * (ranks - 1) // 2
    if name in ("broadcast", "scatter"):
        found.fillings = [_Filling(source, base, 0)] if root else []
        found.checks = [_Check(output, base if name == "broadcast" else parts[rank], 1, 0)]
        if name == "broadcast" and root and not same:
            found.checks = []
    elif name in ("all_gather", "gather"):
        found.fillings = [_Filling(source, parts[0], rank)]
        if root or name == "all_gather":
            found.checks = [_Check(part, parts[0], 1, peer) for peer, part in enumerate(found.blocks(output))]
    elif name == "all_to_all_uneven":
        found.splits = _uneven(block, rank, ranks), [_uneven(block, peer, ranks)[rank] for peer in range(ranks)]
        found.fillings = [_Filling(source, base, rank)]
        own = np.split(output, np.cumsum(found.splits[1])[:-1])
        for peer, part in enumerate(own):
            start = sum(_uneven(block, peer, ranks)[:rank])
            if part.size:
                found.checks.append(_Check(part, base[start : start + part.size], 1, peer))
    elif name == "all_to_all":
        found.fillings = [_Filling(source, base, rank)]
        found.checks = [_Check(part, parts[rank], 1, peer) for peer, part in enumerate(found.blocks(output))]
    elif name != "barrier":
        found.fillings = [_Filling(source, base, rank)]
        if name != "reduce" or root:
            total = (parts[rank] if name == "reduce_scatter" else base) * np.float32(ranks)
            found.checks = [_Check(output, total, ranks, ranks_sum)]
    return found


def _uneven(block: int, source: int, ranks: int) -> list[int]:
    """Elements that ``source`` sends to each rank, ``block`` on average: the same lengths in every row and column."""
    lengths = [block * (2 * distance + 1 + ranks) // (2 * ranks) for distance in range(ranks)]
    lengths[-1] += block * ranks - sum(lengths)
    return [lengths[(target - source) % ranks] for target in range(ranks)]


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
