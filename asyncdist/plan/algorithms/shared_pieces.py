"""Moving pieces of which a rank knows only its own lengths, through memory that all ranks of a group share.

Every piece is one item, even if it is empty: so who reads finds it by its number, whatever the lengths of others, and
sees at once if its own is another. With p ranks, a vector of m bytes and b seconds per byte copied:

| collective | copied in per rank | copied out per rank |
| --- | --- | --- |
| all_to_all_uneven | m, what it sends | m, what it receives |
| gather_uneven | m/p | m on the root |
| scatter_uneven | m on the root | m/p |

Nothing is cut into chunks. What is too long to be copied as a whole the executor has travel as a message instead, which
is cut; where the others can read an array where it lies, nothing is copied in. What is short altogether it puts out as
one, with a table of the pieces, which others find there by the numbers of these items (`Lane.piece`).
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms.algorithm import Algorithm
from asyncdist.plan.algorithms.shared_move import all_to_all_cost, gather_cost, scatter_cost
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import blocks_of
from asyncdist.plan.cost.load import Shape
from asyncdist.plan.cost.shared_load import SharedLoad
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import NO_LANE, pieces_bytes
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["ALGORITHMS", "all_to_all", "gather", "scatter"]


def all_to_all(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone publishes a piece for each of the others, that for the next rank first, and copies those for it."""
    del chunk_length
    builder = PlanBuilder.of(problem, "shared", rank)
    world = problem.world
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


def gather(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone but the root publishes its piece, the root copies them."""
    del chunk_length
    builder = PlanBuilder.of(problem, "shared", rank)
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


def scatter(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """The root publishes the others' pieces, that of the next rank first; each copies its own."""
    del chunk_length
    builder = PlanBuilder.of(problem, "shared", rank)
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


def _all_to_all_cost(shape: Shape) -> SharedLoad:
    """As of even pieces, but that none is cut."""
    return all_to_all_cost(_whole(shape, shape.total))


def _gather_cost(shape: Shape) -> SharedLoad:
    """As of even pieces, but that none is cut."""
    return gather_cost(_whole(shape, shape.block))


def _scatter_cost(shape: Shape) -> SharedLoad:
    """As of even pieces, but that none is cut."""
    return scatter_cost(_whole(shape, shape.total))


def _whole(shape: Shape, given: float) -> Shape:
    """Of a collective whose pieces travel whole; in records, if those who give all give so few bytes."""
    memory = shape.memory if given <= pieces_bytes(shape.world, shape.memory) else NO_LANE
    return shape._replace(chunk=max(1.0, shape.block), memory=memory)


ALGORITHMS: Final = (
    Algorithm("all_to_all_uneven", "shared", all_to_all, _all_to_all_cost, shared=True, chunked=False),
    Algorithm("gather_uneven", "shared", gather, _gather_cost, shared=True, chunked=False),
    Algorithm("scatter_uneven", "shared", scatter, _scatter_cost, shared=True, chunked=False),
)
