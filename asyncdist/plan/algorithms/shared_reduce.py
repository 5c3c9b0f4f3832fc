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
from itertools import accumulate
from typing import Final

from asyncdist.plan.algorithms.algorithm import Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Chunks, offsets, partition
from asyncdist.plan.cost.load import Shape, SharedLoad, SharedWork, in_records, to_root
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import Takes, by_records
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["Slices"]

LOOKAHEAD: Final = 2
"""Chunks of input put out before the first result: while one is reduced here, the next is copied there."""

SINGLE_COPY_LOOKAHEAD: Final = 16
"""The same where what is put out is read where it lies, and takes no memory: no rank waits for one that is a little
late."""

RESULTS: Final = LOOKAHEAD + 1
"""Results of reduce that a rank holds: that of a chunk is put out after the input LOOKAHEAD chunks further on. With one
fewer, folding that chunk would wait for a place which is free only after others have folded it."""

PARTIAL_SUMS: Final = 2
"""Chunks of a vector that is folded whole of which the part of lower ranks is held: one is put to use, one is made."""


class Slices:
    """A vector with a part of `counts` elements for every rank, and the numbers of the items that hold its chunks.

    All parts are cut into the same number of chunks, of at most `chunk_length` elements. A rank publishes, chunk after
    chunk, the parts of the other ranks, the next rank's first. A chunk without elements is no item. Numbers of items
    are computed, not counted: p ranks with n chunks have p * p * n items, and every rank asks for 2 * p * n of them.

    With `lookahead`, ranks also publish results, all ranks but `root` where one is given: the result of a chunk comes
    after the inputs of the chunk that many chunks further on.
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
        """How many parts have elements in a chunk: with fewer elements than chunks, the first chunks have one each."""
        return self._world if chunk < self._least else sum(count > chunk for count in self.counts)

    def _ranks_with_elements(self, chunk: int) -> tuple[int, ...]:
        """By rank, how many before it have elements in a chunk of their part."""
        found = self._ranks_before.get(chunk)
        if found is None:
            found = tuple(accumulate((count > chunk for count in self.counts), initial=0))
            self._ranks_before[chunk] = found
        return found


def all_reduce_direct(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone publishes its vector and folds all of them."""
    rank = builder.rank
    pieces = Chunks(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length)
    room = _room(builder, pieces, rank)
    for item in builder.rounds(len(pieces), pieces.alike, len(room) or 1):
        piece = pieces[item]
        if problem.world > 1:
            builder.publish(piece)
        _fold(builder, piece, item, rank, problem.world, room)
    return builder.build(ordered=True)


