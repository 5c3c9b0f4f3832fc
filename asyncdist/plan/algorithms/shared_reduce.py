"""Reductions through memory that all ranks of a group share: publish once, and everyone reduces what it is to have.

With p ranks on one host, a vector of m bytes, b seconds per byte copied and g per byte reduced:

| algorithm | collective | copied per rank | reduced per rank | rounds |
| --- | --- | --- | --- | --- |
| shared_direct | all_reduce | m (2m from rank 2 on) | m(p-1) | 1 |
| shared_direct | reduce | m | m(p-1) on the root | 1 |
| shared_direct | scan, exscan | m (2m from rank 2 on) | m r on rank r | 1 |
| shared | all_reduce | m(2p-1)/p | m(p-1)/p | 2 |
| shared | reduce | m(p+1)/p; the root m(2p-1)/p | m(p-1)/p | 2 |
| shared | reduce_scatter | m | m(p-1)/p | 1 |

`shared_direct` is for small vectors: one wake-up, and every rank does all the work. `shared` gives every rank a
slice of the vector to reduce, straight from where the others have published it, and publishes the results; chunks of
the slices follow each other, so that copying, reducing and waiting overlap. What a rank has published and the others
have not read is bounded by LOOKAHEAD + 1 chunks of every slice, if there is memory for so much; memory for one item
is enough to come to the end. For that, and so as not to wait for what comes late while other items lie there, slices
are read in the order in which they are published: from the rank below first, which publishes for us first.

Each element is folded in one way, so that all ranks have the same bits; in rank order but for `shared` all_reduce.

Source: the symmetric and the distributed variant of DeepSpeed's shared-memory all_reduce (2024), here with any number
of chunks in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncdist.plan.algorithms.slices import Slices
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Chunks, partition
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["all_reduce", "all_reduce_direct", "reduce", "reduce_direct", "reduce_scatter", "scan_direct"]

LOOKAHEAD: Final = 2
"""Chunks of input put out before the first result: while one is reduced here, the next is copied there."""

SINGLE_COPY_LOOKAHEAD: Final = 16
"""The same where what is put out is read where it lies, and takes no memory: nobody waits for who is a little late."""

RESULTS: Final = LOOKAHEAD + 1
"""Results of reduce that a rank holds: that of a chunk is put out after the input LOOKAHEAD chunks further on. With one
fewer, folding that chunk would wait for a place which is free only after others have folded it."""

PARTIAL_SUMS: Final = 2
"""Chunks of a vector that is folded whole of which the part of lower ranks is held: one is put to use, one is made."""


def all_reduce_direct(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone publishes its vector and folds all of them."""
    builder = PlanBuilder.of(problem, "shared_direct", rank)
    pieces = Chunks(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length)
    room = _room(builder, pieces, rank)
    for item in builder.rounds(len(pieces), pieces.alike, len(room) or 1):
        piece = pieces[item]
        if problem.world > 1:
            builder.publish(piece)
        _fold(builder, piece, item, rank, problem.world, room)
    return builder.build(ordered=True)


