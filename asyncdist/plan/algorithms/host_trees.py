"""Trees over hosts: one rank of each speaks for it, its head, and inside the host the others hang below that.

The trees of `trees`, twice: one over the hosts, in which heads stand for them, and one over the ranks of each host,
whose root is the head. So a vector enters a host once and leaves it as often as the tree over hosts says, where a tree
over ranks crosses hosts at every level that is not in step with them. Of a pair of trees the one is made of firsts, the
other of seconds. So a host has different heads in them; each host is a leaf in one, so that its card sends no more than
the vector (of all_reduce, two); and each rank has two children at most inside its host, over both.

With H hosts of q ranks, trees are at most ceil(log2 H) + ceil(log2 q) deep, of which the first are between hosts. With
one rank on each host, or one host, they are the trees over ranks. The last host may have fewer ranks than the others.
Of trees below a root of their own, that is the head of its host in all of them.

In order a head's lower hosts come first, then itself, the ranks of its host, and its higher hosts: a single tree whose
root is rank 0 is in rank order.

NCCL's trees, since 2.4, are over hosts too, with a chain of the host's ranks below each head (src/graph/connect.cc). As
many bytes pass each rank of a chain as pass it here, but it has q - 1 levels.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from asyncdist.plan.algorithms.trees import Node, pair_nodes, pair_tops, rooted_pair_nodes, tree_node
from asyncdist.plan.problem import Problem

__all__ = ["host_pair", "host_tree", "rooted_host_pair"]


class _Hosts(NamedTuple):
    """The ranks of a problem by host. Of trees below a root, `root` is that rank."""

    world: int
    size: int
    """Ranks of every host but perhaps the last."""
    root: int | None = None

    @classmethod
    def of(cls, problem: Problem, root: int | None = None) -> _Hosts:
        return cls(problem.world, min(problem.world, problem.ranks_per_host), root)

    @property
    def number(self) -> int:
        return -(-self.world // self.size)

    def ranks(self, host: int) -> int:
        """Ranks of one host."""
        return min(self.size, self.world - host * self.size)

    def head(self, tree: int, host: int) -> int:
        """The rank that speaks for a host in the first (0) or the second tree."""
        if self.root is not None and self.root // self.size == host:
            return self.root
        return host * self.size + pair_tops(self.ranks(host))[tree]

    def joined(self, tree: int, host: int, inside: Node, between: Node) -> Node:
        """A rank's node, given its node inside its host and its host's between hosts."""
        node = inside.renamed(partial(int.__add__, host * self.size))
        if not node.is_root:
            return node
        return between.renamed(partial(self.head, tree))._replace(inside=node.children)


def host_tree(problem: Problem, rank: int) -> Node:
    """A rank's node in the single tree whose root is the problem's, in rank order if that is rank 0."""
    hosts = _Hosts.of(problem, problem.root)
    (host, place), (root_host, root_place) = divmod(rank, hosts.size), divmod(problem.root, hosts.size)
    first = root_place if host == root_host else 0
    return hosts.joined(0, host, _turned(place, hosts.ranks(host), first), _turned(host, hosts.number, root_host))


def host_pair(problem: Problem, rank: int) -> tuple[Node, Node]:
    """A rank's nodes in the two trees over all hosts."""
    hosts = _Hosts.of(problem)
    host, place = divmod(rank, hosts.size)
    return _both(hosts, host, pair_nodes(place, hosts.ranks(host)), pair_nodes(host, hosts.number))


def rooted_host_pair(problem: Problem, rank: int) -> tuple[Node, Node]:
    """A rank's nodes in the two trees below the problem's root."""
    hosts = _Hosts.of(problem, problem.root)
    (host, place), (root_host, root_place) = divmod(rank, hosts.size), divmod(problem.root, hosts.size)
    ranks = hosts.ranks(host)
    inside = rooted_pair_nodes(place, ranks, root_place) if host == root_host else pair_nodes(place, ranks)
    return _both(hosts, host, inside, rooted_pair_nodes(host, hosts.number, root_host))


def _both(hosts: _Hosts, host: int, inside: tuple[Node, Node], between: tuple[Node, Node]) -> tuple[Node, Node]:
    first, second = (hosts.joined(tree, host, inside[tree], between[tree]) for tree in (0, 1))
    return first, second


def _turned(place: int, size: int, root: int) -> Node:
    """Node `place` of the single tree over places 0 .. size - 1 counted from the root on."""
    return tree_node((place - root) % size, size).renamed(lambda position: (position + root) % size)
