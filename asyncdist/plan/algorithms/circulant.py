"""Circulant graphs: reduce_scatter, all_gather and all_reduce in ceil(log2 p) rounds each, for any p, at least volume.

Skips halve, rounding up, from p to 1 (13: 7, 4, 2, 1). Call the block (r + i) mod p slot i of rank r. For each pair
(s, s') of a skip and the one before (p at first):

- reduce_scatter: send slots s .. s'-1 to rank r + s; reduce what comes from rank r - s into slots 0 .. s'-s-1.
- all_gather, with the pairs in reverse: send slots 0 .. s'-s-1 to rank r - s; receive slots s .. s'-1 from rank r + s.

Each rank sends exactly p-1 blocks. Cost: ceil(log2 p) a + mb(p-1)/p (+ reduction), twice that for all_reduce, which is
the one after the other. A message is a run of the rotated vector, so at most two runs of the caller's, sent in chunks;
those that the receiver has to pass on first come first. The operation must commute; each element is reduced along one
tree, so results are bit-identical.

Temporary memory: a window of chunks for what is received for reduction, and as much again for the last rounds, whose
receives are ready from the start. reduce_scatter, which only reads INPUT, holds half the vector in partial sums too.

Source: Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024 (arXiv).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncdist.plan.algorithms.algorithm import SKIPS, Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Window, cut_blocks, cyclic_runs, first_that_fits, offsets, partition, split
from asyncdist.plan.cost.load import Load, Round, Shape, in_rounds
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice, Symmetry

__all__ = []


def all_gather(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Double what every rank has, each round."""
    rank, world, counts = builder.rank, problem.world, problem.counts
    starts = offsets(counts)
    own = Slice(Buffer.INPUT, 0, counts[rank])
    place = Slice(Buffer.OUTPUT, starts[rank], counts[rank])
    pairs = _skips(world)[::-1]
    if pairs:
        builder.send_all((rank - 1) % world, split(own, chunk_length))
        builder.recv_all((rank + 1) % world, cut_blocks(starts, rank + 1, 1, chunk_length), builder.window())
    builder.copy(own, place)
    for skip, previous in pairs[1:]:
        _pass_on(builder, starts, skip, previous, chunk_length)
    return builder.build(symmetry=_symmetry(counts, chunk_length))


def all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """reduce_scatter and all_gather, in place."""
    rank, world = builder.rank, problem.world
    counts = partition(problem.total, world)
    starts = offsets(counts)
    pairs = _skips(world)
    kept = [cut_blocks(starts, rank, previous - skip, chunk_length)[::-1] for skip, previous in pairs]
    small = _first_small(builder, kept, chunk_length)
    window = builder.window()
    for number, (skip, previous) in enumerate(pairs):
        leaving = cut_blocks(starts, rank + skip, previous - skip, chunk_length)
        builder.send_all((rank + skip) % world, reversed(leaving))
        for piece in kept[number]:
            _receive_operand(builder, (rank - skip) % world, piece, window, posted=number >= small)
    for skip, previous in reversed(pairs):
        _pass_on(builder, starts, skip, previous, chunk_length)
    return builder.build(symmetry=_symmetry(counts, chunk_length))


