"""A pipelined binary tree: broadcast, reduce and all_reduce of medium vectors at the latency of a tree.

Ranks stand in the tree of `trees`, at most L = ceil(log2 p) deep, renumbered so that the root has position 0. Chunks
are passed on as soon as they have arrived and, upwards, been reduced; all_reduce goes up and down the same tree, both
at once. With k chunks, m bytes, latency a, b seconds per byte and g per byte reduced:

| collective | cost | bytes sent by the busiest rank |
| --- | --- | --- |
| broadcast | (L + k - 1)(a + 2mb/k); 2mb + 2aL + 4 sqrt(abmL) with the best k | 2m |
| reduce | as broadcast, + 2mg/k a level; the busiest rank receives 2m | m |
| all_reduce | (2L + k - 1)(a + 3mb/k + 2mg/k) | 3m |

An inner rank serves two children and so moves the vector twice or thrice: see `double_tree` for large vectors.

Where hosts have several ranks, the tree is over hosts and over the ranks of each (`host_trees`): the table then says
what a host's card sends, with L the levels over hosts, and its head, with a third child inside, moves the vector once
more each way.

The tree is in rank order, so all_reduce, and reduce to rank 0, need no commuting operation; all ranks get the root's
bits. Temporary memory: a window of chunks for each child.

Source: Pješivac-Grbović, Angskun, Bosilca et al., 2007 (see `chain`); Sanders, Speck and Träff, 2009 (see `trees`).
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.algorithms.algorithm import TREE, Algorithm
from asyncdist.plan.algorithms.host_trees import host_tree
from asyncdist.plan.algorithms.trees import SINGLE, Node, TreePipeline, one_way_cost, up_and_down_cost
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import split
from asyncdist.plan.cost.load import Load, Shape
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["ALGORITHMS", "all_reduce", "broadcast", "reduce"]


def all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Reduce up the tree and broadcast down it, chunk by chunk."""
    rank = builder.rank
    pieces = split(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length)
    tree = _pipeline(builder, host_tree(problem, rank), pieces)
    for piece in pieces:
        tree.reduce_in_place(piece)
        tree.pass_down(piece)
    return builder.build(ordered=True)


def broadcast(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Pass chunks of `chunk_length` elements down the tree."""
    rank = builder.rank
    pieces = split(Slice(Buffer.OUTPUT, 0, problem.total), chunk_length)
    tree = _pipeline(builder, host_tree(problem, rank), pieces)
    for piece in pieces:
        tree.pass_down(piece)
    return builder.build()


def reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Reduce chunks of `chunk_length` elements up the tree; INPUT is only read."""
    rank = builder.rank
    pieces = split(Slice(Buffer.INPUT, 0, problem.total), chunk_length)
    tree = _pipeline(builder, host_tree(problem, rank), pieces)
    for piece in pieces:
        tree.reduce_from(piece, Slice(Buffer.OUTPUT, piece.offset, piece.length))
    return builder.build(ordered=problem.root == 0)


def _pipeline(builder: PlanBuilder, node: Node, pieces: tuple[Slice, ...]) -> TreePipeline:
    return TreePipeline(builder, node, max((piece.length for piece in pieces), default=0))


def _all_reduce_cost(shape: Shape) -> Load:
    """Up and down at once: an inner rank sends every chunk to its parent and to two children."""
    return up_and_down_cost(shape, trees=SINGLE)


def _broadcast_cost(shape: Shape) -> Load:
    """L levels; an inner rank sends every chunk twice, and inside its host once more."""
    return one_way_cost(shape, trees=SINGLE, reduces=False)


def _reduce_cost(shape: Shape) -> Load:
    """The same upward, two operands to reduce at each inner rank."""
    return one_way_cost(shape, trees=SINGLE, reduces=True)


ALGORITHMS: Final = (
    Algorithm("all_reduce", "binary_tree", all_reduce, _all_reduce_cost, growth=TREE, ordered=True),
    Algorithm("broadcast", "binary_tree", broadcast, _broadcast_cost, growth=TREE),
    Algorithm("reduce", "binary_tree", reduce, _reduce_cost, growth=TREE),
)
