"""Recursive halving and doubling (Rabenseifner's algorithm): all_reduce with least bytes in 2 log2(p) rounds.

In round k ranks that differ in bit k of their position exchange halves of what they are still responsible for, each
reducing the half it keeps; then come the same rounds in reverse, passing on results. With p = 2^k ranks, a vector of m
bytes, latency a, b seconds per byte sent and g per byte reduced: 2 log2(p) a + (2b + g) m(p-1)/p; each rank sends
2m(p-1)/p bytes.

Where p is no power of two, pairs of neighbors at the low end are folded (`fold`): the odd rank sends its m bytes to the
even one, which acts for both and sends back the result; 2a + 2mb + mg more. Circulant graphs have no such rounds.

Neighbors come first, so the largest messages go the shortest way, and operands are merged in rank order with the lower
on the left: the operation need not commute. Each element is reduced along one tree, so results are bit-identical.

Messages are cut into chunks; those that the receiver has to pass on first come first.

Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncdist.plan.algorithms.algorithm import HALVING, Algorithm
from asyncdist.plan.algorithms.fold import Fold
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Window, first_that_fits, split
from asyncdist.plan.cost.load import AT_HOME, Load, Round, Shape, in_rounds
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["ALGORITHMS", "all_reduce"]


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


def all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
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


def _all_reduce_cost(shape: Shape) -> Load:
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
    Algorithm("all_reduce", "halving_doubling", all_reduce, _all_reduce_cost, growth=HALVING, ordered=True),
)
