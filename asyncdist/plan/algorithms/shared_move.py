"""Moving data through memory that all ranks of a group share: publish once, and everyone copies what it is to have.

Two copies of every byte, one in and one out, however many ranks read it; chunks follow each other, so that one rank
copies in while another copies out. With p ranks, a vector of m bytes and b seconds per byte copied:

| collective | copied in per rank | copied out per rank |
| --- | --- | --- |
| broadcast | m on the root | m elsewhere |
| all_gather | m/p | m |
| gather, gather_uneven | m/p | m on the root |
| scatter, scatter_uneven | m on the root | m/p |
| all_to_all | m | m |
| all_to_all_uneven | m, what it sends | m, what it receives |
| barrier | - | - |

In the uneven forms a rank knows its own lengths only. Each piece is one item there, even an empty one. So a reader
finds a piece by its number whatever the lengths of the others, and sees at once if the two ends mean different lengths.
Uneven pieces are not cut into chunks. The executor sends a piece that is too long for one copy as a message, which is
cut; an array that the other ranks can read in place is not copied in. A rank whose pieces are short altogether
publishes them as one payload with a table of the pieces, where the others find them by the numbers of their items.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from asyncdist.plan.algorithms.algorithm import Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Chunks, blocks_of
from asyncdist.plan.cost.load import Shape, SharedLoad, SharedWork, from_root, in_records, to_root
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import NO_LANE, Takes, by_records, pieces_bytes
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = []


def broadcast(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """The root publishes chunk after chunk, the others copy them."""
    rank = builder.rank
    chunks = Chunks(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length)
    for item in builder.rounds(len(chunks), chunks.alike):
        if rank != problem.root:
            builder.fetch(problem.root, item, 0, chunks[item])
        elif problem.world > 1:
            builder.publish(chunks[item], shielded=True)
    return builder.build()


def all_gather(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone publishes its block, and copies the others'."""
    rank, world = builder.rank, problem.world
    blocks = _blocks(Buffer.OUTPUT, problem.counts, chunk_length)
    own = Chunks(Slice(Buffer.INPUT, 0, problem.counts[rank]), chunk_length)
    for chunk in builder.rounds(max(map(len, blocks)), _alike(blocks)):
        if chunk < len(own):
            if world > 1:
                builder.publish(own[chunk], shielded=True)
            builder.copy(own[chunk], blocks[rank][chunk])
        for distance in range(1, world):
            peer = (rank + distance) % world
            if chunk < len(blocks[peer]):
                builder.fetch(peer, chunk, 0, blocks[peer][chunk])
    return builder.build(block_aligned=True)


