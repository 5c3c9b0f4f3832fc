"""Ring algorithms: every rank talks to its two neighbors only, and moves no byte more than it must.

With p ranks, a vector of m bytes, latency a per message and b seconds per byte:

| algorithm | collective | rounds | bytes sent per rank | cost |
| --- | --- | --- | --- | --- |
| ring | all_reduce | 2(p-1) | 2m(p-1)/p | 2(p-1)a + 2mb(p-1)/p |
| ring | reduce_scatter, all_gather | p-1 | m(p-1)/p | (p-1)a + mb(p-1)/p |
| neighbor_exchange | all_gather | p/2 | m(p-1)/p | (p/2)a + mb(p-1)/p |

Blocks are cut into chunks that travel one behind another. So a chunk is reduced while the next one is on the wire, and
a rank passes the head of a block on before the tail has come. Blocks are reduced in the order of the ring, each from
another rank on, so operations must commute. Each element is reduced along one path: all ranks end with the same bits.

`neighbor_exchange` exchanges with the neighbor on one side, then with the one on the other side, and so on: each time
the two blocks that came last, in the first round the own block. An odd p has no such pairs and is served by the ring.

Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel
and Distributed Computing 69(2), 2009; Chen, Zhang, Zhang and Zhang, "Performance evaluation of allgather algorithms on
terascale Linux cluster with fast Ethernet", HPC Asia 2005.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from asyncdist.plan.algorithms.algorithm import ROUNDS_OF_BLOCKS, Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import blocks_of, partition, split
from asyncdist.plan.cost.load import Hop, Load, Shape, Work, alike, cold
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice, Symmetry

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]

SCRATCH_BLOCKS: Final = 2
"""reduce_scatter's partial sums: one block is received while the one before is sent. With a single one every rank
would wait for its right neighbor around the ring."""


def all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Reduce each block around the ring onto one rank, then pass the results around."""
    rank, world = builder.rank, problem.world
    counts = partition(problem.total, world)
    blocks = _blocks(Buffer.OUTPUT, counts, chunk_length)
    right, left = (rank + 1) % world, (rank - 1) % world
    operands, results = builder.window(), builder.window()
    for step in range(world - 1):
        builder.send_all(right, blocks[(rank - step) % world])
        builder.recv_reduce_all(left, blocks[(rank - step - 1) % world], operands, incoming_left=True)
    for step in range(world - 1):
        builder.send_all(right, blocks[(rank + 1 - step) % world])
        builder.recv_all(left, blocks[(rank - step) % world], results)
    return builder.build(symmetry=_symmetry(counts))


