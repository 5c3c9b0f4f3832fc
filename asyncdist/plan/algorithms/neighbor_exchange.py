"""Neighbor exchange: all_gather in p/2 rounds among neighbors of a ring, for an even p.

Ranks exchange with the neighbor on one side, then with the one on the other, and so on, each time the two blocks they
received last (in the first round their own). Cost: (p/2) a + mb(p-1)/p with m bytes in all, latency a, b seconds per
byte; each rank sends m(p-1)/p bytes. That is half the rounds of a ring with as short ways.

An odd p has no such pairs: it is served by the plain ring.

Source: Chen, Zhang, Zhang and Zhang, "Performance evaluation of allgather algorithms on terascale Linux cluster with
fast Ethernet", HPC Asia 2005.
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms import ring
from asyncdist.plan.algorithms.algorithm import ROUNDS_OF_BLOCKS, Algorithm
from asyncdist.plan.algorithms.ring import all_gather_cost as ring_cost
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import blocks_of, split
from asyncdist.plan.cost.load import Hop, Load, Shape, Work, alike
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["ALGORITHMS", "all_gather"]


def all_gather(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Exchange pairs of blocks with either neighbor in turn, in chunks of `chunk_length` elements."""
    rank, world = builder.rank, problem.world
    if world % 2:
        return ring.all_gather(builder, problem, chunk_length)
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


def _all_gather_cost(shape: Shape) -> Load:
    """p/2 rounds: a block, then two at a time; an odd p is served by the ring."""
    if shape.world % 2:
        return ring_cost(shape)
    rounds, pieces, way = shape.world // 2, shape.pieces(shape.block), shape.neighbors()
    blocks = 1 + shape.full(shape.world - 2)  # the own one is sent to both sides
    moved = blocks * shape.block
    work = Work(2 * blocks * pieces, moved, moved)
    idle = (Hop(1 if pieces > 1 else rounds, 0, 0, way),)
    return alike(shape, (Hop(rounds, moved, 0, way),), idle, work, way)


ALGORITHMS: Final = (
    Algorithm("all_gather", "neighbor_exchange", all_gather, _all_gather_cost, growth=ROUNDS_OF_BLOCKS),
)
