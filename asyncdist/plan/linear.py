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
| reduce_scatter | p-1 | m(p-1)/p |
| all_reduce | p-1 | (p-1)m |
| all_to_all | p-1 | m(p-1)/p, m all a rank sends |

Whoever reduces folds in rank order: right for operations that do not commute, and all_reduce (all_gather and local
reduction) is bit-identical on all ranks.

Source: the basic algorithms of Thakur, Rabenseifner and Gropp, 2005 (see `recursive_doubling`).
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import offsets
from asyncdist.plan.exchange import direct, receive_block, send_block
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice, Symmetry

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]

EXCHANGE_WINDOW: Final = 32
"""Messages of all_to_all a rank has under way in each direction, as in MPICH: enough to hide every latency, few enough
that neither the links into one rank nor its loop have hundreds to share."""


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
    """The root receives everyone's vector and folds them in rank order; `chunk_length` is not used."""
    del chunk_length
    root = problem.root
    builder = PlanBuilder("reduce", "linear", rank, problem.world)
    own = Slice(Buffer.INPUT, 0, problem.total)
    if rank != root:
        builder.send(root, own)
        return builder.build(ordered=True)
    _fold(builder, own, Slice(Buffer.OUTPUT, 0, problem.total))
    return builder.build(ordered=True)


def reduce_scatter(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone sends everyone its block, and folds its own in rank order; `chunk_length` is not used."""
    del chunk_length
    builder = PlanBuilder("reduce_scatter", "linear", rank, problem.world)
    starts = offsets(problem.counts)
    for peer in _others(rank, problem.world):
        builder.send(peer, Slice(Buffer.INPUT, starts[peer], problem.counts[peer]))
    own = Slice(Buffer.INPUT, starts[rank], problem.counts[rank])
    _fold(builder, own, Slice(Buffer.OUTPUT, 0, problem.counts[rank]))
    return builder.build(block_aligned=True, ordered=True)


def gather(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone sends its block to the root, also where only the root knows all lengths; `chunk_length` is not used."""
    del chunk_length
    builder = PlanBuilder(problem.collective, "linear", rank, problem.world)
    own = Slice(Buffer.INPUT, 0, problem.counts[rank])
    if rank != problem.root:
        send_block(builder, problem.root, own)
    else:
        _receive_blocks(builder, problem)
        builder.copy(own, _block(problem, Buffer.OUTPUT, rank))
    return builder.build(block_aligned=True)


def scatter(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """The root sends everyone its block, also where only it knows all lengths; `chunk_length` is not used."""
    del chunk_length
    builder = PlanBuilder(problem.collective, "linear", rank, problem.world)
    own = Slice(Buffer.OUTPUT, 0, problem.counts[rank])
    if rank != problem.root:
        receive_block(builder, problem.root, own)
    else:
        starts = offsets(problem.counts)
        for peer in _others(rank, problem.world):
            send_block(builder, peer, Slice(Buffer.INPUT, starts[peer], problem.counts[peer]))
        builder.copy(Slice(Buffer.INPUT, starts[rank], problem.counts[rank]), own)
    return builder.build(block_aligned=True)


def all_to_all(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Everyone sends everyone its block, even or uneven; `chunk_length` is not used."""
    del chunk_length
    return direct(problem, "linear", rank, EXCHANGE_WINDOW, in_step=False)


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
    return builder.build(ordered=True)


def _others(rank: int, world: int) -> list[int]:
    return [(rank + distance) % world for distance in range(1, world)]


def _block(problem: Problem, buffer: Buffer, rank: int) -> Slice:
    return Slice(buffer, sum(problem.counts[:rank]), problem.counts[rank])


def _receive_blocks(builder: PlanBuilder, problem: Problem) -> None:
    starts = offsets(problem.counts)
    for distance in range(1, problem.world):
        peer = (builder.rank - distance) % problem.world
        receive_block(builder, peer, Slice(Buffer.OUTPUT, starts[peer], problem.counts[peer]))


def _fold(builder: PlanBuilder, own: Slice, result: Slice) -> None:
    """Receive everyone's operand and fold it with `own` into `result` in rank order; all receives come first.

    The lowest other rank's operand is received into `result` itself, so that nothing needs to be copied.
    """
    rank, world = builder.rank, builder.world
    if world == 1:
        builder.copy(own, result)
        return
    others = [(rank - distance) % world for distance in range(1, world)]
    operands = {peer: builder.scratch(result.length) for peer in others if peer != min(others)}
    operands[min(others)] = result
    for peer in others:
        builder.recv(peer, operands[peer])
    operands[rank] = own
    if not rank:
        builder.reduce(own, result, source_left=True)
    for peer in range(1 if rank else 2, world):
        builder.reduce(operands[peer], result, source_left=False)
