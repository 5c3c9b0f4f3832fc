"""Reductions through memory that all ranks of a group share: publish once, and everyone reduces what it is to have.

With p ranks on one host, a vector of m bytes, b seconds per byte copied and g per byte reduced:

| algorithm | collective | copied per rank | reduced per rank | rounds |
| --- | --- | --- | --- | --- |
| shared_direct | all_reduce | m (2m from rank 2 on) | m(p-1) | 1 |
| shared_direct | reduce | m | m(p-1) on the root | 1 |
| shared_direct | scan, exscan | m | m r on rank r | 1 |
| shared | all_reduce | 2m(p-1)/p | m(p-1)/p | 2 |
| shared | reduce | m; the root 2m(p-1)/p | m(p-1)/p | 2 |
| shared | reduce_scatter | m | m(p-1)/p | 1 |

`shared_direct` is for small vectors: one wake-up, and every rank does all the work. `shared` gives every rank a
slice of the vector to reduce, straight from where the others have published it, and publishes the results; chunks of
the slices follow each other, so that copying, reducing and waiting overlap. What a rank has published and the others
have not read is bounded by LOOKAHEAD + 1 chunks of every slice.

All fold in rank order, each element in one way: right for operations that do not commute, bit-identical on all ranks.

Source: the symmetric and the distributed variant of DeepSpeed's shared-memory all_reduce (2024), here with any number
of chunks in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import offsets, partition, split
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["all_reduce", "all_reduce_direct", "reduce", "reduce_direct", "reduce_scatter", "scan_direct"]

LOOKAHEAD: Final = 2
"""Chunks of input put out before the first result: while one is reduced here, the next is copied there."""


class _Put(NamedTuple):
    """Something a rank publishes: a chunk of its input for rank `to`, or (to = -1) of the result."""

    chunk: int
    to: int
    length: int


def all_reduce_direct(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone publishes its vector and folds all of them."""
    builder = PlanBuilder("all_reduce", "shared_direct", rank, problem.world)
    for item, piece in enumerate(split(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length)):
        builder.publish(piece)
        _fold(builder, piece, item, rank, problem.world)
    return builder.build(ordered=True)


