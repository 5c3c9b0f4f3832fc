"""Recursive doubling and halving: partners differ in one bit of their position, log2(p) rounds.

With p = 2^k ranks, m bytes, latency a, b seconds per byte sent and g per byte reduced:

| algorithm | collective | cost | bytes sent per rank |
| --- | --- | --- | --- |
| recursive_doubling | all_reduce | log2(p) (a + mb + mg) | m log2(p) |
| recursive_doubling | all_gather | log2(p) a + mb(p-1)/p | m(p-1)/p |
| recursive_halving | reduce_scatter | log2(p) a + (b + g) m(p-1)/p | m(p-1)/p |
| halving_doubling | all_reduce | 2 log2(p) a + (2b + g) m(p-1)/p | 2m(p-1)/p |

`recursive_doubling`: partners exchange everything they have; all_reduce reduces what came. For short vectors.
`recursive_halving`: the ranks responsible for a run of blocks are two halves; partners exchange partial sums so that
each half keeps its own blocks. The first partner is half the world away, as each rank has to end with its own block.
INPUT is only read: partial sums take half the vector of SCRATCH, all of it at ranks that act for two.
`halving_doubling`, Rabenseifner's: partners exchange halves of what they are still responsible for, and each reduces
the half that it keeps; then come the same rounds in reverse, passing on results. Neighbors come first, so the longest
messages go the shortest way.

Where p is no power of two, pairs of neighbors at the low end are folded (`Fold`): the odd rank sends its operand to the
even one, which acts for both and sends back the result. That costs two more rounds with whole vectors (for
reduce_scatter a vector and a block; for all_gather a block and the others). Circulant graphs have no such rounds.

Each element is reduced along one tree, so all ranks get the same bits. In both forms of all_reduce the lower rank's
operand is on the left and merged ranks are adjacent: the operation need not commute. For reduce_scatter it must.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", International
Journal of High Performance Computing Applications 19(1), 2005; Rabenseifner, "Optimization of collective reduction
operations", ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from asyncdist.plan.algorithms.algorithm import DOUBLING, HALVING, Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Window, first_that_fits, offsets, split
from asyncdist.plan.cost.load import AT_HOME, Load, Round, Shape, in_rounds
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["Fold", "FoldedBlocks"]


def all_gather(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Exchange all blocks gathered so far, in chunks of `chunk_length` elements, those received first first."""
    rank = builder.rank
    starts = offsets(problem.counts)
    fold = Fold.of(problem.world)
    blocks = FoldedBlocks(fold, starts, chunk_length)
    position = fold.position(rank)
    folded = rank < fold.folded
    own = Slice(Buffer.INPUT, 0, problem.counts[rank])
    place = Slice(Buffer.OUTPUT, starts[rank], own.length)
    if folded and rank % 2:
        builder.send_all(rank - 1, split(own, chunk_length))
        builder.copy(own, place)
        others = _without(place, blocks.pieces(Buffer.OUTPUT, position, fold.active))
        builder.recv_all(rank - 1, others, builder.window())
        return builder.build()
    if folded:
        lent = Slice(Buffer.OUTPUT, starts[rank + 1], problem.counts[rank + 1])
        builder.recv_all(rank + 1, split(lent, chunk_length), builder.window())
    count = 1
    while count < fold.active:
        partner = fold.rank(position ^ count)
        pieces = blocks.pieces(Buffer.OUTPUT, position, count)
        if count == 1:  # the own block is sent from INPUT, so that nothing waits for its copy
            pieces = [_home(piece, place) for piece in pieces]
        builder.send_all(partner, pieces)
        if count == 1:
            builder.copy(own, place)
        builder.recv_all(partner, blocks.pieces(Buffer.OUTPUT, position ^ count, count), builder.window())
        count *= 2
    if fold.active == 1:
        builder.copy(own, place)
    if folded:
        builder.send_all(rank + 1, _without(lent, blocks.pieces(Buffer.OUTPUT, position, fold.active)))
    return builder.build()


