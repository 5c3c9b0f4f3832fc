"""What the algorithms for blocks ask: all_gather, reduce_scatter, gather, scatter, all_to_all. One formula each."""

from __future__ import annotations

from asyncdist.plan.algorithms.linear import EXCHANGE_WINDOW
from asyncdist.plan.cost.load import AT_HOME, NO_WORK, Hop, Load, Round, Shape, Work, alike, cold, in_rounds
from asyncdist.plan.cost.vectors import skips

__all__ = [
    "binomial_gather",
    "bruck_all_to_all",
    "circulant_all_gather",
    "circulant_reduce_scatter",
    "direct_all_gather",
    "direct_reduce_scatter",
    "doubling_all_gather",
    "halving_reduce_scatter",
    "linear_all_to_all",
    "linear_gather",
    "neighbor_all_gather",
    "pairwise_all_to_all",
    "ring_all_gather",
    "ring_reduce_scatter",
]


def direct_all_gather(shape: Shape) -> Load:
    """Everyone's block to everyone, a window of them at a time."""
    return _all_at_once(shape, reduces=False)


def direct_reduce_scatter(shape: Shape) -> Load:
    """Everyone's blocks to those they belong to, which fold p-1 of them in order."""
    return _all_at_once(shape, reduces=True)


def linear_all_to_all(shape: Shape) -> Load:
    """Every block to the rank it is for, a window of them at a time."""
    return _all_at_once(shape, reduces=False)


def pairwise_all_to_all(shape: Shape) -> Load:
    """p-1 rounds of a block."""
    others, way = shape.world - 1, shape.everybody()
    moved = others * shape.block
    return alike(shape, (Hop(others, moved, 0, way),), (Hop(others, 0, 0, way),), Work(2 * others, moved, moved), way)


def bruck_all_to_all(shape: Shape) -> Load:
    """L rounds of the blocks whose number has a bit, packed and, at the end, put into place."""
    rounds = []
    for bit in reversed(range(shape.levels)):
        distance = 1 << bit
        slots = shape.world // (2 * distance) * distance + max(0, shape.world % (2 * distance) - distance)
        # A block goes as many ways as its number has bits, fewer than there are rounds unless p is a power of two.
        rounds.append(Round(slots * shape.block, shape.ahead(distance), latencies=min(1, shape.depth - bit)))
    load = in_rounds(shape, rounds)
    copied = (load.busiest.sent + shape.total) / 2  # a copy costs half of a reduction
    busiest = load.busiest._replace(worked=copied)
    everyone = load.everyone._replace(worked=shape.world * copied)
    path = (*load.path, Hop(0, 0, copied))
    return load._replace(path=path, busiest=busiest, everyone=everyone, scratch=2 * load.busiest.sent)


def circulant_all_gather(shape: Shape) -> Load:
    """L rounds, p-1 blocks."""
    return in_rounds(shape, skips(shape, reduces=False)[::-1])


