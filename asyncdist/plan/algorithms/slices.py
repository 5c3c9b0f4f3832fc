"""Slices: a vector that has a part for every rank, all cut into the same number of chunks, and which item is which.

A rank publishes, chunk after chunk, the parts of the others, that of the next rank first; where results follow, its own
part of an earlier chunk after those. What has no elements is no item. Numbers of items are worked out, not counted: of
p ranks with n chunks there are p * p * n, and every rank asks for 2 * p * n of them.
"""

from __future__ import annotations

from itertools import accumulate

from asyncdist.plan.chunks import offsets
from asyncdist.plan.steps import Buffer, Slice

__all__ = ["Slices"]


class Slices:
    """Parts of `counts` elements, in chunks of at most `chunk_length`.

    With `lookahead`, ranks publish results, that of a chunk after the input so many chunks further on; all ranks but
    `root`, where one is given.
    """

    def __init__(
        self, counts: tuple[int, ...], chunk_length: int, lookahead: int | None = None, root: int | None = None
    ) -> None:
        self.counts = counts
        self.starts = offsets(counts)
        self.chunks = max(1, -(-max(counts) // chunk_length))
        self.longest = -(-max(counts) // self.chunks)
        """Elements of the longest chunk."""
        self._world = len(counts)
        self._lookahead = lookahead
        self._root = root
        self._least = min(counts)
        self._full = self._least > (self.chunks - 1) * self.longest
        """Whether all chunks are of the full length, but for the last one of each part."""
        least = self._least
        self._before = () if least >= self.chunks else offsets([self._with_elements(n) for n in range(self.chunks)])
        self._ranks_before: dict[int, tuple[int, ...]] = {}

    @property
    def alike(self) -> range:
        """Chunks that are as long as the first in every part, and before and behind which as many items are put out."""
        first = 0 if self._lookahead is None else 2 * self._lookahead
        if self._full:
            return range(first, self._least // self.longest)
        return range(first, min(count % self.chunks or self.chunks for count in self.counts))

    def piece(self, buffer: Buffer, part: int, chunk: int) -> Slice:
        """A chunk of a part; perhaps without elements."""
        count = self.counts[part]
        if self._full:
            start = chunk * self.longest
            return Slice(buffer, self.starts[part] + start, min(self.longest, count - start))
        quotient, remainder = divmod(count, self.chunks)  # as even a cut as there is
        start = chunk * quotient + min(chunk, remainder)
        return Slice(buffer, self.starts[part] + start, quotient + (chunk < remainder))

    def input_item(self, rank: int, to: int, chunk: int) -> int:
        """Number of the item that is a chunk of the part of rank `to`, published by another rank."""
        number = self._items_before(chunk) - min(chunk, self.counts[rank])
        if self._lookahead is not None and rank != self._root:
            number += min(max(0, chunk - self._lookahead), self.counts[rank])
        if chunk < self._least:
            return number + (to - rank - 1) % self._world
        before = self._ranks_with_elements(chunk)
        between = before[to] - before[rank + 1]
        return number + (between if to > rank else between + before[-1])

    def input_items(self, to: int, chunk: int) -> tuple[int, ...]:
        """By rank, the number of its item that is a chunk of the part of `to`; of `to` itself it means nothing."""
        return tuple(self.input_item(rank, to, chunk) for rank in range(self._world))

    def result_item(self, rank: int, chunk: int) -> int:
        """Number of the item that is a chunk of the rank's result."""
        assert self._lookahead is not None
        inputs = min(chunk + self._lookahead + 1, self.chunks)
        return self._items_before(inputs) - min(inputs, self.counts[rank]) + chunk

    def _items_before(self, chunk: int) -> int:
        """Chunks with elements of all parts that come before this one."""
        return chunk * self._world if chunk <= self._least else self._before[chunk]

    def _with_elements(self, chunk: int) -> int:
        """Parts of which a chunk has elements: where there are fewer elements than chunks, the first ones have one."""
        return self._world if chunk < self._least else sum(count > chunk for count in self.counts)

    def _ranks_with_elements(self, chunk: int) -> tuple[int, ...]:
        """By rank, how many before it have elements in a chunk of their part."""
        found = self._ranks_before.get(chunk)
        if found is None:
            found = tuple(accumulate((count > chunk for count in self.counts), initial=0))
            self._ranks_before[chunk] = found
        return found
