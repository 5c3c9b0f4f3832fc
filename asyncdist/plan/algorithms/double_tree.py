"""Double binary tree: broadcast, reduce and all_reduce with full bandwidth at the latency of a tree.

Two trees carry half of the vector each, so arranged (`trees`) that no rank has more than two children over both: each
moves the vector about once, where the inner ranks of a single tree move it twice. Both halves are pipelined in chunks.
With L = ceil(log2 p), m bytes, latency a, b seconds per byte and g per byte reduced, and the best number of chunks:

| collective | cost | bytes sent, at most |
| --- | --- | --- |
| broadcast | mb + 2aL + sqrt(8abmL) | m |
| reduce | as broadcast, + mg | m |
| all_reduce | 2mb + mg + 4aL + 2 sqrt(8abmL) | 2m |

all_reduce reduces up each tree and broadcasts down it, both at once; the trees span all ranks. For broadcast and reduce
they span all ranks but the root, which exchanges with the roots of both: so it, too, moves every byte once. A rank has
few chunks on their way up a tree at a time: as a leaf it could send half the vector at once, but in the other tree its
parent waits for what it sends there.

Where hosts have several ranks, the trees are over hosts and over the ranks of each (`host_trees`): the table then says
what a host's card sends, with L the levels over hosts, and a rank sends up to m more.

The operation must commute. Each element is reduced along one tree and its result comes from that tree's root, so all
ranks have the same bits. Temporary memory: a window of chunks for each child, two at most, or four on hosts.

Source: Sanders, Speck and Träff, 2009 (see `trees`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Final

from asyncdist.plan.algorithms.algorithm import TREE, Algorithm
from asyncdist.plan.algorithms.host_trees import host_pair, rooted_host_pair
from asyncdist.plan.algorithms.trees import PAIR, Node, TreePipeline, one_way_cost, up_and_down_cost
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import blocks_of, partition, split
from asyncdist.plan.cost.load import Load, Shape
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["ALGORITHMS", "all_reduce", "broadcast", "reduce"]

TREES = 2


def all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Reduce each half up its tree and broadcast it down, chunk by chunk."""
    rank = builder.rank
    for tree, piece in _chunks(builder, host_pair(problem, rank), problem.total, Buffer.OUTPUT, chunk_length):
        tree.reduce_in_place(piece)
        tree.pass_down(piece)
    return builder.build()


def broadcast(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Pass chunks of `chunk_length` elements down the trees, in turn."""
    rank = builder.rank
    for tree, piece in _chunks(builder, rooted_host_pair(problem, rank), problem.total, Buffer.OUTPUT, chunk_length):
        tree.pass_down(piece)
    return builder.build()


def reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Reduce chunks of `chunk_length` elements up the trees, in turn; INPUT is only read."""
    rank = builder.rank
    if problem.world == 1:
        builder.copy(Slice(Buffer.INPUT, 0, problem.total), Slice(Buffer.OUTPUT, 0, problem.total))
        return builder.build()
    for tree, piece in _chunks(builder, rooted_host_pair(problem, rank), problem.total, Buffer.INPUT, chunk_length):
        tree.reduce_from(piece, Slice(Buffer.OUTPUT, piece.offset, piece.length))
    return builder.build()


def _chunks(
    builder: PlanBuilder, nodes: tuple[Node, Node], total: int, buffer: Buffer, chunk_length: int
) -> Iterator[tuple[TreePipeline, Slice]]:
    """Chunks of both halves in turn, each with the tree it travels in."""
    halves = [split(half, chunk_length) for half in blocks_of(buffer, partition(total, TREES))]
    longest = max((piece.length for half in halves for piece in half), default=0)
    trees = [TreePipeline(builder, node, longest, paired=True) for node in nodes]
    for pieces in zip_longest(*halves):
        for tree, piece in zip(trees, pieces, strict=True):
            if piece is not None:
                yield tree, piece


def _all_reduce_cost(shape: Shape) -> Load:
    """Both halves up and down their trees, all at once."""
    return up_and_down_cost(shape, trees=PAIR)


def _broadcast_cost(shape: Shape) -> Load:
    """Two halves, each on its tree below the root; no rank has more than two children in both."""
    return one_way_cost(shape, trees=PAIR, reduces=False)


def _reduce_cost(shape: Shape) -> Load:
    """The same upward."""
    return one_way_cost(shape, trees=PAIR, reduces=True)


ALGORITHMS: Final = (
    Algorithm("all_reduce", "double_tree", all_reduce, _all_reduce_cost, growth=TREE),
    Algorithm("broadcast", "double_tree", broadcast, _broadcast_cost, growth=TREE),
    Algorithm("reduce", "double_tree", reduce, _reduce_cost, growth=TREE),
)
