"""Pipelined chains: broadcast and reduce of large vectors in small worlds.

Ranks stand in a line that starts at the root. Each chunk is passed on as soon as it has arrived, so that all links are
busy at once. With k chunks: (p - 2 + k)(a + mb/k), near mb for large m; every rank but the last sends m bytes.
broadcast goes down the line. reduce comes up the line: each rank puts its own operand on the left of what it received.

`ordered_chain` reduces in rank order, for operations that do not commute. Two lines of ranks meet at the root: 0, 1,
... from below and p-1, p-2, ... from above. Each rank puts its operand on the inner side of what it received. With root
q: (max(q, p-1-q) - 1 + k)(a + (b + g)m/k). Every rank but the root sends m bytes; the root receives 2m, or m at an end
of the line.

Source: the pipeline algorithms in Pješivac-Grbović, Angskun, Bosilca et al., "Performance analysis of MPI collective
operations", Cluster Computing 10(2), 2007.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from asyncdist.plan.algorithms.algorithm import ROUNDS_OF_VECTORS, Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import split
from asyncdist.plan.cost.load import Hop, Load, Shape, Work, cold
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["chain_cost"]


def broadcast(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Pass chunks of `chunk_length` elements down the line."""
    rank, world = builder.rank, problem.world
    position = (rank - problem.root) % world
    window = builder.window()
    for piece in split(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length):
        if position:
            window.add(builder.recv((rank - 1) % world, piece, after=window.after))
        if position < world - 1:
            builder.send((rank + 1) % world, piece)
    return builder.build()


def reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Pass partial sums of `chunk_length` elements up the line; INPUT is only read.

    An inner rank holds a window of partial sums: received, reduced, sent, and one on its way.
    """
    rank, world = builder.rank, problem.world
    position = (rank - problem.root) % world
    nearer, farther = (rank - 1) % world, (rank + 1) % world
    pieces = split(Slice(Buffer.INPUT, 0, problem.total), chunk_length)
    inner = 0 < position < world - 1
    results = [Slice(Buffer.OUTPUT, piece.offset, piece.length) for piece in pieces]
    window = builder.window()
    for piece, target in zip(pieces, builder.turns(pieces) if inner else results, strict=True):
        if position == world - 1 and position:
            builder.send(nearer, piece)
            continue
        if world == 1:
            builder.copy(piece, target)
            continue
        window.add(builder.recv(farther, target, after=window.after))
        builder.reduce(piece, target, source_left=True)
        if inner:
            builder.send(nearer, target)
    return builder.build(ordered=problem.root == 0)


def chain_cost(shape: Shape, *, reduces: bool = False, hops: int | None = None) -> Load:
    """Return what chunks ask that follow each other over `hops`, by default over all ranks.

    A reduction has an operand at each hop; so have scan and exscan, with results on the way.
    """
    hops = shape.world - 1 if hops is None else hops
    total, way = shape.total, shape.neighbors()
    pieces = shape.pieces(total)
    chunk = total / pieces
    worked = cold(chunk, chunk) if reduces else 0.0
    path = Hop(hops, (hops + pieces - 1) * chunk, hops * worked, way)
    idle = Hop(hops, (hops - 1) * chunk, (hops - 1) * worked, way)
    inner = min(2, hops)
    busiest = Work(inner * pieces, total, total if inner > 1 else 0.0, pieces * worked)
    everyone = Work(2 * hops * pieces, hops * total, hops * total, hops * pieces * worked)
    return Load((path,), (idle,), busiest, everyone, way.leaving * total)


def ordered_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
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


def _ordered_reduce_cost(shape: Shape) -> Load:
    """Two chains to the root, which receives from both; an end of the line has one."""
    below, above = shape.root, shape.world - 1 - shape.root
    load = chain_cost(shape, reduces=True, hops=max(below, above))
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
    Algorithm("broadcast", "chain", broadcast, chain_cost, ROUNDS_OF_VECTORS),
    Algorithm("reduce", "chain", reduce, partial(chain_cost, reduces=True), ROUNDS_OF_VECTORS),
    Algorithm("reduce", "ordered_chain", ordered_reduce, _ordered_reduce_cost, ROUNDS_OF_VECTORS, ordered=True),
)