def reduce_scatter(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Reduce block b along ranks b+1, b+2, ..., b; INPUT is only read, partial sums are in SCRATCH."""
    rank, world = builder.rank, problem.world
    blocks = _blocks(Buffer.INPUT, problem.counts, chunk_length)
    right, left = (rank + 1) % world, (rank - 1) % world
    if world == 1:
        for piece in blocks[0]:
            builder.copy(piece, Slice(Buffer.OUTPUT, piece.offset, piece.length))
        return builder.build(symmetry=_symmetry(problem.counts), block_aligned=True)
    longest = max(problem.counts)
    partial = [builder.scratch(longest) for _ in range(min(SCRATCH_BLOCKS, world - 2))]
    window = builder.window()
    outgoing = blocks[left]
    for step in range(world - 1):
        builder.send_all(right, outgoing)
        last = step == world - 2
        base = Slice(Buffer.OUTPUT, 0, problem.counts[rank]) if last else partial[step % SCRATCH_BLOCKS]
        own = blocks[(rank - 2 - step) % world]
        incoming = split(Slice(base.buffer, base.offset, sum(piece.length for piece in own)), chunk_length)
        builder.recv_all(left, incoming, window)
        for piece, target in zip(own, incoming, strict=True):
            builder.reduce(piece, target, source_left=False)
        outgoing = incoming
    return builder.build(symmetry=_symmetry(problem.counts), block_aligned=True)


def all_gather(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Pass every block around the ring; the own one is sent from INPUT, so that nothing waits for its copy."""
    rank, world = builder.rank, problem.world
    blocks = _blocks(Buffer.OUTPUT, problem.counts, chunk_length)
    own = split(Slice(Buffer.INPUT, 0, problem.counts[rank]), chunk_length)
    right, left = (rank + 1) % world, (rank - 1) % world
    window = builder.window()
    for step in range(world - 1):
        builder.send_all(right, blocks[(rank - step) % world] if step else own)
        builder.recv_all(left, blocks[(rank - step - 1) % world], window)
    for source, target in zip(own, blocks[rank], strict=True):
        builder.copy(source, target)
    return builder.build(symmetry=_symmetry(problem.counts), block_aligned=True)


def _blocks(buffer: Buffer, counts: tuple[int, ...], chunk_length: int) -> list[tuple[Slice, ...]]:
    return [split(block, chunk_length) for block in blocks_of(buffer, counts)]


def _symmetry(counts: tuple[int, ...]) -> Symmetry:
    return Symmetry.ROTATION if min(counts) == max(counts) else Symmetry.NONE


def _all_reduce_cost(shape: Shape) -> Load:
    """2(p-1) steps of a block in chunks: with several, the next step's first chunk is on its way before the last."""
    steps, pieces, way = 2 * (shape.world - 1), shape.pieces(shape.block), shape.neighbors()
    chunk = shape.block / pieces
    path = (Hop(steps, (steps + pieces - 1) * chunk, steps / 2 * cold(chunk, chunk), way),)
    moved = steps * shape.block
    work = Work(2 * steps * pieces, moved, moved, cold(moved / 2, chunk))
    return alike(shape, path, (Hop(1 if pieces > 1 else steps, 0, 0, way),), work, way)


def _one_way_cost(shape: Shape, *, reduces: bool = False) -> Load:
    steps, pieces, way = shape.world - 1, shape.pieces(shape.block), shape.neighbors()
    chunk = shape.block / pieces
    worked = cold(chunk, chunk) if reduces else 0.0
    path = Hop(steps, (steps + pieces - 1) * chunk, steps * worked, way)
    blocks = shape.full(steps)
    moved = blocks * shape.block
    work = Work(2 * blocks * pieces, moved, moved, blocks * pieces * worked)
    load = alike(shape, (path,), (Hop(1 if pieces > 1 else steps, 0, 0, way),), work, way)
    return load._replace(scratch=min(2, shape.world - 2) * shape.block if reduces else 0.0)


def neighbor_exchange(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Exchange pairs of blocks with either neighbor in turn, in chunks of `chunk_length` elements."""
    rank, world = builder.rank, problem.world
    if world % 2:
        return all_gather(builder, problem, chunk_length)
    own = split(Slice(Buffer.INPUT, 0, problem.counts[rank]), chunk_length)
    blocks = [split(block, chunk_length) for block in blocks_of(Buffer.OUTPUT, problem.counts)]
    side = -1 if rank % 2 else 1
    pair, pairs = rank // 2, world // 2  # of blocks 2i and 2i + 1
    held: tuple[int, ...] = (rank,)
    for number in range(pairs):
        peer = (rank + side) % world
        for owner in held:
            builder.send_all(peer, own if owner == rank else blocks[owner])
        distance = (number + 1) // 2  # of the pair that comes, on that side
        other = (pair + side * distance) % pairs
        arriving = (2 * other, 2 * other + 1) if number else (peer,)
        window = builder.window()
        for owner in arriving:
            builder.recv_all(peer, blocks[owner], window)
        held = arriving if number else (2 * pair, 2 * pair + 1)
        side = -side
    for source, target in zip(own, blocks[rank], strict=True):
        builder.copy(source, target)
    return builder.build(block_aligned=True)


def _neighbor_exchange_cost(shape: Shape) -> Load:
    """p/2 rounds: a block, then two at a time; an odd p is served by the ring."""
    if shape.world % 2:
        return _one_way_cost(shape)
    rounds, pieces, way = shape.world // 2, shape.pieces(shape.block), shape.neighbors()
    blocks = 1 + shape.full(shape.world - 2)  # the own one is sent to both sides
    moved = blocks * shape.block
    work = Work(2 * blocks * pieces, moved, moved)
    idle = (Hop(1 if pieces > 1 else rounds, 0, 0, way),)
    return alike(shape, (Hop(rounds, moved, 0, way),), idle, work, way)


ALGORITHMS: Final = (
    Algorithm("all_reduce", "ring", all_reduce, _all_reduce_cost, ROUNDS_OF_BLOCKS),
    Algorithm("all_gather", "ring", all_gather, _one_way_cost, ROUNDS_OF_BLOCKS),
    Algorithm("reduce_scatter", "ring", reduce_scatter, partial(_one_way_cost, reduces=True), ROUNDS_OF_BLOCKS),
    Algorithm("all_gather", "neighbor_exchange", neighbor_exchange, _neighbor_exchange_cost, ROUNDS_OF_BLOCKS),
)
