"""Pipelined binary trees, one or two of them: broadcast, reduce and all_reduce at the latency of a tree.

Chunks are passed on as soon as they have arrived and, upwards, been reduced; all_reduce goes up and down the same tree,
both at once. A tree (`trees`) is L = ceil(log2 p) levels deep at most. With k chunks, m bytes, latency a, b seconds per
byte and g per byte reduced; of `double_tree` with the best k:

| algorithm | collective | cost | bytes sent by the busiest rank |
| --- | --- | --- | --- |
| binary_tree | broadcast | (L + k - 1)(a + 2mb/k); 2mb + 2aL + 4 sqrt(abmL) with the best k | 2m |
| binary_tree | reduce | as broadcast, + 2mg/k a level; the busiest rank receives 2m | m |
| binary_tree | all_reduce | (2L + k - 1)(a + 3mb/k + 2mg/k) | 3m |
| double_tree | broadcast | mb + 2aL + sqrt(8abmL) | m |
| double_tree | reduce | as broadcast, + mg | m |
| double_tree | all_reduce | 2mb + mg + 4aL + 2 sqrt(8abmL) | 2m |

`binary_tree`: one tree, in which the root has position 0. An inner rank serves two children and so moves the vector
twice or thrice. The tree is in rank order, so all_reduce, and reduce to rank 0, need no commuting operation.

`double_tree`: two trees carry half of the vector each, so arranged that no rank has more than two children over both.
Each rank moves the vector about once. The operation must commute. For all_reduce the trees span all ranks; for
broadcast and reduce all but the root, which exchanges with the roots of both. Few chunks are on their way up a tree at
a time: a leaf could send half the vector at once, but its parent in the other tree waits for what it sends there.

All ranks get the bits of a tree's root. Temporary memory: a window of chunks for each child.

Where hosts have several ranks, there is a tree over the hosts, and one over the ranks of each host. In the tree over
hosts a rank of each stands for it, its head, which is the root of the tree inside. So a vector enters a host once, and
leaves it as often as the tree over hosts says. The table then says what a host's network card sends, with L the levels
over hosts; a head moves the vector once more each way, for a child inside. With H hosts of q ranks, trees are
ceil(log2 H) + ceil(log2 q) levels deep at most. The last host may have fewer ranks; of `double_tree`, any host may have
any ranks. With one rank on each host, or one
host, these are the trees over ranks. Of a pair of trees, a host has different heads in both, and is a leaf in one of
them; each rank has two children at most inside its host, over both. The root is the head of its host in all trees.

In order a head's lower hosts come first, then the head, the ranks of its host, and its higher hosts: a single tree
whose root is rank 0 is in rank order.

Sources: Pješivac-Grbović, Angskun, Bosilca et al., 2007 (see `chain`); Sanders, Speck and Träff, 2009 (see `trees`).
NCCL's trees, since 2.4, are over hosts too, with a chain of the host's ranks below each head (src/graph/connect.cc). As
many bytes pass each rank of a chain as pass it here, but a chain has q - 1 levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Final, NamedTuple

from asyncdist.plan.algorithms.algorithm import TREE, Algorithm
from asyncdist.plan.algorithms.trees import (
    PAIR,
    SINGLE,
    Node,
    TreePipeline,
    one_way_cost,
    pair_nodes,
    pair_tops,
    rooted_pair_nodes,
    tree_node,
    up_and_down_cost,
)
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import blocks_of, partition, split
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Slice

__all__ = ["host_pair", "host_tree", "rooted_host_pair"]


def all_reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Reduce up the tree and broadcast down it, chunk by chunk."""
    for tree, piece in _chunks(builder, problem, Buffer.OUTPUT, chunk_length):
        tree.reduce_in_place(piece)
        tree.pass_down(piece)
    return builder.build(ordered=builder.algorithm == "binary_tree")


