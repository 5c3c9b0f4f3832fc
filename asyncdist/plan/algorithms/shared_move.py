"""Moving data through memory that all ranks of a group share: publish once, and everyone copies what it is to have.

Two copies of every byte, one in and one out, however many ranks read it; chunks follow each other, so that one rank
copies in while another copies out. With p ranks, a vector of m bytes and b seconds per byte copied:

| collective | copied in per rank | copied out per rank |
| --- | --- | --- |
| broadcast | m on the root | m elsewhere |
| all_gather | m/p | m |
| gather | m/p | m on the root |
| scatter | m on the root | m/p |
| all_to_all | m | m |
| barrier | - | - |
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Chunks, blocks_of
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["all_gather", "all_to_all", "barrier", "broadcast", "gather", "scatter"]


def broadcast(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """The root publishes chunk after chunk, the others copy them."""
    builder = PlanBuilder.of(problem, "shared", rank)
    chunks = Chunks(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length)
    for item in builder.rounds(len(chunks), chunks.alike):
        if rank != problem.root:
            builder.fetch(problem.root, item, 0, chunks[item])
        elif problem.world > 1:
            builder.publish(chunks[item], shielded=True)
    return builder.build()


def all_gather(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone publishes its block, and copies the others'."""
    builder = PlanBuilder.of(problem, "shared", rank)
    world = problem.world
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


def gather(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone but the root publishes its block, the root copies them."""
    builder = PlanBuilder.of(problem, "shared", rank)
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


def scatter(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """The root publishes the others' blocks, a chunk of each in turn; each copies its own."""
    builder = PlanBuilder.of(problem, "shared", rank)
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


def all_to_all(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone publishes the others' blocks, a chunk of each in turn, and copies those meant for it."""
    builder = PlanBuilder.of(problem, "shared", rank)
    world = problem.world
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


def barrier(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone says that it is here, and waits until all have."""
    del chunk_length
    builder = PlanBuilder.of(problem, "shared", rank)
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
