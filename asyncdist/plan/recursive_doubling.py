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

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import offsets, split
from asyncdist.plan.fold import Fold, FoldedBlocks
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice
from asyncdist.plan.window import Window

__all__ = ["all_gather", "all_reduce"]


def all_gather(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Exchange all blocks gathered so far, in chunks of `chunk_length` elements, those received first first."""
    starts = offsets(problem.counts)
    builder = PlanBuilder("all_gather", "recursive_doubling", rank, problem.world)
    fold = Fold.of(problem.world)
    blocks = FoldedBlocks(fold, starts, chunk_length)
    position = fold.position(rank)
    folded = rank < fold.folded
    own = Slice(Buffer.INPUT, 0, problem.counts[rank])
    place = Slice(Buffer.OUTPUT, starts[rank], own.length)
    if folded and rank % 2:
        for piece in split(own, chunk_length):
            builder.send(rank - 1, piece)
        builder.copy(own, place)
        _receive(builder, rank - 1, _without(place, blocks.pieces(Buffer.OUTPUT, position, fold.active)))
        return builder.build()
    if folded:
        lent = Slice(Buffer.OUTPUT, starts[rank + 1], problem.counts[rank + 1])
        _receive(builder, rank + 1, split(lent, chunk_length))
    count = 1
    while count < fold.active:
        partner = fold.rank(position ^ count)
        for piece in blocks.pieces(Buffer.OUTPUT, position, count):
            at_home = count == 1 and piece.overlaps(place)  # sent from INPUT, so that nothing waits for its copy
            home = Slice(Buffer.INPUT, piece.offset - place.offset, piece.length)
            builder.send(partner, home if at_home else piece)
        if count == 1:
            builder.copy(own, place)
        _receive(builder, partner, blocks.pieces(Buffer.OUTPUT, position ^ count, count))
        count *= 2
    if fold.active == 1:
        builder.copy(own, place)
    if folded:
        for piece in _without(lent, blocks.pieces(Buffer.OUTPUT, position, fold.active)):
            builder.send(rank + 1, piece)
    return builder.build()


def _receive(builder: PlanBuilder, peer: int, pieces: Iterable[Slice]) -> None:
    window = Window()
    for piece in pieces:
        window.add(builder.recv(peer, piece, after=window.after))


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


def all_reduce(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Exchange and reduce whole vectors; `chunk_length` is not used.

    Each round receives into SCRATCH of its own: no receive waits for anything, so all are posted at the start. A
    receive into OUTPUT would have to wait for the send of OUTPUT to be done, on both sides: a deadlock when the
    message is too large to be buffered.
    """
    del chunk_length
    world = problem.world
    whole = Slice(Buffer.OUTPUT, 0, problem.total)
    builder = PlanBuilder("all_reduce", "recursive_doubling", rank, world)
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
