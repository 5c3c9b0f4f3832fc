"""What the algorithms for vectors ask: all_reduce, broadcast, reduce, scan, barrier. One formula each.

Each says what its algorithm's module does; costs are derived there. Where chunks follow chunks through a pipeline, the
path is that of the first chunk, plus the others on the narrowest link.
"""

from __future__ import annotations

import math
from typing import Final

from asyncdist.plan.cost.load import AT_HOME, Hop, Load, Round, Shape, Work, alike, cold, in_rounds

__all__ = [
    "binomial_broadcast",
    "binomial_reduce",
    "chain_broadcast",
    "chain_reduce",
    "circulant_all_reduce",
    "direct_all_reduce",
    "dissemination_barrier",
    "doubling_all_reduce",
    "doubling_scan",
    "halving_doubling_all_reduce",
    "linear_all_reduce",
    "linear_barrier",
    "linear_broadcast",
    "linear_reduce",
    "ordered_chain_reduce",
    "ring_all_reduce",
    "skips",
]


LOPSIDED: Final = 1.2
"""How much more than their share the busier cores of a host do in a binomial tree. Every second rank is a leaf, and
neighbors run on different cores as a rule: with two cores, the inner ranks' does a third more where ranks are bound to
cores, less where the system moves them. Chains and the trees that pipeline have inner ranks on all cores."""


def direct_all_reduce(shape: Shape) -> Load:
    """Everyone sends everything to everyone and reduces p-1 vectors."""
    others, way = shape.world - 1, shape.everybody()
    moved = others * shape.total
    worked = cold(moved, shape.total)
    work = Work(2 * others, moved, moved, worked)
    load = alike(shape, (Hop(1, moved, worked, way),), (Hop(1, 0, 0, way),), work, way)
    return load._replace(scratch=moved, hidden=others - 1)


def doubling_all_reduce(shape: Shape) -> Load:
    """floor(log2 p) exchanges of whole vectors."""
    rounds = [Round(shape.total, shape.partners(1 << bit), True) for bit in range(shape.world.bit_length() - 1)]
    load = in_rounds(shape, rounds, [Round(shape.total, AT_HOME, True), Round(shape.total, AT_HOME)])
    return load._replace(scratch=len(rounds) * shape.total)


def halving_doubling_all_reduce(shape: Shape) -> Load:
    """Exchanges of halves, quarters, ..., and back; neighbors come first, in chunks."""
    down = []
    for bit in range(shape.world.bit_length() - 1):
        part = shape.total / (2 << bit)
        down.append(Round(part, shape.partners(1 << bit), True, shape.pieces(part)))
    up = [one._replace(reduces=False) for one in reversed(down)]
    whole = shape.pieces(shape.total)
    fold = [Round(shape.total, AT_HOME, True, whole), Round(shape.total, AT_HOME, False, whole)]
    return in_rounds(shape, [*down, *up], fold)


def circulant_all_reduce(shape: Shape) -> Load:
    """L rounds of reduce_scatter and L of all_gather, p-1 blocks each."""
    down = skips(shape, reduces=True)
    return in_rounds(shape, [*down, *(one._replace(reduces=False) for one in reversed(down))])


def ring_all_reduce(shape: Shape) -> Load:
    """2(p-1) steps of a block in chunks: with several, the next step's first chunk is on its way before the last."""
    steps, pieces, way = 2 * (shape.world - 1), shape.pieces(shape.block), shape.neighbors()
    chunk = shape.block / pieces
    path = (Hop(steps, (steps + pieces - 1) * chunk, steps / 2 * cold(chunk, chunk), way),)
    moved = steps * shape.block
    work = Work(2 * steps * pieces, moved, moved, cold(moved / 2, chunk))
    return alike(shape, path, (Hop(1 if pieces > 1 else steps, 0, 0, way),), work, way)


def linear_broadcast(shape: Shape) -> Load:
    """p-1 vectors through the root's link."""
    others, way = shape.world - 1, shape.rooted()
    moved = others * shape.total
    everyone = Work(2 * others, moved, moved)
    path = Hop(1, moved, 0, way)
    return Load((path,), (Hop(1, 0, 0, way),), Work(others, moved, 0), everyone, way.crossing * moved)


