"""DataPartitioner: a data set divided once, at random, into parts of given fractions, one for each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

ROUNDING: Final = 1e-9
"""How far fractions may add up to more than one: as far as adding up 1/n n times goes astray, and far less than one
item in any data set that fits into memory."""


class Partition(Sequence[Any]):
    """Some items of a data set, by their `indices`; nothing is copied until they are asked for.

    An integer gives an item; a slice or an array of integers gives several: an array where the data set is one, else a
    list.
    """

    def __init__(self, data: Any, indices: NDArray[np.int64]) -> None:
        self.data = data
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: Any) -> Any:
        chosen = self.indices[item]
        if isinstance(self.data, np.ndarray):
            return self.data[chosen]
        if chosen.ndim == 0:
            return self.data[int(chosen)]
        return [self.data[index] for index in chosen.tolist()]

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in self.indices.tolist())

    def __repr__(self) -> str:
        return f"<Partition of {len(self)} items of {type(self.data).__name__}>"


class DataPartitioner:
    """Divides `data` (anything with a length and items by number) at random into `len(sizes)` parts.

    `sizes` are fractions of the whole. Every item is in one part at most, and in exactly one where the fractions add up
    to one: `DataPartitioner(data, [1 / n] * n)` leaves none out. Ranks that give the same `seed`, lengths and sizes
    divide alike, without communication.

    Raises ValueError for no sizes, for negative ones, and for sizes that add up to more than one.
    """

    def __init__(self, data: Any, sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 0) -> None:
        if not len(sizes):
            raise ValueError("sizes must not be empty")
        if not all(size >= 0 for size in sizes):
            raise ValueError(f"sizes must be fractions of the data, none of them negative, not {list(sizes)}")
        whole = math.fsum(sizes)
        if whole > 1 + ROUNDING:
            raise ValueError(f"sizes must add up to 1 at most, but {list(sizes)} add up to {whole:g}")
        self.data = data
        order = np.random.default_rng(seed).permutation(len(data))
        ends = np.rint(np.cumsum(sizes) * len(data)).astype(np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        self.partitions = [order[start:end] for start, end in zip(starts, ends, strict=True)]

    def use(self, partition: int) -> Partition:
        """Return part number `partition`, as a rule this rank's. Raises IndexError where there is none."""
        if not 0 <= partition < len(self.partitions):
            raise IndexError(f"there are partitions 0 to {len(self.partitions) - 1}, but no {partition}")
        return Partition(self.data, self.partitions[partition])
