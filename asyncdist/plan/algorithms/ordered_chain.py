"""Ordered chain: reduce of large vectors in rank order, for operations that do not commute.

Two lines of ranks meet at the root: 0, 1, ... from below and p-1, p-2, ... from above. Each rank puts its operand on
the inner side of what it received and passes that on, chunk by chunk, so that all links are busy at once. With root q
and k chunks: (max(q, p-1-q) - 1 + k)(a + (b + g)m/k). Every rank but the root sends m bytes; the root receives 2m, or m
at an end of the line, where this is `chain`.

Source: the pipeline of `chain`, cut at the root instead of bent around rank p-1.
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms.algorithm import ROUNDS_OF_VECTORS, Algorithm
from asyncdist.plan.algorithms.chain import chain_cost
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import split
from asyncdist.plan.cost.load import Load, Shape, Work, cold
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["ALGORITHMS", "reduce"]


def reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Pass partial sums of `chunk_length` elements toward the root; INPUT is only read."""
    rank, world, root = builder.rank, problem.world, problem.root
    pieces = split(Slice(Buffer.INPUT, 0, problem.total), chunk_length)
    if rank == root:
        _receive_both(builder, pieces, root)
        return builder.build(ordered=True)
    below = rank < root
    inward, outward = (rank + 1, rank - 1) if below else (rank - 1, rank + 1)
    inner = 0 <= outward < world
    targets = builder.turns(pieces) if inner else pieces
    for piece, target in zip(pieces, targets, strict=True):
        if inner:
            builder.recv(outward, target)
            builder.reduce(piece, target, source_left=not below)
        builder.send(inward, target)
    return builder.build(ordered=True)


def _receive_both(builder: PlanBuilder, pieces: tuple[Slice, ...], root: int) -> None:
    """The root: what comes from below, its own, what comes from above."""
    above = root + 1 < builder.world
    window = builder.window()
    for piece in pieces:
        result = Slice(Buffer.OUTPUT, piece.offset, piece.length)
        if root:
            builder.recv(root - 1, result)
            builder.reduce(piece, result, source_left=False)
            if above:
                window.add(builder.recv_reduce(root + 1, result, incoming_left=False, after=window.after))
        elif above:
            builder.recv(root + 1, result)
            builder.reduce(piece, result, source_left=True)
        else:
            builder.copy(piece, result)


def _reduce_cost(shape: Shape) -> Load:
    """Two chains to the root, which receives from both; an end of the line has one."""
    below, above = shape.root, shape.world - 1 - shape.root
    load = chain_cost(shape, max(below, above), reduces=True)
    if not below or not above:
        return load
    pieces = shape.pieces(shape.total)
    moved = 2 * shape.total
    worked = cold(moved, shape.total / pieces)
    hop = load.path[0]
    path = (hop._replace(nbytes=hop.nbytes + (pieces - 1) * shape.total / pieces),)
    everyone = Work(*(each * (below + above) / max(below, above) for each in load.everyone))
    return load._replace(path=path, busiest=Work(2 * pieces, 0, moved, worked), everyone=everyone)


ALGORITHMS: Final = (
    Algorithm("reduce", "ordered_chain", reduce, _reduce_cost, growth=ROUNDS_OF_VECTORS, ordered=True),
)
