"""Ring algorithms: every rank talks to its two neighbors only, and moves no byte more than it must.

With p ranks, a vector of m bytes, latency a per message and b seconds per byte:

| collective | rounds | bytes sent per rank | cost |
| --- | --- | --- | --- |
| all_reduce | 2(p-1) | 2m(p-1)/p | 2(p-1)a + 2mb(p-1)/p |
| reduce_scatter | p-1 | m(p-1)/p | (p-1)a + mb(p-1)/p |
| all_gather | p-1 | m(p-1)/p | (p-1)a + mb(p-1)/p |

Blocks are cut into chunks that travel one behind another, so that a chunk is reduced while the next one is on the
wire and a rank passes the head of a block on before its tail has come. The order of reduction is the ring's, rotated by
block, so operations must commute; each element is reduced along one path, so all ranks end with the same bits.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
Parallel and Distributed Computing 69(2), 2009.
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms.algorithm import ROUNDS_OF_BLOCKS, Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import blocks_of, partition, split
from asyncdist.plan.cost.load import Hop, Load, Shape, Work, alike, cold
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice, Symmetry

__all__ = ["ALGORITHMS", "all_gather", "all_gather_cost", "all_reduce", "reduce_scatter"]

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


def all_gather_cost(shape: Shape) -> Load:
    """p-1 steps of a block in chunks."""
    return _one_way_cost(shape, reduces=False)


def _reduce_scatter_cost(shape: Shape) -> Load:
    """p-1 steps of a block in chunks, each reduced while the next is on the wire."""
    return _one_way_cost(shape, reduces=True)


def _one_way_cost(shape: Shape, *, reduces: bool) -> Load:
    steps, pieces, way = shape.world - 1, shape.pieces(shape.block), shape.neighbors()
    chunk = shape.block / pieces
    worked = cold(chunk, chunk) if reduces else 0.0
    path = Hop(steps, (steps + pieces - 1) * chunk, steps * worked, way)
    blocks = shape.full(steps)
    moved = blocks * shape.block
    work = Work(2 * blocks * pieces, moved, moved, blocks * pieces * worked)
    load = alike(shape, (path,), (Hop(1 if pieces > 1 else steps, 0, 0, way),), work, way)
    return load._replace(scratch=min(2, shape.world - 2) * shape.block if reduces else 0.0)


ALGORITHMS: Final = (
    Algorithm("all_reduce", "ring", all_reduce, _all_reduce_cost, growth=ROUNDS_OF_BLOCKS),
    Algorithm("all_gather", "ring", all_gather, all_gather_cost, growth=ROUNDS_OF_BLOCKS),
    Algorithm("reduce_scatter", "ring", reduce_scatter, _reduce_scatter_cost, growth=ROUNDS_OF_BLOCKS),
)
