"""Recursive doubling: all_reduce in ceil(log2 p) rounds, for vectors whose latency outweighs their bytes.

In round k, ranks that differ in bit k exchange everything they have and reduce it. Cost with p = 2^k ranks, m bytes,
latency a, b seconds per byte sent and g per byte reduced: log2(p) (a + mb + mg); each rank sends m log2(p) bytes.

Where p is no power of two, p - 2^k ranks are folded: pairs of neighbors at the low end become one, whose upper half
waits for the result; 2(a + mb) + mg more. The lower rank's operand is always on the left and merged ranks are adjacent,
so that all ranks evaluate one and the same expression, in rank order: results are bit-identical.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", International
Journal of High Performance Computing Applications 19(1), 2005.
"""

from __future__ import annotations

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["all_reduce"]


def all_reduce(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Exchange and reduce whole vectors; `chunk_length` is not used.

    Each round receives into SCRATCH of its own: no receive waits for anything, so all are posted at the start. A
    receive into OUTPUT would have to wait for the send of OUTPUT to be done, on both sides: a deadlock when the
    message is too large to be buffered.
    """
    del chunk_length
    world = problem.world
    whole = Slice(Buffer.OUTPUT, 0, problem.total)
    builder = PlanBuilder("all_reduce", "recursive_doubling", rank, world)
    active = 1 << (world.bit_length() - 1)
    folded = 2 * (world - active)
    if rank < folded and rank % 2:
        builder.send(rank - 1, whole)
        builder.recv(rank - 1, whole)
        return builder.build()
    if rank < folded:
        builder.recv_reduce(rank + 1, whole, incoming_left=False)
    position = rank // 2 if rank < folded else rank - folded // 2
    distance = 1
    while distance < active:
        other = position ^ distance
        partner = 2 * other if other < folded // 2 else other + folded // 2
        builder.send(partner, whole)
        incoming = builder.scratch(problem.total)
        builder.recv(partner, incoming)
        builder.reduce(incoming, whole, source_left=partner < rank)
        distance *= 2
    if rank < folded:
        builder.send(rank + 1, whole)
    return builder.build()
