"""Binary trees over ranks: their shapes, the pipeline of chunks that a rank runs in one, and what pipelines cost.

There is one tree in rank order, and a pair of trees in which no rank has to do the work of two.

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

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.chunks import Window
from asyncdist.plan.cost.load import AT_HOME, Hop, Load, Shape, Way, Work, cold
from asyncdist.plan.steps import Slice

NO_PARENT: Final = -1


class Node(NamedTuple):
    """A rank's place in a tree. `lower` and `upper` are the children, left and right of it in the tree's order.

    `inside` are those of its own host, where it speaks for that host (`binary_trees`): right of it, left of `upper`.
    """

    parent: int = NO_PARENT
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    inside: tuple[int, ...] = ()

    @property
    def is_root(self) -> bool:
        """Whether the node has no parent."""
        return self.parent == NO_PARENT

    @property
    def children(self) -> tuple[int, ...]:
        """All children, none to two, and inside a host up to two more."""
        return self.lower + self.upper + self.inside

    @property
    def nearest_first(self) -> tuple[int, ...]:
        """All children, ordered so that each child's operand can be reduced as it comes, next to what is there."""
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


SENDS_UP: Final = 3
"""Chunks on their way to a parent at a time, in each of a pair of trees. Every rank is a leaf in one, where all of its
chunks are ready at once: given to the network together, they stand before those of the other tree, which others wait
for. Two already lose up to 4 % where a chunk takes less time than its message's latency; four gain a little less."""


class TreePipeline:
    """What one rank does in one tree, chunk by chunk, whatever else runs beside it.

    A call adds the steps of one chunk; all ranks call the same methods in the same order.

    Each child's chunks are received into a window of SCRATCH, of at most `longest` elements a chunk; the receives are
    posted as soon as there is room. Chunks that come to their place in OUTPUT go through a window too. Operands are
    merged in the tree's order. `paired` if the rank has chunks of another tree to send.
    """

    def __init__(self, builder: PlanBuilder, node: Node, longest: int, *, paired: bool = False) -> None:
        self._builder = builder
        self._node = node
        self._longest = longest
        self._whole = builder.window()
        self._upward = Window(SENDS_UP) if paired else None
        self._incoming: dict[int, list[Slice]] = {child: [] for child in node.children}
        self._reduced = 0

    def pass_down(self, piece: Slice) -> None:
        """Receive `piece` from the parent, if there is one, and send it to the children."""
        builder, node = self._builder, self._node
        if not node.is_root:
            self._whole.add(builder.recv(node.parent, piece, after=self._whole.after))
        for child in node.children:
            builder.send(child, piece)

    def reduce_in_place(self, piece: Slice) -> None:
        """Reduce what the children send into `piece`, and send it to the parent."""
        builder, node = self._builder, self._node
        incoming = {child: self._receive(child, piece.length) for child in node.children}
        for child in node.nearest_first:
            builder.reduce(incoming[child], piece, source_left=child in node.lower)
        if not node.is_root:
            self._send_up(piece)
        self._reduced += 1

    def reduce_from(self, piece: Slice, result: Slice) -> None:
        """Reduce `piece`, which is only read, with what the children send: into `result` at the root, else passed on.

        `result` is not touched where there is a parent.
        """
        builder, node = self._builder, self._node
        if not node.children:
            if node.is_root:
                builder.copy(piece, result)
            else:
                self._send_up(piece)
            return
        first, *others = node.nearest_first
        if node.is_root:
            total = result
            self._whole.add(builder.recv(first, total, after=self._whole.after))
        else:
            total = self._receive(first, piece.length)
        incoming = [self._receive(child, piece.length) for child in others]
        builder.reduce(piece, total, source_left=first not in node.lower)
        for child, operand in zip(others, incoming, strict=True):
            builder.reduce(operand, total, source_left=child in node.lower)
        if not node.is_root:
            self._send_up(total)
        self._reduced += 1

    def _send_up(self, piece: Slice) -> None:
        builder, window = self._builder, self._upward
        if window is None:
            builder.send(self._node.parent, piece)
        else:
            window.add(builder.send(self._node.parent, piece, after=window.after))

    def _receive(self, child: int, length: int) -> Slice:
        window = self._incoming[child]
        if len(window) < self._builder.window_size:
            window.append(self._builder.scratch(self._longest))
        room = window[self._reduced % self._builder.window_size]
        target = Slice(room.buffer, room.offset, length)
        self._builder.recv(child, target)
        return target


SINGLE: Final = 1
PAIR: Final = 2
"""Trees."""

BETWEEN: Final = Way(1.0)
"""Only heads send to other hosts, and what both of a host's send is counted as one's."""


