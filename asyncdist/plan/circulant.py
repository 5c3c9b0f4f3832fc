"""Circulant graphs: reduce_scatter, all_gather and all_reduce in ceil(log2 p) rounds each, for any p, at least volume.

Skips halve, rounding up, from p to 1 (13: 7, 4, 2, 1). Call the block (r + i) mod p slot i of rank r. For each pair
(s, s') of a skip and the one before (p at first):

- reduce_scatter: send slots s .. s'-1 to rank r + s; reduce what comes from rank r - s into slots 0 .. s'-s-1.
- all_gather, with the pairs in reverse: send slots 0 .. s'-s-1 to rank r - s; receive slots s .. s'-1 from rank r + s.

Each rank sends exactly p-1 blocks. Cost: ceil(log2 p) a + mb(p-1)/p (+ reduction), twice that for all_reduce, which is
the one after the other. A message is a run of the rotated vector, so at most two runs of the caller's; those are two
messages here. The operation must commute; each element is reduced along one tree, so results are bit-identical.

Source: Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024 (arXiv).
"""

from __future__ import annotations

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import cyclic_runs, offsets, partition
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_gather(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Double what every rank has, each round; `chunk_length` is not used."""
    del chunk_length
    world = problem.world
    starts = offsets(problem.counts)
    builder = PlanBuilder("all_gather", "circulant", rank, world)
    own = Slice(Buffer.INPUT, 0, problem.counts[rank])
    place = Slice(Buffer.OUTPUT, starts[rank], problem.counts[rank])
    pairs = _skips(world)[::-1]
    if pairs:
        builder.send((rank - 1) % world, own)
        _receive(builder, starts, (rank + 1) % world, rank + 1, 1)
    builder.copy(own, place)
    for skip, previous in pairs[1:]:
        _send(builder, starts, (rank - skip) % world, rank, previous - skip)
        _receive(builder, starts, (rank + skip) % world, rank + skip, previous - skip)
    return builder.build()


def all_reduce(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """reduce_scatter and all_gather in place; `chunk_length` is not used.

    What comes in for reduction goes to SCRATCH, p-1 blocks in all, so that every receive is posted at the start.
    """
    del chunk_length
    world = problem.world
    starts = offsets(partition(problem.total, world))
    builder = PlanBuilder("all_reduce", "circulant", rank, world)
    pairs = _skips(world)
    for skip, previous in pairs:
        _send(builder, starts, (rank + skip) % world, rank + skip, previous - skip)
        for run in cyclic_runs(starts, rank, previous - skip):
            incoming = builder.scratch(run.length)
            builder.recv((rank - skip) % world, incoming)
            builder.reduce(incoming, run.of(Buffer.OUTPUT), source_left=True)
    for skip, previous in reversed(pairs):
        _send(builder, starts, (rank - skip) % world, rank, previous - skip)
        _receive(builder, starts, (rank + skip) % world, rank + skip, previous - skip)
    return builder.build()


def reduce_scatter(problem: Problem, rank: int, chunk_length: int) -> Plan:
    """Halve the blocks every rank is responsible for, each round; `chunk_length` is not used.

    INPUT is only read. Partial sums are in SCRATCH in slot order, so that all rounds but the first send one run; the
    own block's last operand is received into OUTPUT.
    """
    del chunk_length
    world = problem.world
    starts = offsets(problem.counts)
    builder = PlanBuilder("reduce_scatter", "circulant", rank, world)
    result = Slice(Buffer.OUTPUT, 0, problem.counts[rank])
    pairs = _skips(world)
    if len(pairs) < 2:
        _reduce_scatter_of_two(builder, starts, result)
        return builder.build(block_aligned=True)
    slots = offsets([problem.counts[(rank + slot) % world] for slot in range(pairs[0][0])])
    partial = builder.scratch(slots[-1])
    skip, previous = pairs[0]
    for run in cyclic_runs(starts, rank + skip, previous - skip):
        builder.send((rank + skip) % world, run.of(Buffer.INPUT))
    offset = partial.offset
    runs = cyclic_runs(starts, rank, previous - skip)
    targets = []
    for run in runs:
        targets.append(Slice(Buffer.SCRATCH, offset, run.length))
        builder.recv((rank - skip) % world, targets[-1])
        offset += run.length
    for run, target in zip(runs, targets, strict=True):
        builder.reduce(run.of(Buffer.INPUT), target, source_left=False)
    if previous - skip < skip:  # an odd number: the middle slot got nothing
        for run in cyclic_runs(starts, rank + skip - 1, 1):
            builder.copy(run.of(Buffer.INPUT), Slice(Buffer.SCRATCH, offset, run.length))
    for skip, previous in pairs[1:]:
        builder.send((rank + skip) % world, _slots(slots, partial, skip, previous))
        kept = _slots(slots, partial, 0, previous - skip)
        if skip == 1:
            builder.recv((rank - 1) % world, result)
            builder.reduce(kept, result, source_left=False)
        else:
            incoming = builder.scratch(kept.length)
            builder.recv((rank - skip) % world, incoming)
            builder.reduce(incoming, kept, source_left=True)
    return builder.build()


def _reduce_scatter_of_two(builder: PlanBuilder, starts: tuple[int, ...], result: Slice) -> None:
    """One round or none: no partial sums."""
    rank, other = builder.rank, 1 - builder.rank
    own = Slice(Buffer.INPUT, starts[rank], result.length)
    if builder.world == 1:
        builder.copy(own, result)
        return
    builder.send(other, Slice(Buffer.INPUT, starts[other], starts[other + 1] - starts[other]))
    builder.recv(other, result)
    builder.reduce(own, result, source_left=rank == 0)


def _skips(world: int) -> list[tuple[int, int]]:
    """The pairs (skip, previous skip), largest first."""
    pairs = []
    previous = world
    while previous > 1:
        skip = (previous + 1) // 2
        pairs.append((skip, previous))
        previous = skip
    return pairs


def _slots(slots: tuple[int, ...], partial: Slice, first: int, last: int) -> Slice:
    return Slice(partial.buffer, partial.offset + slots[first], slots[last] - slots[first])


def _send(builder: PlanBuilder, starts: tuple[int, ...], peer: int, first: int, blocks: int) -> None:
    for run in cyclic_runs(starts, first, blocks):
        builder.send(peer, run.of(Buffer.OUTPUT))


def _receive(builder: PlanBuilder, starts: tuple[int, ...], peer: int, first: int, blocks: int) -> None:
    for run in cyclic_runs(starts, first, blocks):
        builder.recv(peer, run.of(Buffer.OUTPUT))