def _home(piece: Slice, place: Slice) -> Slice:
    """Where a piece is at the start, if it belongs to the block which goes to `place`."""
    return Slice(Buffer.INPUT, piece.offset - place.offset, piece.length) if piece.overlaps(place) else piece


def _without(block: Slice, pieces: Iterable[Slice]) -> list[Slice]:
    """What is left of `pieces` without `block`."""
    left = []
    for piece in pieces:
        if not piece.overlaps(block):
            left.append(piece)
            continue
        for start, end in ((piece.offset, block.offset), (block.end, piece.end)):
            if start < end:
                left.append(Slice(piece.buffer, start, end - start))
    return left


def all_reduce_by_doubling(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Exchange and reduce whole vectors.

    Each round receives into SCRATCH of its own: no receive waits for anything, so all are posted at the start. A
    receive into OUTPUT would have to wait for the send of OUTPUT to be done, on both sides: a deadlock when the
    message is too large to be buffered.
    """
    rank, world = builder.rank, problem.world
    whole = Slice(Buffer.OUTPUT, 0, problem.total)
    fold = Fold.of(world)
    folded = fold.folded
    if rank < folded and rank % 2:
        builder.send(rank - 1, whole)
        builder.recv(rank - 1, whole)
        return builder.build(ordered=True)
    if rank < folded:
        builder.recv_reduce(rank + 1, whole, incoming_left=False)
    position = fold.position(rank)
    distance = 1
    while distance < fold.active:
        partner = fold.rank(position ^ distance)
        builder.send(partner, whole)
        incoming = builder.scratch(problem.total)
        builder.recv(partner, incoming)
        builder.reduce(incoming, whole, source_left=partner < rank)
        distance *= 2
    if rank < folded:
        builder.send(rank + 1, whole)
    return builder.build(ordered=True)


def _doubling_cost(shape: Shape) -> Load:
    """floor(log2 p) exchanges of whole vectors."""
    rounds = [Round(shape.total, shape.partners(1 << bit), True) for bit in range(shape.world.bit_length() - 1)]
    load = in_rounds(shape, rounds, [Round(shape.total, AT_HOME, True), Round(shape.total, AT_HOME)])
    return load._replace(scratch=len(rounds) * shape.total)


def _all_gather_cost(shape: Shape) -> Load:
    """Exchanges of 1, 2, 4, ... blocks, in chunks; neighbors first."""
    rounds = doubling_rounds(shape, reduces=False)
    return in_rounds(shape, rounds, [whole_round(shape, shape.block), whole_round(shape, shape.total)])


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
        """Chunks of the aligned run of `count` positions around `position`, in the order in which doubling gets them.

        Own blocks come first, then those of the neighbor, of the next two positions, and so on; halving hands them on
        in reverse. A chunk crosses no block boundary that later or earlier rounds cut at.
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
    """The round in which a rank and the neighbor that shares its position exchange `nbytes`, in chunks."""
    return Round(nbytes, AT_HOME, False, shape.pieces(nbytes))


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


class _Vector(NamedTuple):
    """OUTPUT in `parts` blocks, as one position sees it: which half of a range it keeps depends on its bits."""

    total: int
    parts: int
    chunk_length: int
    position: int

    def start(self, part: int) -> int:
        quotient, remainder = divmod(self.total, self.parts)
        return part * quotient + min(part, remainder)

    def length(self, first: int, count: int) -> int:
        return self.start(first + count) - self.start(first)

    def pieces(self, first: int, count: int, bit: int) -> tuple[Slice, ...]:
        """Chunks of parts `first` .. `first + count - 1`, that half first which is sent on in round `bit`, and so on.

        Cuts are at halves as far as rounds halve, so that a chunk is part of one chunk of the round before.
        """
        length = self.length(first, count)
        if count == 1 or length <= self.chunk_length:
            return split(Slice(Buffer.OUTPUT, self.start(first), length), self.chunk_length)
        half = count // 2
        lower, upper = self.pieces(first, half, bit + 1), self.pieces(first + half, half, bit + 1)
        return lower + upper if self.position >> bit & 1 else upper + lower


def all_reduce_by_halving(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Halve, then double, in place.

    The last rounds, as far as they are small, receive into SCRATCH that is ready from the start; those before go
    through a window of chunks.
    """
    rank = builder.rank
    fold = Fold.of(problem.world)
    vector = _Vector(problem.total, fold.active, chunk_length, fold.position(rank))
    whole = vector.pieces(0, fold.active, 0)
    if rank < fold.folded and rank % 2:
        builder.send_all(rank - 1, whole)
        builder.recv_all(rank - 1, reversed(whole), builder.window())
        return builder.build(ordered=True)
    window = builder.window()
    if rank < fold.folded:
        builder.recv_reduce_all(rank + 1, whole, window, incoming_left=False)
    _halve(builder, fold, vector, window)
    _double(builder, fold, vector)
    if rank < fold.folded:
        builder.send_all(rank + 1, reversed(whole))
    return builder.build(ordered=True)


def _halve(builder: PlanBuilder, fold: Fold, vector: _Vector, window: Window) -> None:
    position = vector.position
    kept = [_range(position, bit, fold.active) for bit in range(fold.active.bit_length() - 1)]
    small = first_that_fits([vector.length(*parts) for parts in kept], builder.window_size * vector.chunk_length)
    for bit, (first, count) in enumerate(kept):
        partner = fold.rank(position ^ 1 << bit)
        lower_partner = bool(position >> bit & 1)
        builder.send_all(partner, vector.pieces(first - count if lower_partner else first + count, count, bit + 1))
        kept_pieces = vector.pieces(first, count, bit + 1)
        if bit < small:
            builder.recv_reduce_all(partner, kept_pieces, window, incoming_left=lower_partner)
            continue
        for piece in kept_pieces:
            incoming = builder.scratch(piece.length)
            builder.recv(partner, incoming)
            builder.reduce(incoming, piece, source_left=lower_partner)


def _double(builder: PlanBuilder, fold: Fold, vector: _Vector) -> None:
    position = vector.position
    for bit in reversed(range(fold.active.bit_length() - 1)):
        first, count = _range(position, bit, fold.active)
        partner = fold.rank(position ^ 1 << bit)
        builder.send_all(partner, reversed(vector.pieces(first, count, bit + 1)))
        theirs = vector.pieces(first - count if position >> bit & 1 else first + count, count, bit + 1)
        builder.recv_all(partner, reversed(theirs), builder.window())


def _range(position: int, bit: int, active: int) -> tuple[int, int]:
    """First part and number of parts a position is responsible for after round `bit`."""
    first, count = 0, active
    for earlier in range(bit + 1):
        count //= 2
        first += count * (position >> earlier & 1)
    return first, count


def _halving_cost(shape: Shape) -> Load:
    """Exchanges of halves, quarters, ..., and back; neighbors come first, in chunks."""
    down = []
    for bit in range(shape.world.bit_length() - 1):
        part = shape.total / (2 << bit)
        down.append(Round(part, shape.partners(1 << bit), True, shape.pieces(part)))
    up = [one._replace(reduces=False) for one in reversed(down)]
    whole = shape.pieces(shape.total)
    fold = [Round(shape.total, AT_HOME, True, whole), Round(shape.total, AT_HOME, False, whole)]
    return in_rounds(shape, [*down, *up], fold)


ALGORITHMS: Final = (
    Algorithm(
        "all_reduce",
        "recursive_doubling",
        all_reduce_by_doubling,
        _doubling_cost,
        DOUBLING,
        ordered=True,
        chunked=False,
    ),
    Algorithm("all_gather", "recursive_doubling", all_gather, _all_gather_cost, HALVING),
    Algorithm("reduce_scatter", "recursive_halving", reduce_scatter, _reduce_scatter_cost, HALVING),
    Algorithm("all_reduce", "halving_doubling", all_reduce_by_halving, _halving_cost, HALVING, ordered=True),
)