def reduce_scatter(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Halve the blocks every rank is responsible for, each round.

    Partial sums are in SCRATCH in slot order, so that all rounds but the first send one run; the own block's last
    operand is received into OUTPUT.
    """
    rank, world, counts = builder.rank, problem.world, problem.counts
    starts = offsets(counts)
    result = Slice(Buffer.OUTPUT, 0, counts[rank])
    pairs = _skips(world)
    if len(pairs) < 2:
        _reduce_scatter_of_two(builder, starts, result, chunk_length)
        return builder.build(block_aligned=True)
    slots = offsets([counts[(rank + slot) % world] for slot in range(pairs[0][0])])
    builder.scratch(slots[-1])
    window = builder.window()
    _first_sums(builder, starts, slots, pairs[0], window, chunk_length)
    kept = [cut_blocks(slots, 0, previous - skip, chunk_length, Buffer.SCRATCH)[::-1] for skip, previous in pairs[1:]]
    small = _first_small(builder, kept, chunk_length)
    for number, (skip, previous) in enumerate(pairs[1:]):
        leaving = cut_blocks(slots, skip, previous - skip, chunk_length, Buffer.SCRATCH)
        builder.send_all((rank + skip) % world, reversed(leaving))
        for piece in kept[number]:
            if skip == 1:
                target = Slice(Buffer.OUTPUT, piece.offset, piece.length)
                window.add(builder.recv((rank - 1) % world, target, after=window.after))
                builder.reduce(piece, target, source_left=False)
            else:
                _receive_operand(builder, (rank - skip) % world, piece, window, posted=number >= small)
    return builder.build(symmetry=_symmetry(counts, chunk_length))


def _first_sums(
    builder: PlanBuilder,
    starts: tuple[int, ...],
    slots: tuple[int, ...],
    pair: tuple[int, int],
    window: Window,
    chunk_length: int,
) -> None:
    """The first round of reduce_scatter: from INPUT to partial sums in SCRATCH, which begins with slot 0."""
    skip, previous = pair
    rank, world = builder.rank, builder.world
    leaving = cut_blocks(starts, rank + skip, previous - skip, chunk_length, Buffer.INPUT)
    builder.send_all((rank + skip) % world, reversed(leaving))
    offset = slots[previous - skip]
    for piece in reversed(cut_blocks(starts, rank, previous - skip, chunk_length, Buffer.INPUT)):
        offset -= piece.length
        target = Slice(Buffer.SCRATCH, offset, piece.length)
        window.add(builder.recv((rank - skip) % world, target, after=window.after))
        builder.reduce(piece, target, source_left=False)
    if previous - skip < skip:  # an odd number: the middle slot got nothing
        for run in cyclic_runs(starts, rank + skip - 1, 1):
            builder.copy(run.of(Buffer.INPUT), Slice(Buffer.SCRATCH, slots[skip - 1], run.length))


def _reduce_scatter_of_two(builder: PlanBuilder, starts: tuple[int, ...], result: Slice, chunk_length: int) -> None:
    """One round or none: no partial sums."""
    rank, other = builder.rank, 1 - builder.rank
    own = Slice(Buffer.INPUT, starts[rank], result.length)
    if builder.world == 1:
        builder.copy(own, result)
        return
    leaving = Slice(Buffer.INPUT, starts[other], starts[other + 1] - starts[other])
    builder.send_all(other, split(leaving, chunk_length))
    window = builder.window()
    for operand, target in zip(split(own, chunk_length), split(result, chunk_length), strict=True):
        window.add(builder.recv(other, target, after=window.after))
        builder.reduce(operand, target, source_left=rank == 0)


def _skips(world: int) -> list[tuple[int, int]]:
    """The pairs (skip, previous skip), largest first."""
    pairs = []
    previous = world
    while previous > 1:
        skip = (previous + 1) // 2
        pairs.append((skip, previous))
        previous = skip
    return pairs


def _pass_on(builder: PlanBuilder, starts: tuple[int, ...], skip: int, previous: int, chunk_length: int) -> None:
    """A round of all_gather from OUTPUT; what this rank has had for longest goes first."""
    rank, world = builder.rank, builder.world
    builder.send_all((rank - skip) % world, cut_blocks(starts, rank, previous - skip, chunk_length))
    arriving = cut_blocks(starts, rank + skip, previous - skip, chunk_length)
    builder.recv_all((rank + skip) % world, arriving, builder.window())


def _first_small(builder: PlanBuilder, rounds: Sequence[Sequence[Slice]], chunk_length: int) -> int:
    lengths = [sum(piece.length for piece in pieces) for pieces in rounds]
    return first_that_fits(lengths, builder.window_size * chunk_length)


def _receive_operand(builder: PlanBuilder, peer: int, target: Slice, window: Window, *, posted: bool) -> None:
    """Receive and reduce on the left: through the window, or into SCRATCH of its own, ready from the start."""
    if posted:
        incoming = builder.scratch(target.length)
        builder.recv(peer, incoming)
        builder.reduce(incoming, target, source_left=True)
    else:
        window.add(builder.recv_reduce(peer, target, incoming_left=True, after=window.after))


def _symmetry(counts: Sequence[int], chunk_length: int) -> Symmetry:
    """Blocks sent one by one are rotated; runs of small ones are cut where the vector ends, on each rank elsewhere."""
    alike = min(counts) == max(counts) and counts[0] >= chunk_length
    return Symmetry.ROTATION if alike else Symmetry.NONE


def _all_reduce_cost(shape: Shape) -> Load:
    """L rounds of reduce_scatter and L of all_gather, p-1 blocks each."""
    down = _rounds(shape, reduces=True)
    return in_rounds(shape, [*down, *(one._replace(reduces=False) for one in reversed(down))])


def _all_gather_cost(shape: Shape) -> Load:
    """L rounds, p-1 blocks."""
    return in_rounds(shape, _rounds(shape, reduces=False)[::-1])


def _reduce_scatter_cost(shape: Shape) -> Load:
    """L rounds, p-1 blocks sent, received and reduced."""
    return in_rounds(shape, _rounds(shape, reduces=True))._replace(
        scratch=shape.full((shape.world + 1) // 2) * shape.block
    )


def _rounds(shape: Shape, *, reduces: bool) -> list[Round]:
    """The rounds of `circulant`: skips halve, rounding up, and n blocks are two runs on n - 1 of p ranks."""
    rounds = []
    previous, together = shape.world, False
    while previous > 1:
        skip = (previous + 1) // 2
        blocks = previous - skip
        nbytes = shape.full(blocks) * shape.block
        pieces = shape.pieces(nbytes)
        messages = 1 + (blocks - 1) / shape.world / pieces
        # From 3 to 2 the slot that comes in is not one that goes out from 2 to 1: those rounds are under way together.
        latencies = 0.0 if skip == 1 and together else 1.0
        together = previous == 3
        rounds.append(Round(nbytes, shape.ahead(skip), reduces, pieces, messages, latencies))
        previous = skip
    return rounds


ALGORITHMS: Final = (
    Algorithm("all_reduce", "circulant", all_reduce, _all_reduce_cost, SKIPS),
    Algorithm("all_gather", "circulant", all_gather, _all_gather_cost, SKIPS),
    Algorithm("reduce_scatter", "circulant", reduce_scatter, _reduce_scatter_cost, SKIPS),
)