def circulant_reduce_scatter(shape: Shape) -> Load:
    """L rounds, p-1 blocks sent, received and reduced."""
    return in_rounds(shape, skips(shape, reduces=True))._replace(
        scratch=shape.full((shape.world + 1) // 2) * shape.block
    )


def doubling_all_gather(shape: Shape) -> Load:
    """Exchanges of 1, 2, 4, ... blocks, in chunks; neighbors first."""
    rounds = _doubling(shape, reduces=False)
    return in_rounds(shape, rounds, [_part(shape, shape.block), _part(shape, shape.total)])


def halving_reduce_scatter(shape: Shape) -> Load:
    """Exchanges of half of the blocks, a quarter, ..., in chunks; the partner half the world away first."""
    rounds = _doubling(shape, reduces=True)[::-1]
    fold = [_part(shape, shape.total)._replace(reduces=True), _part(shape, shape.block)]
    power_of_two = shape.world & (shape.world - 1) == 0
    held = shape.full(shape.world / 2) * shape.block if power_of_two else shape.total
    return in_rounds(shape, rounds, fold)._replace(scratch=held)


def neighbor_all_gather(shape: Shape) -> Load:
    """p/2 rounds: a block, then two at a time; an odd p is served by the ring."""
    if shape.world % 2:
        return ring_all_gather(shape)
    rounds, pieces, way = shape.world // 2, shape.pieces(shape.block), shape.neighbors()
    blocks = 1 + shape.full(shape.world - 2)  # the own one is sent to both sides
    moved = blocks * shape.block
    work = Work(2 * blocks * pieces, moved, moved)
    idle = (Hop(1 if pieces > 1 else rounds, 0, 0, way),)
    return alike(shape, (Hop(rounds, moved, 0, way),), idle, work, way)


def ring_all_gather(shape: Shape) -> Load:
    """p-1 steps of a block in chunks."""
    return _ring(shape, reduces=False)


def ring_reduce_scatter(shape: Shape) -> Load:
    """p-1 steps of a block in chunks, each reduced while the next is on the wire."""
    return _ring(shape, reduces=True)


def linear_gather(shape: Shape) -> Load:
    """p-1 blocks through the root's link; scatter is the same downward."""
    others, way = shape.world - 1, shape.rooted()
    moved = shape.total * others / shape.world
    everyone = Work(2 * others, moved, moved)
    path = Hop(1, moved, 0, way)
    return Load((path,), (Hop(1, 0, 0, way),), Work(others, 0, moved), everyone, way.crossing * moved)


def binomial_gather(shape: Shape) -> Load:
    """Subtrees' blocks as one message: p-1 through the root's link, about p/2 per level in all; scatter likewise."""
    world, levels, block, way = shape.world, shape.levels, shape.total / shape.world, shape.rooted()
    moved = (world - 1) * block
    forwarded = max(moved, levels * world / 2 * block)
    everyone = Work(2 * (world - 1), forwarded, forwarded)
    path = Hop(shape.depth, moved, 0, way)
    root = Work(levels + 1, 0, moved)
    return Load((path,), (Hop(shape.depth, 0, 0, way),), root, everyone, way.leaving * moved, 0, world / 2 * block)


def _all_at_once(shape: Shape, *, reduces: bool) -> Load:
    others, way = shape.world - 1, shape.everybody()
    moved = others * shape.block
    worked = cold(moved, shape.block) if reduces else 0.0
    windows = -(-others // EXCHANGE_WINDOW)
    path = Hop(windows, moved, worked, way)
    work = Work(2 * others, moved, moved, worked)
    load = alike(shape, (path,), (Hop(windows, 0, 0, way),), work, way)
    everyone, hidden = NO_WORK.plus(work, shape.full(shape.world)), min(others, EXCHANGE_WINDOW) - 1
    return load._replace(everyone=everyone, scratch=moved if reduces else 0.0, hidden=hidden)


def _doubling(shape: Shape, *, reduces: bool) -> list[Round]:
    """The rounds of ranks that double what they have, with partners twice as far each time."""
    bits = shape.world.bit_length() - 1
    rounds = []
    for bit in range(bits):
        nbytes = shape.full(shape.world / (1 << bits - bit)) * shape.block
        rounds.append(Round(nbytes, shape.partners(1 << bit), reduces, shape.pieces(nbytes)))
    return rounds


def _part(shape: Shape, nbytes: float) -> Round:
    return Round(nbytes, AT_HOME, False, shape.pieces(nbytes))


def _ring(shape: Shape, *, reduces: bool) -> Load:
    steps, pieces, way = shape.world - 1, shape.pieces(shape.block), shape.neighbors()
    chunk = shape.block / pieces
    worked = cold(chunk, chunk) if reduces else 0.0
    path = Hop(steps, (steps + pieces - 1) * chunk, steps * worked, way)
    blocks = shape.full(steps)
    moved = blocks * shape.block
    work = Work(2 * blocks * pieces, moved, moved, blocks * pieces * worked)
    load = alike(shape, (path,), (Hop(1 if pieces > 1 else steps, 0, 0, way),), work, way)
    return load._replace(scratch=min(2, shape.world - 2) * shape.block if reduces else 0.0)
