"""Recursive doubling: all_reduce in ceil(log2 p) rounds, for vectors whose latency outweighs their bytes; all_gather.

In round k, ranks that differ in bit k exchange everything they have; all_reduce reduces it. Cost with p = 2^k ranks,
m bytes, latency a, b seconds per byte sent and g per byte reduced: log2(p) (a + mb + mg); each rank sends m log2(p)
bytes.

Where p is no power of two, p - 2^k ranks are folded: pairs of neighbors at the low end become one, whose upper half
waits for the result; 2(a + mb) + mg more. The lower rank's operand is always on the left and merged ranks are adjacent,
so that all ranks evaluate one and the same expression, in rank order: results are bit-identical.

all_gather, m the bytes of all blocks: log2(p) a + mb(p-1)/p; each rank sends m(p-1)/p bytes. Where p is no power of two
the folded ranks give their blocks first and get all others last: 2a + mb more, and m more sent by those that act for
two. Every message is one run of the result.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", International
Journal of High Performance Computing Applications 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from asyncdist.plan.algorithms.algorithm import DOUBLING, HALVING, Algorithm
from asyncdist.plan.algorithms.fold import Fold, FoldedBlocks, doubling_rounds, whole_round
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import offsets, split
from asyncdist.plan.cost.load import AT_HOME, Load, Round, Shape, in_rounds
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["ALGORITHMS", "all_gather", "all_reduce"]


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


def all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Exchange and reduce whole vectors; `chunk_length` is not used.

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


def _all_reduce_cost(shape: Shape) -> Load:
    """floor(log2 p) exchanges of whole vectors."""
    rounds = [Round(shape.total, shape.partners(1 << bit), True) for bit in range(shape.world.bit_length() - 1)]
    load = in_rounds(shape, rounds, [Round(shape.total, AT_HOME, True), Round(shape.total, AT_HOME)])
    return load._replace(scratch=len(rounds) * shape.total)


def _all_gather_cost(shape: Shape) -> Load:
    """Exchanges of 1, 2, 4, ... blocks, in chunks; neighbors first."""
    rounds = doubling_rounds(shape, reduces=False)
    return in_rounds(shape, rounds, [whole_round(shape, shape.block), whole_round(shape, shape.total)])


ALGORITHMS: Final = (
    Algorithm(
        "all_reduce", "recursive_doubling", all_reduce, _all_reduce_cost, growth=DOUBLING, ordered=True, chunked=False
    ),
    Algorithm("all_gather", "recursive_doubling", all_gather, _all_gather_cost, growth=HALVING),
)
