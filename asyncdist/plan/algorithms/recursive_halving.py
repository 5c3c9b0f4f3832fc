"""Recursive halving: reduce_scatter in log2(p) rounds, with least bytes where p is a power of two.

In each round the ranks responsible for a run of blocks are two halves; partners exchange partial sums so that each half
keeps its own blocks. The first partner is half the world away, as each rank has to end with its own block. With
p = 2^k ranks, a vector of m bytes, latency a, b seconds per byte sent and g per byte reduced:
log2(p) a + (b + g) m(p-1)/p; each rank sends m(p-1)/p bytes.

Where p is no power of two, pairs of neighbors at the low end are folded (`fold`): the odd rank sends its m bytes to the
even one, which acts for both and sends back a block; 2a + mb(1 + 1/p) + mg more. Circulant graphs have no such rounds.

INPUT is only read: partial sums take half the vector of SCRATCH (all of it at ranks that act for two). The operation
must commute; each element is reduced along one tree.

Source: Thakur, Rabenseifner and Gropp, 2005 (see `recursive_doubling`).
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms.algorithm import HALVING, Algorithm
from asyncdist.plan.algorithms.fold import Fold, FoldedBlocks, doubling_rounds, whole_round
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import first_that_fits, offsets, split
from asyncdist.plan.cost.load import Load, Shape, in_rounds
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["ALGORITHMS", "reduce_scatter"]


def reduce_scatter(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Halve the run of blocks each rank is responsible for, in chunks of `chunk_length` elements."""
    rank = builder.rank
    starts = offsets(problem.counts)
    fold = Fold.of(problem.world)
    blocks = FoldedBlocks(fold, starts, chunk_length)
    position = fold.position(rank)
    result = Slice(Buffer.OUTPUT, 0, problem.counts[rank])
    if problem.world == 1:
        builder.copy(Slice(Buffer.INPUT, 0, result.length), result)
    elif rank < fold.folded and rank % 2:
        builder.send_all(rank - 1, reversed(blocks.pieces(Buffer.INPUT, position, fold.active)))
        for piece in reversed(split(result, chunk_length)):
            builder.recv(rank - 1, piece)
    else:
        _Halving(builder, blocks, position).run()
    return builder.build()


class _Halving:
    """The rounds at one active rank. `held` is where its operands are: INPUT, then partial sums in SCRATCH."""

    def __init__(self, builder: PlanBuilder, blocks: FoldedBlocks, position: int) -> None:
        self._builder = builder
        self._blocks = blocks
        self._position = position
        self._window = builder.window()
        self._partial: Slice | None = None
        self._shift = 0
        start = blocks.starts[builder.rank]
        self._own = Slice(Buffer.INPUT, start, blocks.starts[builder.rank + 1] - start)

    def run(self) -> None:
        builder, blocks, rank = self._builder, self._blocks, self._builder.rank
        fold = blocks.fold
        folded = rank < fold.folded
        if folded:
            self._reserve(0, fold.active)
            for piece in self._kept(fold.active):
                self._receive_first(rank + 1, piece, source_left=True)
        counts = [fold.active >> bit for bit in range(1, fold.active.bit_length())]
        small = first_that_fits([self._length(count) for count in counts], builder.window_size * blocks.chunk_length)
        for number, count in enumerate(counts):
            self._round(count, posted=number >= small)
        if folded:
            for piece in self._kept(1):
                if piece.offset >= blocks.starts[rank + 1]:
                    builder.send(rank + 1, self._held(piece))

    def _round(self, count: int, *, posted: bool) -> None:
        """Hand the other half of the run to the partner, and keep `count` positions; `posted`: receive at once."""
        builder, blocks, other = self._builder, self._blocks, self._position ^ count
        partner = blocks.fold.rank(other)
        builder.send_all(partner, map(self._held, reversed(blocks.pieces(Buffer.INPUT, other, count))))
        first = self._partial is None
        if first and count > 1:
            self._reserve(self._position & -count, count)
        for piece in self._kept(count):
            if count == 1 and piece.overlaps(self._own):
                held = piece if first else self._held(piece)
                target = Slice(Buffer.OUTPUT, piece.offset - self._own.offset, piece.length)
                self._window.add(builder.recv(partner, target, after=self._window.after))
                builder.reduce(held, target, source_left=builder.rank < partner)
            elif first:
                self._receive_first(partner, piece, source_left=builder.rank < partner)
            elif posted:
                incoming = builder.scratch(piece.length)
                builder.recv(partner, incoming)
                builder.reduce(incoming, self._held(piece), source_left=partner < builder.rank)
            else:
                left = partner < builder.rank
                after = self._window.after
                self._window.add(builder.recv_reduce(partner, self._held(piece), incoming_left=left, after=after))

    def _receive_first(self, partner: int, piece: Slice, *, source_left: bool) -> None:
        """What comes first is received where the partial sum will be."""
        target = self._held(piece)
        self._window.add(self._builder.recv(partner, target, after=self._window.after))
        self._builder.reduce(piece, target, source_left=source_left)

    def _kept(self, count: int) -> list[Slice]:
        return self._blocks.pieces(Buffer.INPUT, self._position, count)[::-1]

    def _length(self, count: int) -> int:
        return self._blocks.length(self._position & -count, count)

    def _reserve(self, first: int, count: int) -> None:
        self._partial = self._builder.scratch(self._blocks.length(first, count))
        self._shift = self._partial.offset - self._blocks.starts[self._blocks.fold.rank(first)]

    def _held(self, piece: Slice) -> Slice:
        if self._partial is None:
            return piece
        return Slice(Buffer.SCRATCH, piece.offset + self._shift, piece.length)


def _reduce_scatter_cost(shape: Shape) -> Load:
    """Exchanges of half of the blocks, a quarter, ..., in chunks; the partner half the world away first."""
    rounds = doubling_rounds(shape, reduces=True)[::-1]
    fold = [whole_round(shape, shape.total)._replace(reduces=True), whole_round(shape, shape.block)]
    power_of_two = shape.world & (shape.world - 1) == 0
    held = shape.full(shape.world / 2) * shape.block if power_of_two else shape.total
    return in_rounds(shape, rounds, fold)._replace(scratch=held)


ALGORITHMS: Final = (
    Algorithm("reduce_scatter", "recursive_halving", reduce_scatter, _reduce_scatter_cost, growth=HALVING),
)