def reduce_direct(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone but the root publishes its vector, the root folds all."""
    builder = PlanBuilder.of(problem, "shared_direct", rank)
    pieces = Chunks(Slice(Buffer.INPUT, 0, problem.total), chunk_length)
    for item in builder.rounds(len(pieces), pieces.alike):
        piece = pieces[item]
        if rank != problem.root:
            builder.publish(piece, shielded=True)
        else:
            target = Slice(Buffer.OUTPUT, piece.offset, piece.length)
            _fold_input(builder, piece, target, rank, [item] * problem.world)
    return builder.build(ordered=True)


def scan_direct(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """scan and exscan: everyone publishes its vector and folds those of the ranks before it."""
    builder = PlanBuilder.of(problem, "shared_direct", rank)
    pieces = Chunks(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length)
    room = _room(builder, pieces, rank) if problem.collective == "scan" else ()
    for item in builder.rounds(len(pieces), pieces.alike, len(room) or 1):
        piece = pieces[item]
        if rank < problem.world - 1:
            builder.publish(piece, shielded=rank == 0)
        if problem.collective == "scan":
            _fold(builder, piece, item, rank, rank + 1, room)
        elif rank:
            builder.fetch(0, item, 0, piece)
            for peer in range(1, rank):
                builder.fetch_reduce(peer, item, 0, piece, item_left=False)
    return builder.build(ordered=True)


def all_reduce(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone reduces its slice and publishes the result, chunk after chunk."""
    builder = PlanBuilder.of(problem, "shared", rank)
    world = problem.world
    lookahead = SINGLE_COPY_LOOKAHEAD if problem.single_copy else LOOKAHEAD
    slices = Slices(partition(problem.total, world), chunk_length, lookahead)
    for chunk in builder.rounds(slices.chunks + lookahead, slices.alike):
        if chunk < slices.chunks:
            _publish_inputs(builder, slices, Buffer.OUTPUT, rank, chunk)
        if chunk < lookahead:
            continue
        done = chunk - lookahead
        own = slices.piece(Buffer.OUTPUT, rank, done)
        if own.length and world > 1:
            for distance in range(1, world):
                peer = (rank - distance) % world  # in the order in which they are published
                builder.fetch_reduce(peer, slices.input_item(peer, rank, done), 0, own, item_left=False)
            builder.publish(own, shielded=True)
        _fetch_results(builder, slices, rank, done)
    return builder.build()


def reduce(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone reduces its slice and publishes the result for the root, chunk after chunk."""
    builder = PlanBuilder.of(problem, "shared", rank)
    slices = Slices(partition(problem.total, problem.world), chunk_length, LOOKAHEAD, problem.root)
    kept = min(RESULTS, slices.chunks)
    room = builder.scratch(slices.longest * kept if rank != problem.root else 0)
    for chunk in builder.rounds(slices.chunks + LOOKAHEAD, slices.alike, 1 if rank == problem.root else kept):
        if chunk < slices.chunks:
            _publish_inputs(builder, slices, Buffer.INPUT, rank, chunk)
        if chunk < LOOKAHEAD:
            continue
        done = chunk - LOOKAHEAD
        own = slices.piece(Buffer.INPUT, rank, done)
        items = slices.input_items(rank, done) if own.length else ()
        if rank == problem.root:
            _fold_input(builder, own, own._replace(buffer=Buffer.OUTPUT), rank, items)
            _fetch_results(builder, slices, rank, done)
        else:
            target = Slice(Buffer.SCRATCH, room.offset + done % kept * slices.longest, own.length)
            _fold_input(builder, own, target, rank, items)
            builder.publish(target)
    return builder.build(ordered=True)


def reduce_scatter(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone publishes the others' blocks and folds its own, chunk after chunk."""
    builder = PlanBuilder.of(problem, "shared", rank)
    blocks = Slices(problem.counts, chunk_length)
    for chunk in builder.rounds(blocks.chunks, blocks.alike):
        _publish_inputs(builder, blocks, Buffer.INPUT, rank, chunk)
        own = blocks.piece(Buffer.INPUT, rank, chunk)
        target = Slice(Buffer.OUTPUT, own.offset - blocks.starts[rank], own.length)
        _fold_input(builder, own, target, rank, blocks.input_items(rank, chunk) if own.length else ())
    return builder.build(block_aligned=True, ordered=True)


def _room(builder: PlanBuilder, pieces: Sequence[Slice], rank: int) -> tuple[Slice, ...]:
    """Where ranks with several below them fold those: our own operand goes between theirs and the others'."""
    if rank < 2 or not pieces:
        return ()
    return tuple(builder.scratch(pieces[0].length) for _ in range(min(PARTIAL_SUMS, len(pieces))))


def _fold(builder: PlanBuilder, piece: Slice, item: int, rank: int, ranks: int, room: tuple[Slice, ...]) -> None:
    """Fold item `item` of the first `ranks` ranks into `piece`, which holds our own.

    Our own is not read as an item: it is the others who say until when an item stays where it is.
    """
    if rank == 1:
        builder.fetch_reduce(0, item, 0, piece, item_left=True)
    elif rank:
        below = room[item % len(room)]._replace(length=piece.length)
        builder.fetch(0, item, 0, below)
        for peer in range(1, rank):
            builder.fetch_reduce(peer, item, 0, below, item_left=False)
        builder.reduce(below, piece, source_left=True)
    for peer in range(rank + 1, ranks):
        builder.fetch_reduce(peer, item, 0, piece, item_left=False)


def _publish_inputs(builder: PlanBuilder, slices: Slices, buffer: Buffer, rank: int, chunk: int) -> None:
    """Publish a chunk of everyone else's part, that of the next rank first.

    What overwrites such a chunk of OUTPUT is its result, which the other rank puts out once it has read ours.
    """
    world = len(slices.counts)
    for distance in range(1, world):
        piece = slices.piece(buffer, (rank + distance) % world, chunk)
        builder.publish(piece, shielded=True)


def _fetch_results(builder: PlanBuilder, slices: Slices, rank: int, chunk: int) -> None:
    """Copy a chunk of everyone else's result."""
    world = len(slices.counts)
    for distance in range(1, world):
        peer = (rank + distance) % world
        target = slices.piece(Buffer.OUTPUT, peer, chunk)
        if target.length:
            builder.fetch(peer, slices.result_item(peer, chunk), 0, target)


def _fold_input(builder: PlanBuilder, own: Slice, target: Slice, rank: int, items: Sequence[int]) -> None:
    """Fold the ranks' items, by rank, with `own` in the place of ours, into `target`, in rank order."""
    for peer, item in enumerate(items):
        if peer == rank == 0:
            builder.copy(own, target)
        elif peer == rank:
            builder.reduce(own, target, source_left=False)
        elif peer == 0:
            builder.fetch(0, item, 0, target)
        else:
            builder.fetch_reduce(peer, item, 0, target, item_left=False)
