"""Folding: any number of ranks as a power of two of positions, for algorithms whose partners differ in one bit.

With 2^k the largest power of two up to p, pairs of neighbors at the low end share a position: the even rank of a pair
acts for both. So positions are in rank order, and the ranks of a run of positions are a run of ranks.

Source: Thakur, Rabenseifner and Gropp, 2005 (see `recursive_doubling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from asyncdist.plan.chunks import split
from asyncdist.plan.cost.load import AT_HOME, Round, Shape
from asyncdist.plan.steps import Buffer, Slice

__all__ = ["Fold", "FoldedBlocks", "doubling_rounds", "whole_round"]


class Fold(NamedTuple):
    """`active` positions, a power of two; the first `folded` ranks share one in pairs."""

    active: int
    folded: int

    @classmethod
    def of(cls, world: int) -> Fold:
        """How a world is folded."""
        active = 1 << (world.bit_length() - 1)
        return cls(active, 2 * (world - active))

    def position(self, rank: int) -> int:
        """Position of a rank; a folded odd rank has its partner's."""
        return rank // 2 if rank < self.folded else rank - self.folded // 2

    def rank(self, position: int) -> int:
        """The rank that acts at a position; for position `active` the number of ranks."""
        return 2 * position if position < self.folded // 2 else position + self.folded // 2


class FoldedBlocks(NamedTuple):
    """A vector of one block per rank, `starts` the blocks' offsets and the end, by position."""

    fold: Fold
    starts: Sequence[int]
    chunk_length: int

    def length(self, first: int, count: int) -> int:
        """Elements of the blocks of positions `first` .. `first + count - 1`."""
        return self.starts[self.fold.rank(first + count)] - self.starts[self.fold.rank(first)]

    def pieces(self, buffer: Buffer, position: int, count: int) -> list[Slice]:
        """Chunks of the aligned run of `count` positions around `position`, in the order in which it doubles.

        That is its own blocks, those of its neighbor, of the next two, and so on; in reverse, it is the order in which
        halving hands them on. A chunk crosses no block boundary that later or earlier rounds cut at.
        """
        fold, starts = self.fold, self.starts
        first = position & -count
        if count == 1:
            edges = starts[fold.rank(first) : fold.rank(first + 1) + 1]
            blocks = [Slice(buffer, start, end - start) for start, end in pairwise(edges)]
            return [piece for block in blocks for piece in split(block, self.chunk_length)]
        length = self.length(first, count)
        if length <= self.chunk_length:
            return [Slice(buffer, starts[fold.rank(first)], length)] if length else []
        half = count // 2
        return self.pieces(buffer, position, half) + self.pieces(buffer, position ^ half, half)


def doubling_rounds(shape: Shape, *, reduces: bool) -> list[Round]:
    """The rounds of ranks that double what they have, with partners twice as far each time."""
    bits = shape.world.bit_length() - 1
    rounds = []
    for bit in range(bits):
        nbytes = shape.full(shape.world / (1 << bits - bit)) * shape.block
        rounds.append(Round(nbytes, shape.partners(1 << bit), reduces, shape.pieces(nbytes)))
    return rounds


def whole_round(shape: Shape, nbytes: float) -> Round:
    """A rank and the neighbor that shares its position exchange so many bytes, in chunks."""
    return Round(nbytes, AT_HOME, False, shape.pieces(nbytes))