def gather(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone but the root publishes its block, the root copies them."""
    rank = builder.rank
    blocks = _blocks(Buffer.OUTPUT, problem.counts, chunk_length)
    own = Chunks(Slice(Buffer.INPUT, 0, problem.counts[rank]), chunk_length)
    if rank != problem.root:
        for chunk in builder.rounds(len(own), own.alike):
            builder.publish(own[chunk], shielded=True)
        return builder.build(block_aligned=True)
    for chunk in builder.rounds(max(map(len, blocks)), _alike(blocks)):
        if chunk < len(own):
            builder.copy(own[chunk], blocks[rank][chunk])
        for peer, block in enumerate(blocks):
            if peer != rank and chunk < len(block):
                builder.fetch(peer, chunk, 0, block[chunk])
    return builder.build(block_aligned=True)


def scatter(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """The root publishes the others' blocks, a chunk of each in turn; each copies its own."""
    rank = builder.rank
    root = problem.root
    blocks = _blocks(Buffer.INPUT, problem.counts, chunk_length)
    own = Chunks(Slice(Buffer.OUTPUT, 0, problem.counts[rank]), chunk_length)
    others = [blocks[(root + distance) % problem.world] for distance in range(1, problem.world)]
    for chunk in builder.rounds(max(map(len, blocks)), _alike(blocks)):
        item = sum(min(chunk, len(block)) for block in others)
        for distance in range(1, problem.world):
            peer = (root + distance) % problem.world
            if chunk < len(blocks[peer]):
                if rank == root:
                    builder.publish(blocks[peer][chunk], shielded=True)
                elif rank == peer:
                    builder.fetch(root, item, 0, own[chunk])
                item += 1
        if rank == root and chunk < len(own):
            builder.copy(blocks[rank][chunk], own[chunk])
    return builder.build(block_aligned=True)


def all_to_all(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone publishes the others' blocks, a chunk of each in turn, and copies those meant for it."""
    rank, world = builder.rank, problem.world
    counts = problem.counts * world
    sources = _blocks(Buffer.INPUT, counts, chunk_length)
    targets = _blocks(Buffer.OUTPUT, counts, chunk_length)
    for chunk in builder.rounds(len(sources[0]), sources[0].alike):
        for distance in range(1, world):
            builder.publish(sources[(rank + distance) % world][chunk], shielded=True)
        builder.copy(sources[rank][chunk], targets[rank][chunk])
        for distance in range(1, world):
            peer = (rank - distance) % world
            builder.fetch(peer, chunk * (world - 1) + distance - 1, 0, targets[peer][chunk])
    return builder.build(block_aligned=True)


def barrier(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone says that it is here, and waits until all have."""
    rank = builder.rank
    if problem.world > 1:
        builder.announce()
    for distance in range(1, problem.world):
        builder.await_item((rank + distance) % problem.world, 0)
    return builder.build()


def _blocks(buffer: Buffer, counts: tuple[int, ...], chunk_length: int) -> list[Chunks]:
    return [Chunks(block, chunk_length) for block in blocks_of(buffer, counts)]


def _alike(blocks: Sequence[Chunks]) -> range:
    """Chunks that are of the full length in every block that has any."""
    return min((block.alike for block in blocks if len(block)), key=len, default=range(0))


def all_to_all_uneven(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone publishes a piece for each of the others, that for the next rank first, and copies those for it."""
    rank, world = builder.rank, problem.world
    sources = blocks_of(Buffer.INPUT, problem.send_counts)
    targets = blocks_of(Buffer.OUTPUT, problem.receive_counts)
    for distance in range(1, world):
        reader = (rank + distance) % world
        _publish(builder, sources[reader], reader)
    for distance in range(1, world):
        peer = (rank - distance) % world
        _fetch(builder, peer, distance - 1, targets[peer])
    builder.copy(sources[rank], targets[rank])
    return builder.build(block_aligned=True)


def gather_uneven(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Everyone but the root publishes its piece, the root copies them."""
    rank = builder.rank
    own, root = Slice(Buffer.INPUT, 0, problem.counts[rank]), problem.root
    if rank != root:
        _publish(builder, own, root)
        return builder.build(block_aligned=True)
    targets = blocks_of(Buffer.OUTPUT, problem.counts)
    for distance in range(1, problem.world):
        peer = (root + distance) % problem.world
        _fetch(builder, peer, 0, targets[peer])
    builder.copy(own, targets[root])
    return builder.build(block_aligned=True)


def scatter_uneven(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """The root publishes the other ranks' pieces, the next rank's first; each rank copies its own."""
    rank = builder.rank
    own, root = Slice(Buffer.OUTPUT, 0, problem.counts[rank]), problem.root
    if rank != root:
        _fetch(builder, root, (rank - root) % problem.world - 1, own)
        return builder.build(block_aligned=True)
    sources = blocks_of(Buffer.INPUT, problem.counts)
    for distance in range(1, problem.world):
        reader = (root + distance) % problem.world
        _publish(builder, sources[reader], reader)
    builder.copy(sources[root], own)
    return builder.build(block_aligned=True)


def _publish(builder: PlanBuilder, piece: Slice, reader: int) -> None:
    if piece.length:
        builder.publish(piece, shielded=True, reader=reader)
    else:
        builder.announce(reader=reader)


def _fetch(builder: PlanBuilder, peer: int, item: int, target: Slice) -> None:
    if target.length:
        builder.fetch(peer, item, 0, target)
    else:
        builder.await_item(peer, item)


def _broadcast_cost(shape: Shape) -> SharedLoad:
    """The root publishes chunks, which the others copy while it publishes more; the last one remains."""
    if by_records(Takes.ONE, shape.world, shape.total, shape.memory):
        return from_root(shape, shape.total, shape.total)
    pieces = shape.pieces(shape.total)
    root, other = SharedWork(pieces, shape.total, lent=shape.total), SharedWork(pieces, shape.total)
    path, everyone = other.plus(root, 1 / pieces), root.plus(other, shape.world - 1)
    return SharedLoad(1, path, everyone, shape.total, lent_item=shape.total / pieces)


def _all_gather_cost(shape: Shape) -> SharedLoad:
    """Everyone publishes its block, and copies all of them, its own included."""
    if by_records(Takes.ALL, shape.world, shape.block, shape.memory):
        return in_records(shape, shape.block, copied=shape.block * shape.world)
    block, pieces, blocks = shape.block, shape.pieces(shape.block), shape.full(shape.world)
    work = SharedWork(pieces * blocks, block * (blocks + 1), lent=block, local=block)
    return SharedLoad(1, work, SharedWork(0).plus(work, shape.world), block, lent_item=block / pieces)


def _gather_cost(shape: Shape) -> SharedLoad:
    """Everyone publishes its block, the root copies all."""
    if by_records(Takes.ALL, shape.world, shape.block, shape.memory):
        return to_root(shape, shape.block, copied=shape.block * shape.world)
    block, pieces = shape.block, shape.pieces(shape.block)
    one = SharedWork(pieces, block, lent=block)
    root = SharedWork(0, block, local=block).plus(SharedWork(pieces, block), shape.world - 1)
    path, everyone = root.plus(one, 1 / pieces), root.plus(one, shape.world - 1)
    return SharedLoad(1, path, everyone, block, lent_item=block / pieces)


def _scatter_cost(shape: Shape) -> SharedLoad:
    """The same the other way round."""
    if by_records(Takes.ONE, shape.world, shape.total, shape.memory):
        return from_root(shape, shape.total, shape.block)
    block, pieces, others = shape.block, shape.pieces(shape.block), shape.world - 1
    one = SharedWork(pieces, block)
    root = SharedWork(0, block, local=block).plus(SharedWork(pieces, block, lent=block), others)
    return SharedLoad(1, root.plus(one, 1 / pieces), root.plus(one, others), block * others, lent_item=block / pieces)


def _all_to_all_cost(shape: Shape) -> SharedLoad:
    """Everyone publishes the others' blocks and copies those for it; its own it copies once."""
    if by_records(Takes.ONE, shape.world, shape.total, shape.memory):
        return in_records(shape, shape.total, copied=shape.total)
    others, block, pieces = shape.world - 1, shape.block, shape.pieces(shape.block)
    work = SharedWork(pieces * 2 * others, block * (2 * others + 1), lent=block * others, local=block)
    return SharedLoad(1, work, SharedWork(0).plus(work, shape.world), block * others, lent_item=block / pieces)


def _all_to_all_uneven_cost(shape: Shape) -> SharedLoad:
    """As of even pieces, but that none is cut."""
    return _all_to_all_cost(_whole(shape, shape.total))


def _gather_uneven_cost(shape: Shape) -> SharedLoad:
    """As of even pieces, but that none is cut."""
    return _gather_cost(_whole(shape, shape.block))


def _scatter_uneven_cost(shape: Shape) -> SharedLoad:
    """As of even pieces, but that none is cut."""
    return _scatter_cost(_whole(shape, shape.total))


def _whole(shape: Shape, given: float) -> Shape:
    """The shape of a collective whose pieces are not cut; inline if members that give all give so few bytes."""
    memory = shape.memory if given <= pieces_bytes(shape.world, shape.memory) else NO_LANE
    return shape._replace(chunk=max(1.0, shape.block), memory=memory)


ALGORITHMS: Final = (
    Algorithm("broadcast", "shared", broadcast, _broadcast_cost, shared=True, records=Takes.ONE),
    Algorithm("all_gather", "shared", all_gather, _all_gather_cost, shared=True, records=Takes.ALL),
    Algorithm("gather", "shared", gather, _gather_cost, shared=True, records=Takes.ALL),
    Algorithm("scatter", "shared", scatter, _scatter_cost, shared=True, records=Takes.ONE),
    Algorithm("all_to_all", "shared", all_to_all, _all_to_all_cost, shared=True, records=Takes.ONE),
    Algorithm(
        "barrier", "shared", barrier, partial(in_records, payload=0.0), shared=True, chunked=False, records=Takes.ONE
    ),
    Algorithm("all_to_all_uneven", "shared", all_to_all_uneven, _all_to_all_uneven_cost, shared=True, chunked=False),
    Algorithm("gather_uneven", "shared", gather_uneven, _gather_uneven_cost, shared=True, chunked=False),
    Algorithm("scatter_uneven", "shared", scatter_uneven, _scatter_uneven_cost, shared=True, chunked=False),
)
