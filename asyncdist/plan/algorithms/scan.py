"""Prefix reductions: scan (ranks 0 .. r) and exscan (ranks 0 .. r-1), in place and in rank order.

| algorithm | rounds | cost | bytes sent per rank, at most |
| --- | --- | --- | --- |
| recursive_doubling | ceil(log2 p) | ceil(log2 p) (a + mb + mg) | m ceil(log2 p) |
| chain, k chunks | p - 2 + k | (p - 2 + k)(a + (b + g)m/k) | m |

recursive_doubling: in round k a rank that holds the reduction of the 2^k ranks up to itself sends it 2^k ranks up, and
puts what comes from 2^k ranks down to the left of its own. exscan keeps beside it the same without its own operand.

chain: each chunk goes along the ranks, which each add their operand on the right; all links are busy at once.

Sources: Hillis and Steele, "Data parallel algorithms", Communications of the ACM 29(12), 1986; Sanders and Träff,
"Parallel prefix (scan) algorithms for MPI", EuroPVM/MPI 2006.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Final

from asyncdist.plan.algorithms.algorithm import DOUBLING, ROUNDS_OF_VECTORS, Algorithm
from asyncdist.plan.algorithms.chain import chain_cost
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import split
from asyncdist.plan.cost.load import Load, Round, Shape, Work, in_rounds
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = []


def doubling(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Pass whole vectors up twice as far each round.

    Each round receives into SCRATCH of its own, so that all receives are posted at the start. What is sent on is in
    OUTPUT; of exscan the result is in SCRATCH until the end, and a last round's vector is not added to OUTPUT.
    """
    rank, world, exclusive = builder.rank, problem.world, problem.collective == "exscan"
    whole = Slice(Buffer.OUTPUT, 0, problem.total)
    result: Slice | None = None
    distance = 1
    while distance < world:
        if rank + distance < world:
            builder.send(rank + distance, whole)
        if rank >= distance:
            incoming = builder.scratch(problem.total)
            builder.recv(rank - distance, incoming)
            if not exclusive or rank + 2 * distance < world:
                builder.reduce(incoming, whole, source_left=True)
            if exclusive and result is not None:
                builder.reduce(incoming, result, source_left=True)
            result = result or incoming
        distance *= 2
    if exclusive and result is not None:
        builder.copy(result, whole)
    return builder.build(ordered=True)


def scan_chain(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Pass chunks of `chunk_length` elements from rank to rank."""
    rank = builder.rank
    window = builder.window()
    for piece in split(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length):
        if rank:
            window.add(builder.recv_reduce(rank - 1, piece, incoming_left=True, after=window.after))
        if rank + 1 < problem.world:
            builder.send(rank + 1, piece)
    return builder.build(ordered=True)


def exscan_chain(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """As `scan_chain`; what came takes the operand's place once the operand has been sent on with it."""
    rank, world = builder.rank, problem.world
    pieces = split(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length)
    inner = 0 < rank < world - 1
    prefixes = builder.turns(pieces) if inner else pieces
    for piece, prefix in zip(pieces, prefixes, strict=True):
        if inner:
            builder.recv(rank - 1, prefix)
            builder.reduce(prefix, piece, source_left=True)
            builder.send(rank + 1, piece)
            builder.copy(prefix, piece)
        elif rank:
            builder.recv(rank - 1, piece)
        elif world > 1:
            builder.send(rank + 1, piece)
    return builder.build(ordered=True)


def _doubling_cost(shape: Shape) -> Load:
    """L rounds of whole vectors to ranks twice as far; the rank that does most sends in all and receives in all."""
    # Where p is no power of two, no operand passes through as many ranks as there are rounds.
    rounds = [
        Round(shape.total, shape.ahead(1 << bit), True, latencies=min(1, shape.depth - bit))
        for bit in range(shape.levels)
    ]
    load = in_rounds(shape, rounds)
    sending = math.fsum(shape.world - (1 << bit) for bit in range(shape.levels)) / (shape.world * shape.levels)
    everyone = Work(*(sending * each for each in load.everyone))
    return load._replace(everyone=everyone, scratch=shape.levels * shape.total)


ALGORITHMS: Final = (
    Algorithm("scan", "recursive_doubling", doubling, _doubling_cost, DOUBLING, ordered=True, chunked=False),
    Algorithm("scan", "chain", scan_chain, partial(chain_cost, reduces=True), ROUNDS_OF_VECTORS, ordered=True),
    Algorithm("exscan", "recursive_doubling", doubling, _doubling_cost, DOUBLING, ordered=True, chunked=False),
    Algorithm("exscan", "chain", exscan_chain, partial(chain_cost, reduces=True), ROUNDS_OF_VECTORS, ordered=True),
)