def one_way_cost(shape: Shape, *, trees: int, reduces: bool = False) -> Load:
    """Return what broadcast, or reduce if `reduces`, asks on one or two `trees`.

    Where hosts have several ranks, a chunk passes the levels of the tree over hosts, then those inside a host. Behind
    the first chunk, the other chunks keep the busiest card busy.
    """
    part = shape.total / trees
    pieces, others, stages = shape.pieces(part), shape.world - 1, _stages(shape, trees)
    chunk = part / pieces
    hops, idle = [], []
    for number, stage in enumerate(stages):
        # A pair hangs below the root, which gives both halves: one level more.
        first = number == 0
        levels = (stage.size - 2).bit_length() + 1 if trees == PAIR and first else stage.levels
        # A level passes a chunk to two children, one after the other; so does each following chunk on the busiest link.
        fan = trees if trees == PAIR and first else stage.fan
        worked = fan * cold(chunk, chunk) if reduces else 0.0
        behind = pieces - 1 if first else 0
        hops.append(Hop(levels, (levels + behind) * fan * chunk, levels * worked, stage.way))
        waits = levels - 1 if first else levels
        idle.append(Hop(levels, waits * fan * chunk, waits * worked, stage.way))
    once = shape.total
    if len(stages) == 1:
        children = PAIR if trees == PAIR else stages[0].fan
        links = children + trees
    else:  # of a pair the root has two children among hosts and two inside its own; a head two, and one inside
        children = 2 * PAIR if trees == PAIR else stages[0].fan + 1
        links = children + 1
    sent, received = (once, children * part) if reduces else (children * part, once)
    worked = children * cold(chunk, chunk) if reduces else 0.0
    busiest = Work(links * pieces, sent, received, pieces * worked)
    all_worked = cold(others * once, chunk) if reduces else 0.0
    everyone = Work(2 * others * trees * pieces, others * once, others * once, all_worked)
    leaving = once if reduces or trees == PAIR else stages[0].fan * part
    return Load(tuple(hops), tuple(idle), busiest, everyone, 0.0 if shape.one_host else leaving)


def up_and_down_cost(shape: Shape, *, trees: int) -> Load:
    """Return what all_reduce asks on one or two `trees`."""
    part = shape.total / trees
    pieces, others, stages = shape.pieces(part), shape.world - 1, _stages(shape, trees)
    chunk = part / pieces
    reduced = cold(chunk, chunk)
    hops, idle = [], []
    for number, stage in enumerate(stages):
        # To the parents in all trees and to two children: three chunks of a single tree, four of a pair.
        behind = (pieces - 1) * stage.links(trees) if number == 0 else 0
        filling, worked = 2 * stage.levels * stage.fan, stage.levels * stage.fan * reduced
        hops.append(Hop(2 * stage.levels, (filling + behind) * chunk, worked, stage.way))
        idle.append(Hop(2 * stage.levels, (filling - (stage.fan if number == 0 else 0)) * chunk, worked, stage.way))
    outer = stages[0]
    children, links = outer.children(trees), outer.links(trees)
    if len(stages) > 1:
        # A head is inside one tree over hosts, with a child in its own host, and a leaf there in another.
        inside = stages[1]
        children = max(outer.fan + 1, inside.children(trees))
        links = max(outer.links(SINGLE) + trees, inside.links(trees))
    moved = links * part
    busiest = Work(2 * links * pieces, moved, moved, pieces * children * reduced)
    total = others * shape.total
    everyone = Work(4 * others * trees * pieces, 2 * total, 2 * total, cold(total, chunk))
    return Load(tuple(hops), tuple(idle), busiest, everyone, 0.0 if shape.one_host else outer.links(trees) * part)


class _Stage(NamedTuple):
    """One tree, or a pair: over the hosts, or over the ranks of a host."""

    size: int
    way: Way

    @property
    def levels(self) -> int:
        return (self.size - 1).bit_length()

    @property
    def fan(self) -> int:
        """Children of an inner rank in one tree: three ranks are a line."""
        return min(2, self.size // 2)

    def children(self, trees: int) -> int:
        """Children of the busiest rank in all trees."""
        return min(2, self.size - 1) if trees == PAIR else self.fan

    def links(self, trees: int) -> int:
        """Its children and parents in all trees."""
        return self.children(trees) + trees if self.size > 2 else trees


def _stages(shape: Shape, trees: int) -> tuple[_Stage, ...]:
    """The tree over hosts, if there are several, and that inside a host, if it has several ranks."""
    size = min(shape.world, shape.ranks_per_host)
    hosts = -(-shape.world // size)
    if shape.hosts:  # of which a single tree knows nothing
        size, hosts = (size, len(shape.host_sizes)) if trees == PAIR else (1, shape.world)
    stages = (_Stage(hosts, BETWEEN), _Stage(size, AT_HOME))
    return tuple(stage for stage in stages if stage.size > 1)
