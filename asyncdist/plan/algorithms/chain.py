"""Pipelined chains: broadcast and reduce of large vectors in small worlds.

Ranks stand in a line that starts at the root. Each chunk is passed on as soon as it has arrived, so that all links are
busy at once. With k chunks: (p - 2 + k)(a + mb/k), near mb for large m; every rank but the last sends m bytes.

broadcast goes down the line; reduce comes up it, each rank putting its own operand on the left of what it received.

Source: the pipeline algorithms in Pješivac-Grbović, Angskun, Bosilca et al., "Performance analysis of MPI collective
operations", Cluster Computing 10(2), 2007.
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms.algorithm import ROUNDS_OF_VECTORS, Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import split
from asyncdist.plan.cost.load import Hop, Load, Shape, Work, cold
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["ALGORITHMS", "broadcast", "chain_cost", "reduce", "reduce_cost"]


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


def _broadcast_cost(shape: Shape) -> Load:
    """p-1 hops of a chunk, and the other chunks behind it."""
    return chain_cost(shape, shape.world - 1, reduces=False)


def reduce_cost(shape: Shape) -> Load:
    """The same upward, with a reduction at each hop; scan and exscan do the same with results on the way."""
    return chain_cost(shape, shape.world - 1, reduces=True)


def chain_cost(shape: Shape, hops: int, *, reduces: bool) -> Load:
    """Return what chunks that follow each other over so many `hops` ask."""
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


ALGORITHMS: Final = (
    Algorithm("broadcast", "chain", broadcast, _broadcast_cost, growth=ROUNDS_OF_VECTORS),
    Algorithm("reduce", "chain", reduce, reduce_cost, growth=ROUNDS_OF_VECTORS),
)