def reduce_direct(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone but the root publishes its vector, the root folds all."""
    rank = builder.rank
    pieces = Chunks(Slice(Buffer.INPUT, 0, problem.total), chunk_length)
    for item in builder.rounds(len(pieces), pieces.alike):
        piece = pieces[item]
        if rank != problem.root:
            builder.publish(piece, shielded=True)
        else:
            target = Slice(Buffer.OUTPUT, piece.offset, piece.length)
            _fold_input(builder, piece, target, rank, [item] * problem.world)
    return builder.build(ordered=True)


def scan_direct(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """scan and exscan: every rank publishes its vector, and folds the vectors of the ranks before it."""
    rank = builder.rank
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


def all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone reduces its slice and publishes the result, chunk after chunk."""
    rank, world = builder.rank, problem.world
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


def reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone reduces its slice and publishes the result for the root, chunk after chunk."""
    rank = builder.rank
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


def reduce_scatter(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone publishes the others' blocks and folds its own, chunk after chunk."""
    rank = builder.rank
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

    Our own is not read as an item: the others decide until when an item stays where it is.
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
    """Publish a chunk of every other rank's part, the next rank's first.

    Such a chunk of OUTPUT is overwritten by its result only, which the other rank publishes once it has read our chunk.
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


def _all_reduce_direct_cost(shape: Shape) -> SharedLoad:
    """Everyone publishes all and folds all; ranks with several below them fold those apart."""
    world, total, pieces = shape.world, shape.total, shape.pieces(shape.total)
    if by_records(Takes.ALL, world, total, shape.memory):
        return in_records(shape, total, worked=total * (world - 1))
    first = SharedWork(pieces * world, total, total * (world - 1))
    later = first.plus(SharedWork(0, total))
    everyone = SharedWork(0).plus(first, min(2, world)).plus(later, max(0, world - 2))
    scratch = 2 * total / pieces if world > 2 else 0.0
    return SharedLoad(1, later if world > 2 else first, everyone, total, scratch)


def _reduce_direct_cost(shape: Shape) -> SharedLoad:
    """Everyone publishes all, the root folds it."""
    if by_records(Takes.ALL, shape.world, shape.total, shape.memory):
        return to_root(shape, shape.total, worked=shape.total * (shape.world - 1))
    world, total, pieces = shape.world, shape.total, shape.pieces(shape.total)
    root = SharedWork(pieces * (world - 1), total, total * (world - 1), local=total)
    other = SharedWork(pieces, total, lent=total)
    path, everyone = root.plus(other, 1 / pieces), root.plus(other, world - 1)
    return SharedLoad(1, path, everyone, total, lent_item=total / pieces)


def _scan_direct_cost(shape: Shape) -> SharedLoad:
    """Everyone publishes all, rank r folds r + 1 vectors; the last one has most to do."""
    world, total, pieces = shape.world, shape.total, shape.pieces(shape.total)
    publish = SharedWork(pieces, total)
    last = SharedWork(pieces * (world - 1), total * (world > 2), total * (world - 1))
    folds = SharedWork(pieces * world * (world - 1) / 2, total * (world - 2), total * world * (world - 1) / 2)
    scratch = 2 * total / pieces if world > 2 else 0.0
    return SharedLoad(1, last.plus(publish, 1 / pieces), folds.plus(publish, world - 1), total, scratch)


def _exscan_direct_cost(shape: Shape) -> SharedLoad:
    """The same with an operand fewer, so that it needs no memory."""
    world, total, pieces = shape.world, shape.total, shape.pieces(shape.total)
    publish = SharedWork(pieces, total)
    last = SharedWork(pieces * (world - 1), total, total * (world - 2))
    folds = SharedWork(pieces * world * (world - 1) / 2, total * (world - 1), total * (world - 1) * (world - 2) / 2)
    return SharedLoad(1, last.plus(publish, 1 / pieces), folds.plus(publish, world - 1), total)


def _all_reduce_cost(shape: Shape) -> SharedLoad:
    """Everyone publishes the others' slices, folds its own, publishes the result and copies the others'."""
    if by_records(Takes.ONE, shape.world, shape.total, shape.memory):
        share = shape.block * (shape.world - 1)
        work = SharedWork(2, shape.total + shape.block + share, share, 2 * shape.world)
        return SharedLoad(2, work, SharedWork(0).plus(work, shape.world), shape.total, by_records=True)
    others, block, pieces = shape.world - 1, shape.block, shape.pieces(shape.block)
    work = SharedWork(pieces * (3 * others + 1), block * (2 * others + 1), block * others, lent=block * (others + 1))
    everyone = SharedWork(0).plus(work, shape.world)
    return SharedLoad(2, work, everyone, block * shape.world, lent_item=block / pieces)


def _reduce_cost(shape: Shape) -> SharedLoad:
    """The same, but that only the root copies results."""
    others, block, pieces = shape.world - 1, shape.block, shape.pieces(shape.block)
    root = SharedWork(pieces * 3 * others, block * (2 * others + 1), block * others, lent=block * others, local=block)
    other = SharedWork(
        pieces * (2 * others + 1), block * (others + 2), block * others, lent=block * others, local=block
    )
    item = block / pieces
    return SharedLoad(2, root, root.plus(other, others), block * shape.world, 3 * item, lent_item=item)


def _reduce_scatter_cost(shape: Shape) -> SharedLoad:
    """Everyone publishes the others' blocks and folds its own."""
    if by_records(Takes.ONE, shape.world, shape.total, shape.memory):
        return in_records(shape, shape.total, worked=shape.block * (shape.world - 1))
    others, block, pieces = shape.world - 1, shape.block, shape.pieces(shape.block)
    given = shape.full(others)
    work = SharedWork(pieces * (given + others), block * (given + 1), block * others, lent=block * given, local=block)
    return SharedLoad(
        1, work, SharedWork(0).plus(work, shape.full(shape.world)), block * given, lent_item=block / pieces
    )


ALGORITHMS: Final = (
    Algorithm(
        "all_reduce",
        "shared_direct",
        all_reduce_direct,
        _all_reduce_direct_cost,
        shared=True,
        ordered=True,
        records=Takes.ALL,
    ),
    Algorithm("all_reduce", "shared", all_reduce, _all_reduce_cost, shared=True, records=Takes.ONE),
    Algorithm(
        "reduce", "shared_direct", reduce_direct, _reduce_direct_cost, shared=True, ordered=True, records=Takes.ALL
    ),
    Algorithm("reduce", "shared", reduce, _reduce_cost, shared=True, ordered=True),
    Algorithm(
        "reduce_scatter", "shared", reduce_scatter, _reduce_scatter_cost, shared=True, ordered=True, records=Takes.ONE
    ),
    Algorithm("scan", "shared_direct", scan_direct, _scan_direct_cost, shared=True, ordered=True),
    Algorithm("exscan", "shared_direct", scan_direct, _exscan_direct_cost, shared=True, ordered=True),
)