def linear_reduce(shape: Shape) -> Load:
    """p-1 vectors through the root's link, and into its sum."""
    others, way = shape.world - 1, shape.rooted()
    moved = others * shape.total
    worked = cold(moved, shape.total)
    everyone = Work(2 * others, moved, moved, worked)
    path = Hop(1, moved, cold(shape.total, shape.total), way)
    root = Work(others, 0, moved, worked)
    return Load((path,), (Hop(1, 0, 0, way),), root, everyone, way.leaving * moved, 0, moved - shape.total)


def linear_all_reduce(shape: Shape) -> Load:
    """p-1 vectors into the sum of rank 0, and p-1 sums out of it."""
    others, way = shape.world - 1, shape.rooted()
    moved = others * shape.total
    worked = cold(moved, shape.total)
    everyone = Work(4 * others, 2 * moved, 2 * moved, worked)
    path = Hop(2, 2 * moved, cold(shape.total, shape.total), way)
    hub = Work(2 * others, moved, moved, worked)
    return Load((path,), (Hop(2, 0, 0, way),), hub, everyone, way.crossing * moved, 0, moved)


def binomial_broadcast(shape: Shape) -> Load:
    """The root sends each chunk L times."""
    return _binomial(shape, reduces=False)


def binomial_reduce(shape: Shape) -> Load:
    """The same upward, with a reduction at each inner rank, which chunks hide."""
    return _binomial(shape, reduces=True)


def chain_broadcast(shape: Shape) -> Load:
    """p-1 hops of a chunk, and the other chunks behind it."""
    return _chain(shape, shape.world - 1, reduces=False)


def chain_reduce(shape: Shape) -> Load:
    """The same upward, with a reduction at each hop; scan and exscan are the same with results on the way."""
    return _chain(shape, shape.world - 1, reduces=True)


def ordered_chain_reduce(shape: Shape) -> Load:
    """Two chains to the root, which receives from both; an end of the line has one."""
    below, above = shape.root, shape.world - 1 - shape.root
    load = _chain(shape, max(below, above), reduces=True)
    if not below or not above:
        return load
    pieces = shape.pieces(shape.total)
    moved = 2 * shape.total
    worked = cold(moved, shape.total / pieces)
    hop = load.path[0]
    path = (hop._replace(nbytes=hop.nbytes + (pieces - 1) * shape.total / pieces),)
    everyone = Work(*(each * (below + above) / max(below, above) for each in load.everyone))
    return load._replace(path=path, busiest=Work(2 * pieces, 0, moved, worked), everyone=everyone)


def doubling_scan(shape: Shape) -> Load:
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


def dissemination_barrier(shape: Shape) -> Load:
    """L rounds of messages without elements."""
    return in_rounds(shape, [Round(0, shape.ahead(1 << bit)) for bit in range(shape.levels)])


def linear_barrier(shape: Shape) -> Load:
    """Signals to rank 0 and back."""
    others, way = shape.world - 1, shape.rooted()
    path = Hop(2, 0, 0, way)
    hub = Work(2 * others + 2, 0, 0)  # and the last rank's two, which nothing hides
    return Load((path,), (path,), hub, Work(4 * others, 0, 0), 0.0)


def skips(shape: Shape, *, reduces: bool) -> list[Round]:
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


def _binomial(shape: Shape, *, reduces: bool) -> Load:
    levels, total, others, way = shape.levels, shape.total, shape.world - 1, shape.tree()
    pieces = shape.pieces(total)
    worked = cold(levels * total, total / pieces) if reduces else 0.0
    sent, received = (0.0, levels * total) if reduces else (levels * total, 0.0)
    busiest = Work(levels * pieces, sent, received, worked)
    moved = LOPSIDED * others * total
    everyone = Work(2 * others * pieces, moved, moved, worked * others / levels)
    path = Hop(shape.depth, levels * total, worked / pieces, way)
    far = 0.0 if shape.one_host else (-(-shape.world // shape.ranks_per_host) - 1).bit_length() * total
    scratch = (total if pieces > 1 else levels * total) if reduces else 0.0
    return Load((path,), (Hop(shape.depth, 0, 0, way),), busiest, everyone, far, 0, scratch)


def _chain(shape: Shape, hops: int, *, reduces: bool) -> Load:
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
