"""Linear algorithms: the ranks concerned talk directly, in one round.

One latency instead of log2(p), paid with p-1 messages at the root, or at every rank where all talk to all. Best in
small worlds, and for gather and scatter of large blocks, whose bytes a tree would forward. Messages go out in
rotated order, so that ranks do not all call on the same one first.

| collective | messages (busiest rank) | bytes (busiest rank) |
| --- | --- | --- |
| broadcast | p-1 | (p-1)m |
| reduce | p-1 | (p-1)m |
| gather, scatter | p-1 | m(p-1)/p, m the whole vector |
| all_gather | p-1 | m(p-1)/p |
| all_reduce | p-1 | (p-1)m |

all_reduce (all_gather and local reduction) folds in rank order on every rank: bit-identical, and right for operations
that do not commute.

Source: the basic algorithms of Thakur, Rabenseifner and Gropp, 2005 (see `recursive_doubling`).
"""

from __future__ import annotations

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import offsets
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice, Symmetry

__all__ = ["all_gather", "all_reduce", "broadcast", "gather", "reduce", "scatter"]


def broadcast(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """The root sends to everyone; `chunk_length` is not used."""
    del chunk_length
    builder = PlanBuilder("broadcast", "linear", rank, problem.world)
    whole = Slice(Buffer.OUTPUT, 0, problem.total)
    if rank == problem.root:
        for peer in _others(rank, problem.world):
            builder.send(peer, whole)
    else:
        builder.recv(problem.root, whole)
    return builder.build()


def reduce(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """The root receives everyone's vector and folds them, itself first; `chunk_length` is not used."""
    del chunk_length
    builder = PlanBuilder("reduce", "linear", rank, problem.world)
    own = Slice(Buffer.INPUT, 0, problem.total)
    if rank != problem.root:
        builder.send(problem.root, own)
        return builder.build()
    result = Slice(Buffer.OUTPUT, 0, problem.total)
    if problem.world == 1:
        builder.copy(own, result)
        return builder.build()
    first, *rest = _others(rank, problem.world)
    builder.recv(first, result)
    incoming = [builder.scratch(problem.total) for _ in rest]
    for peer, piece in zip(rest, incoming, strict=True):
        builder.recv(peer, piece)
    builder.reduce(own, result, source_left=True)
    for piece in incoming:
        builder.reduce(piece, result, source_left=False)
    return builder.build()


def gather(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone sends its block to the root; `chunk_length` is not used."""
    del chunk_length
    builder = PlanBuilder("gather", "linear", rank, problem.world)
    own = Slice(Buffer.INPUT, 0, problem.counts[rank])
    if rank != problem.root:
        builder.send(problem.root, own)
    else:
        _receive_blocks(builder, problem)
        builder.copy(own, _block(problem, Buffer.OUTPUT, rank))
    return builder.build(block_aligned=True)


def scatter(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """The root sends everyone its block; `chunk_length` is not used."""
    del chunk_length
    builder = PlanBuilder("scatter", "linear", rank, problem.world)
    own = Slice(Buffer.OUTPUT, 0, problem.counts[rank])
    if rank != problem.root:
        builder.recv(problem.root, own)
    else:
        starts = offsets(problem.counts)
        for peer in _others(rank, problem.world):
            builder.send(peer, Slice(Buffer.INPUT, starts[peer], problem.counts[peer]))
        builder.copy(Slice(Buffer.INPUT, starts[rank], problem.counts[rank]), own)
    return builder.build(block_aligned=True)


def all_gather(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone sends its block to everyone; `chunk_length` is not used."""
    del chunk_length
    builder = PlanBuilder("all_gather", "linear", rank, problem.world)
    own = Slice(Buffer.INPUT, 0, problem.counts[rank])
    for peer in _others(rank, problem.world):
        builder.send(peer, own)
    _receive_blocks(builder, problem)
    builder.copy(own, _block(problem, Buffer.OUTPUT, rank))
    return builder.build(symmetry=Symmetry.ROTATION if problem.even else Symmetry.NONE, block_aligned=True)


def all_reduce(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone sends its vector to everyone, everyone folds all of them in rank order; `chunk_length` is not used.

    The vectors of lower ranks are folded in SCRATCH, that goes to the left of the own one, and those of higher ranks
    follow: the same left fold everywhere, without a copy.
    """
    del chunk_length
    builder = PlanBuilder("all_reduce", "linear", rank, problem.world)
    whole = Slice(Buffer.OUTPUT, 0, problem.total)
    others = _others(rank, problem.world)
    for peer in others:
        builder.send(peer, whole)
    incoming = {peer: builder.scratch(problem.total) for peer in sorted(others)}
    for peer, piece in incoming.items():
        builder.recv(peer, piece)
    for peer in range(1, rank):
        builder.reduce(incoming[peer], incoming[0], source_left=False)
    if rank:
        builder.reduce(incoming[0], whole, source_left=True)
    for peer in range(rank + 1, problem.world):
        builder.reduce(incoming[peer], whole, source_left=False)
    return builder.build()


def _others(rank: int, world: int) -> list[int]:
    return [(rank + distance) % world for distance in range(1, world)]


def _block(problem: Problem, buffer: Buffer, rank: int) -> Slice:
    return Slice(buffer, sum(problem.counts[:rank]), problem.counts[rank])


def _receive_blocks(builder: PlanBuilder, problem: Problem) -> None:
    starts = offsets(problem.counts)
    for distance in range(1, problem.world):
        peer = (builder.rank - distance) % problem.world
        builder.recv(peer, Slice(Buffer.OUTPUT, starts[peer], problem.counts[peer]))