def broadcast(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Pass chunks down the tree; of two trees, in turn."""
    for tree, piece in _chunks(builder, problem, Buffer.OUTPUT, chunk_length):
        tree.pass_down(piece)
    return builder.build()


def reduce(builder: PlanBuilder, problem: Problem, chunk_length: int) -> Plan:
    """Reduce chunks up the tree, of two trees in turn; INPUT is only read."""
    single = builder.algorithm == "binary_tree"
    if problem.world == 1 and not single:
        builder.copy(Slice(Buffer.INPUT, 0, problem.total), Slice(Buffer.OUTPUT, 0, problem.total))
        return builder.build()
    for tree, piece in _chunks(builder, problem, Buffer.INPUT, chunk_length):
        tree.reduce_from(piece, Slice(Buffer.OUTPUT, piece.offset, piece.length))
    return builder.build(ordered=single and problem.root == 0)


def _chunks(
    builder: PlanBuilder, problem: Problem, buffer: Buffer, chunk_length: int
) -> Iterator[tuple[TreePipeline, Slice]]:
    """Chunks of the vector, or of both halves in turn, each with the tree it travels in."""
    nodes: tuple[Node, ...]
    if builder.algorithm == "binary_tree":
        nodes = (host_tree(problem, builder.rank),)
    else:
        nodes = (host_pair if problem.collective == "all_reduce" else rooted_host_pair)(problem, builder.rank)
    parts = [split(part, chunk_length) for part in blocks_of(buffer, partition(problem.total, len(nodes)))]
    longest = max((piece.length for part in parts for piece in part), default=0)
    trees = [TreePipeline(builder, node, longest, paired=len(nodes) == PAIR) for node in nodes]
    for pieces in zip_longest(*parts):
        for tree, piece in zip(trees, pieces, strict=True):
            if piece is not None:
                yield tree, piece


class _Hosts(NamedTuple):
    """The ranks of a problem by host. Of trees below a root, `root` is that rank."""

    problem: Problem
    root: int | None = None

    @property
    def number(self) -> int:
        return len(self.problem.by_host)

    def ranks(self, host: int) -> int:
        """Ranks of one host."""
        return len(self.problem.by_host[host])

    def head(self, tree: int, host: int) -> int:
        """The rank that speaks for a host in the first (0) or the second tree."""
        if self.root is not None and self.problem.place(self.root)[0] == host:
            return self.root
        return self.problem.by_host[host][pair_tops(self.ranks(host))[tree]]

    def joined(self, tree: int, host: int, inside: Node, between: Node) -> Node:
        """A rank's node, given its node inside its host and its host's between hosts."""
        node = inside.renamed(self.problem.by_host[host].__getitem__)
        if not node.is_root:
            return node
        return between.renamed(partial(self.head, tree))._replace(inside=node.children)


def host_tree(problem: Problem, rank: int) -> Node:
    """A rank's node in the single tree whose root is the problem's, in rank order if that is rank 0.

    So it knows hosts of equal size only.
    """
    problem = problem._replace(hosts=())
    hosts = _Hosts(problem, problem.root)
    (host, place), (root_host, root_place) = problem.place(rank), problem.place(problem.root)
    first = root_place if host == root_host else 0
    return hosts.joined(0, host, _turned(place, hosts.ranks(host), first), _turned(host, hosts.number, root_host))


def host_pair(problem: Problem, rank: int) -> tuple[Node, Node]:
    """A rank's nodes in the two trees over all hosts."""
    hosts = _Hosts(problem)
    host, place = problem.place(rank)
    return _both(hosts, host, pair_nodes(place, hosts.ranks(host)), pair_nodes(host, hosts.number))


def rooted_host_pair(problem: Problem, rank: int) -> tuple[Node, Node]:
    """A rank's nodes in the two trees below the problem's root."""
    hosts = _Hosts(problem, problem.root)
    (host, place), (root_host, root_place) = problem.place(rank), problem.place(problem.root)
    ranks = hosts.ranks(host)
    inside = rooted_pair_nodes(place, ranks, root_place) if host == root_host else pair_nodes(place, ranks)
    return _both(hosts, host, inside, rooted_pair_nodes(host, hosts.number, root_host))


def _both(hosts: _Hosts, host: int, inside: tuple[Node, Node], between: tuple[Node, Node]) -> tuple[Node, Node]:
    first, second = (hosts.joined(tree, host, inside[tree], between[tree]) for tree in (0, 1))
    return first, second


def _turned(place: int, size: int, root: int) -> Node:
    """Node `place` of the single tree over places 0 .. size - 1 counted from the root on."""
    return tree_node((place - root) % size, size).renamed(lambda position: (position + root) % size)


ALGORITHMS: Final = (
    Algorithm("all_reduce", "binary_tree", all_reduce, partial(up_and_down_cost, trees=SINGLE), TREE, ordered=True),
    Algorithm("broadcast", "binary_tree", broadcast, partial(one_way_cost, trees=SINGLE), TREE),
    Algorithm("reduce", "binary_tree", reduce, partial(one_way_cost, trees=SINGLE, reduces=True), TREE),
    Algorithm("all_reduce", "double_tree", all_reduce, partial(up_and_down_cost, trees=PAIR), TREE),
    Algorithm("broadcast", "double_tree", broadcast, partial(one_way_cost, trees=PAIR), TREE),
    Algorithm("reduce", "double_tree", reduce, partial(one_way_cost, trees=PAIR, reduces=True), TREE),
)
