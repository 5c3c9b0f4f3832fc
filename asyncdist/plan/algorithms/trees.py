"""Binary trees over ranks: one in rank order, and the pair of them in which nobody has to do the work of two.

The tree of n positions: position 0 is the root; its only child is half the smallest power of two that is not below n.
For a position x > 0 let `low` be its lowest bit set:

- Its parent is x with bit `low` cleared and the next one set, or, where that is beyond the tree, only with it cleared.
- If low = 1 it is a leaf. Else, with d = low / 2, its children are x - d and x + e, where e is the first of
  d, d/2, d/4, ... with x + e in the tree; if there is none, x has one child.

So the positions below a node's lower child are to its left and those below the other to its right: the tree is in
order. It is at most ceil(log2 n) deep.

The pair: in the first tree rank r has position r; in the second, position n-1-r if n is even (the mirror image), else
(r-1) mod n (shifted by one). Over both trees every rank has at most two children: those inner in the one are leaves
in the other, but for rank 0 where n is odd, which has one child in each. So if each tree carries half the bytes, no
rank sends more than all of them.

The pair below a root: both trees over all ranks but that one, in the order in which they follow it, and the two tops
below it. What is given out by one rank, or comes together there, so passes it once.

Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35(12), 2009; the numbering is that of NCCL's trees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

__all__ = ["Node", "pair_nodes", "pair_tops", "rooted_pair_nodes", "tree_node"]

NO_PARENT: Final = -1


class Node(NamedTuple):
    """A rank's place in a tree. `lower` and `upper` are the children, left and right of it in the tree's order.

    `inside` are those of its own host, where it speaks for that to others (`host_trees`): right of it, left of `upper`.
    """

    parent: int = NO_PARENT
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    inside: tuple[int, ...] = ()

    @property
    def is_root(self) -> bool:
        """Whether nobody is above."""
        return self.parent == NO_PARENT

    @property
    def children(self) -> tuple[int, ...]:
        """All children, none to two, and inside a host up to two more."""
        return self.lower + self.upper + self.inside

    @property
    def nearest_first(self) -> tuple[int, ...]:
        """All children, in an order in which what they send can be reduced as it comes, next to what is there."""
        return self.inside + self.lower + self.upper

    def renamed(self, name: Callable[[int], int]) -> Node:
        """The same place in the tree whose position x is called `name(x)`."""
        parent = self.parent if self.is_root else name(self.parent)
        return Node(parent, tuple(map(name, self.lower)), tuple(map(name, self.upper)), tuple(map(name, self.inside)))


def tree_node(position: int, size: int) -> Node:
    """Node `position` of the tree of `size` positions."""
    if position == 0:
        return Node(upper=(1 << (size - 1).bit_length() - 1,) if size > 1 else ())
    low = position & -position
    parent = (position ^ low) | 2 * low
    if parent >= size:
        parent = position ^ low
    if low == 1:
        return Node(parent)
    distance = low // 2
    lower = (position - distance,)
    while distance and position + distance >= size:
        distance //= 2
    return Node(parent, lower, (position + distance,) if distance else ())


def pair_nodes(rank: int, size: int) -> tuple[Node, Node]:
    """A rank's nodes in the two trees over ranks 0 .. size - 1."""
    if size % 2 == 0:
        second = tree_node(size - 1 - rank, size).renamed(lambda position: size - 1 - position)
    else:
        second = tree_node((rank - 1) % size, size).renamed(lambda position: (position + 1) % size)
    return tree_node(rank, size), second


def pair_tops(size: int) -> tuple[int, int]:
    """Return the roots of the two trees over ranks 0 .. size - 1."""
    return 0, 1 % size if size % 2 else size - 1


def rooted_pair_nodes(rank: int, size: int, root: int) -> tuple[Node, Node]:
    """A rank's nodes in the two trees over ranks 0 .. size - 1 that hang below `root`."""
    if rank != root:

        def name(index: int) -> int:
            return (root + 1 + index) % size

        first, second = (node.renamed(name) for node in pair_nodes((rank - root - 1) % size, size - 1))
        return _below(first, root), _below(second, root)
    if size == 1:
        return Node(), Node()
    first, second = (Node(upper=((root + 1 + top) % size,)) for top in pair_tops(size - 1))
    return first, second


def _below(node: Node, root: int) -> Node:
    return node._replace(parent=root) if node.is_root else node