def reduce_direct(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone but the root publishes its vector, the root folds all."""
    builder = PlanBuilder("reduce", "shared_direct", rank, problem.world)
    for item, piece in enumerate(split(Slice(Buffer.INPUT, 0, problem.total), chunk_length)):
        if rank != problem.root:
            builder.publish(piece)
        else:
            target = Slice(Buffer.OUTPUT, piece.offset, piece.length)
            _fold_input(builder, piece, target, rank, [(peer, item) for peer in range(problem.world)])
    return builder.build(ordered=True)


def scan_direct(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """scan and exscan: everyone publishes its vector and folds those of the ranks before it."""
    builder = PlanBuilder(problem.collective, "shared_direct", rank, problem.world)
    for item, piece in enumerate(split(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length)):
        builder.publish(piece)
        if problem.collective == "scan":
            _fold(builder, piece, item, rank, rank + 1)
        elif rank:
            builder.fetch(0, item, 0, piece)
            for peer in range(1, rank):
                builder.fetch_reduce(peer, item, 0, piece, item_left=False)
    return builder.build(ordered=True)


def all_reduce(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone reduces its slice and publishes the result, chunk after chunk."""
    builder = PlanBuilder("all_reduce", "shared", rank, problem.world)
    slices = _Sliced(problem.total, problem.world, chunk_length)
    numbers = [slices.numbers(peer) for peer in range(problem.world)]
    for put in slices.puts(rank):
        if put.to >= 0:
            builder.publish(slices.piece(Buffer.OUTPUT, put.to, put.chunk))
            continue
        own = slices.piece(Buffer.OUTPUT, rank, put.chunk)
        items = [numbers[peer].get((put.chunk, rank)) for peer in range(problem.world)]
        _fold_in_place(builder, own, rank, items)
        builder.publish(own)
        for distance in range(1, problem.world):
            peer = (rank + distance) % problem.world
            target = slices.piece(Buffer.OUTPUT, peer, put.chunk)
            if target.length:
                builder.fetch(peer, numbers[peer][put.chunk, -1], 0, target)
    return builder.build()


def reduce(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone reduces its slice and publishes the result for the root, chunk after chunk."""
    builder = PlanBuilder("reduce", "shared", rank, problem.world)
    world, root = problem.world, problem.root
    slices = _Sliced(problem.total, world, chunk_length)
    numbers = [slices.numbers(peer) for peer in range(world)]
    room = builder.scratch(slices.longest * 2) if rank != root else Slice(Buffer.SCRATCH, 0, 0)
    for put in slices.puts(rank):
        if put.to >= 0:
            builder.publish(slices.piece(Buffer.INPUT, put.to, put.chunk))
            continue
        own = slices.piece(Buffer.INPUT, rank, put.chunk)
        items = [(peer, numbers[peer].get((put.chunk, rank), 0)) for peer in range(world)]
        if rank != root:
            target = Slice(Buffer.SCRATCH, room.offset + put.chunk % 2 * slices.longest, own.length)
            _fold_input(builder, own, target, rank, items)
            builder.publish(target)
            continue
        _fold_input(builder, own, slices.piece(Buffer.OUTPUT, rank, put.chunk), rank, items)
        builder.publish(slices.piece(Buffer.OUTPUT, rank, put.chunk))
        for distance in range(1, world):
            peer = (rank + distance) % world
            target = slices.piece(Buffer.OUTPUT, peer, put.chunk)
            if target.length:
                builder.fetch(peer, numbers[peer][put.chunk, -1], 0, target)
    return builder.build(ordered=True)


def reduce_scatter(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone publishes the others' blocks and folds its own, chunk after chunk."""
    builder = PlanBuilder("reduce_scatter", "shared", rank, problem.world)
    world = problem.world
    blocks = _Blocks(problem.counts, chunk_length)
    numbers = [blocks.numbers(peer) for peer in range(world)]
    for chunk in range(blocks.chunks):
        for distance in range(1, world):
            builder.publish(blocks.piece(Buffer.INPUT, (rank + distance) % world, chunk))
        own = blocks.piece(Buffer.INPUT, rank, chunk)
        target = Slice(Buffer.OUTPUT, own.offset - blocks.starts[rank], own.length)
        if own.length:
            items = [(peer, numbers[peer].get((chunk, rank), 0)) for peer in range(world)]
            _fold_input(builder, own, target, rank, items)
    return builder.build(block_aligned=True, ordered=True)


class _Blocks:
    """Blocks of a vector, all cut into the same number of chunks."""

    def __init__(self, counts: tuple[int, ...], chunk_length: int) -> None:
        self.counts = counts
        self.starts = offsets(counts)
        self.chunks = max(1, -(-max(counts) // chunk_length))
        self._cuts = {count: offsets(partition(count, self.chunks)) for count in set(counts)}

    @property
    def longest(self) -> int:
        """Elements of the longest chunk."""
        return -(-max(self.counts) // self.chunks)

    def piece(self, buffer: Buffer, block: int, chunk: int) -> Slice:
        """A chunk of a block; perhaps without elements."""
        cuts = self._cuts[self.counts[block]]
        return Slice(buffer, self.starts[block] + cuts[chunk], cuts[chunk + 1] - cuts[chunk])

    def puts(self, rank: int) -> Iterator[_Put]:
        """What `rank` publishes, in order."""
        world = len(self.counts)
        for chunk in range(self.chunks):
            for distance in range(1, world):
                to = (rank + distance) % world
                yield _Put(chunk, to, self.piece(Buffer.INPUT, to, chunk).length)

    def numbers(self, rank: int) -> dict[tuple[int, int], int]:
        """Numbers of the items of `rank`, by chunk and whom they are for; what has no elements is no item."""
        items = (put for put in self.puts(rank) if put.length)
        return {(put.chunk, put.to): number for number, put in enumerate(items)}


class _Sliced(_Blocks):
    """A vector with a slice per rank; the inputs run LOOKAHEAD chunks ahead of the results."""

    def __init__(self, total: int, world: int, chunk_length: int) -> None:
        super().__init__(partition(total, world), chunk_length)

    def puts(self, rank: int) -> Iterator[_Put]:
        """What `rank` publishes, in order."""
        world = len(self.counts)
        for chunk in range(self.chunks + LOOKAHEAD):
            if chunk < self.chunks:
                for distance in range(1, world):
                    to = (rank + distance) % world
                    yield _Put(chunk, to, self.piece(Buffer.INPUT, to, chunk).length)
            if chunk >= LOOKAHEAD:
                done = chunk - LOOKAHEAD
                yield _Put(done, -1, self.piece(Buffer.INPUT, rank, done).length)


def _fold(builder: PlanBuilder, piece: Slice, item: int, rank: int, ranks: int) -> None:
    """Fold item `item` of the first `ranks` ranks into `piece`, which holds our own, published as that item as well."""
    if rank > 1:
        builder.fetch(0, item, 0, piece)
    for peer in range(1 if rank > 1 else 0, ranks):
        if peer != rank or rank > 1:
            builder.fetch_reduce(peer, item, 0, piece, item_left=peer < rank <= 1)


def _fold_in_place(builder: PlanBuilder, own: Slice, rank: int, items: list[int | None]) -> None:
    """Fold the others' items with `own` in it: each element is reduced here alone, so the order is ours."""
    world = len(items)
    for distance in range(1, world):
        peer = (rank + distance) % world
        item = items[peer]
        if item is not None:
            builder.fetch_reduce(peer, item, 0, own, item_left=False)


def _fold_input(builder: PlanBuilder, own: Slice, target: Slice, rank: int, items: list[tuple[int, int]]) -> None:
    """Fold the items of all ranks and `own` into `target`, in rank order."""
    for peer, item in items:
        if peer == 0:
            if rank == 0:
                builder.copy(own, target)
            else:
                builder.fetch(0, item, 0, target)
        elif peer == rank:
            builder.reduce(own, target, source_left=False)
        else:
            builder.fetch_reduce(peer, item, 0, target, item_left=False)
