"""Binomial trees: rooted collectives in ceil(log2 p) rounds, for any p and any root.

Ranks are renumbered so that the root is position 0. Position v's parent is v without its lowest set bit; the subtree of
v holds the positions v .. v + size - 1, with size that bit (cut at p). Larger subtrees are served first.

| collective | cost | bytes sent by the root (broadcast, scatter) or received by it |
| --- | --- | --- |
| broadcast | ceil(log2 p) (a + mb) | m ceil(log2 p) |
| reduce | ceil(log2 p) (a + mb + mg) | m ceil(log2 p) |
| gather, scatter | ceil(log2 p) a + mb(p-1)/p | m(p-1)/p, m the whole vector |

gather and scatter send a subtree's blocks as one message, which is staged in SCRATCH at inner ranks; where the subtree
wraps around from rank p-1 to rank 0 it is two messages, so that the root needs no staging.

Source: Thakur, Rabenseifner and Gropp, 2005 (see `halving_doubling`).
"""

from __future__ import annotations

from functools import partial
from typing import Final

from asyncdist.plan.algorithms.algorithm import DOUBLING, HALVING, Algorithm
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Run, cyclic_runs, offsets, split
from asyncdist.plan.cost.load import Hop, Load, Shape, Work, cold
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = []


def broadcast(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Pass the vector down the tree, in chunks of `chunk_length` elements one behind another."""
    rank, world, root = builder.rank, problem.world, problem.root
    position = (rank - root) % world
    window = builder.window()
    for piece in split(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length):
        if position:
            window.add(builder.recv((_parent(position) + root) % world, piece, after=window.after))
        for child in _children(position, world):
            builder.send((child + root) % world, piece)
    return builder.build()


def reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Reduce up the tree in chunks of `chunk_length` elements. INPUT is only read; partial sums are in SCRATCH.

    A vector of one chunk is received into SCRATCH, with all receives posted at the start; a longer one through
    `RecvReduce`, so that its temporary memory is bounded by what is being reduced, not by the number of children.
    """
    rank, world, root = builder.rank, problem.world, problem.root
    position = (rank - root) % world
    children = [(child + root) % world for child in reversed(_children(position, world))]
    parent = (_parent(position) + root) % world
    own = Slice(Buffer.INPUT, 0, problem.total)
    if not children:
        for piece in split(own, chunk_length):
            if position:
                builder.send(parent, piece)
            else:
                builder.copy(piece, Slice(Buffer.OUTPUT, piece.offset, piece.length))
        return builder.build(ordered=root == 0)
    total = builder.scratch(problem.total) if position else Slice(Buffer.OUTPUT, 0, problem.total)
    pieces = split(own, chunk_length)
    for piece in pieces:
        target = Slice(total.buffer, total.offset + piece.offset, piece.length)
        builder.recv(children[0], target)
        if len(pieces) == 1:
            _reduce_children_at_once(builder, children[1:], piece, target)
        else:
            builder.reduce(piece, target, source_left=True)
            for child in children[1:]:
                builder.recv_reduce(child, target, incoming_left=False)
        if position:
            builder.send(parent, target)
    return builder.build(ordered=root == 0)


def gather(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Collect subtrees' blocks up the tree."""
    own = Slice(Buffer.INPUT, 0, problem.counts[builder.rank])
    tree = _Blocks(builder, problem, Buffer.OUTPUT)
    if tree.position and not tree.children:
        builder.send(tree.parent, own)
        return builder.build()
    for child in tree.children:
        for piece in tree.pieces(child):
            builder.recv(tree.rank(child), piece)
    for piece in tree.pieces(tree.position, alone=True):
        builder.copy(own, piece)
    if tree.position:
        for piece in tree.pieces(tree.position):
            builder.send(tree.parent, piece)
    return builder.build()


def scatter(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Hand subtrees' blocks down the tree."""
    own = Slice(Buffer.OUTPUT, 0, problem.counts[builder.rank])
    tree = _Blocks(builder, problem, Buffer.INPUT)
    if tree.position and not tree.children:
        builder.recv(tree.parent, own)
        return builder.build()
    if tree.position:
        for piece in tree.pieces(tree.position):
            builder.recv(tree.parent, piece)
    for child in tree.children:
        for piece in tree.pieces(child):
            builder.send(tree.rank(child), piece)
    for piece in tree.pieces(tree.position, alone=True):
        builder.copy(piece, own)
    return builder.build()


class _Blocks:
    """Where a rank holds the blocks of its subtree, in order of position: the root in `buffer`, others in SCRATCH."""

    def __init__(self, builder: PlanBuilder, problem: Problem, buffer: Buffer) -> None:
        self._problem = problem
        self._buffer = buffer
        self._starts = offsets(problem.counts)
        self._staging: Slice | None = None
        self.position = position = (builder.rank - problem.root) % problem.world
        self.parent, self.children = self.rank(_parent(position)), _children(position, problem.world)
        if position and self.children:
            runs = self._runs(position, _subtree_size(position, problem.world))
            self._staging = builder.scratch(sum(run.length for run in runs))

    def rank(self, position: int) -> int:
        return (position + self._problem.root) % self._problem.world

    def pieces(self, position: int, *, alone: bool = False) -> list[Slice]:
        """Where the blocks of that position's subtree are, or that of the position alone.

        The blocks are in order of position. Both ends of a message cut where the ranks wrap around.
        """
        runs = self._runs(position, 1 if alone else _subtree_size(position, self._problem.world))
        if self._staging is None:
            return [run.of(self._buffer) for run in runs]
        before = self._runs(self.position, position - self.position)
        offset = self._staging.offset + sum(run.length for run in before)
        pieces = []
        for run in runs:
            pieces.append(Slice(Buffer.SCRATCH, offset, run.length))
            offset += run.length
        return pieces

    def _runs(self, position: int, blocks: int) -> tuple[Run, ...]:
        return cyclic_runs(self._starts, self.rank(position), blocks)


def _reduce_children_at_once(builder: PlanBuilder, children: list[int], own: Slice, target: Slice) -> None:
    incoming = [builder.scratch(own.length) for _ in children]
    for child, piece in zip(children, incoming, strict=True):
        builder.recv(child, piece)
    builder.reduce(own, target, source_left=True)
    for piece in incoming:
        builder.reduce(piece, target, source_left=False)


def _parent(position: int) -> int:
    return position & (position - 1)


def _children(position: int, world: int) -> list[int]:
    """Children, largest subtree first."""
    children = []
    distance = 1
    while position + distance < world and not position & distance:
        children.append(position + distance)
        distance *= 2
    return children[::-1]


def _subtree_size(position: int, world: int) -> int:
    return min(position & -position, world - position) if position else world


LOPSIDED: Final = 1.2
"""How much more than their share the busier cores of a host do. Every second rank is a leaf, and neighbors run on
different cores as a rule: with two cores, the inner ranks' does a third more where ranks are bound to cores, less where
the system moves them. Chains and the trees that pipeline have inner ranks on all cores."""


def _one_way_cost(shape: Shape, *, reduces: bool = False) -> Load:
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


def _gather_cost(shape: Shape) -> Load:
    """Subtrees' blocks as one message: p-1 through the root's link, about p/2 per level in all; scatter likewise."""
    world, levels, block, way = shape.world, shape.levels, shape.total / shape.world, shape.rooted()
    moved = (world - 1) * block
    forwarded = max(moved, levels * world / 2 * block)
    everyone = Work(2 * (world - 1), forwarded, forwarded)
    path = Hop(shape.depth, moved, 0, way)
    root = Work(levels + 1, 0, moved)
    return Load((path,), (Hop(shape.depth, 0, 0, way),), root, everyone, way.leaving * moved, 0, world / 2 * block)


ALGORITHMS: Final = (
    Algorithm("broadcast", "binomial_tree", broadcast, _one_way_cost, DOUBLING),
    Algorithm("reduce", "binomial_tree", reduce, partial(_one_way_cost, reduces=True), DOUBLING),
    Algorithm("gather", "binomial_tree", gather, _gather_cost, HALVING, chunked=False),
    Algorithm("scatter", "binomial_tree", scatter, _gather_cost, HALVING, chunked=False),
)
