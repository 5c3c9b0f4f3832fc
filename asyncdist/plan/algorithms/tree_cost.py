"""What pipelines on one binary tree, and on a pair of them, cost.

Where hosts have several ranks, a chunk passes the levels of the tree over hosts and those inside a host, one after the
other; behind the first chunk, the others keep the busiest card busy.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncdist.plan.cost.load import AT_HOME, Hop, Load, Shape, Way, Work, cold

__all__ = ["PAIR", "SINGLE", "one_way_cost", "up_and_down_cost"]

SINGLE: Final = 1
PAIR: Final = 2
"""Trees."""

BETWEEN: Final = Way(1.0)
"""Nobody but heads sends to other hosts, and what both of a host's send is counted as one's."""


def one_way_cost(shape: Shape, *, trees: int, reduces: bool) -> Load:
    """Return what broadcast or, if it `reduces`, reduce asks on so many `trees`."""
    part = shape.total / trees
    pieces, others, stages = shape.pieces(part), shape.world - 1, _stages(shape)
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
    """Return what all_reduce asks on so many `trees`."""
    part = shape.total / trees
    pieces, others, stages = shape.pieces(part), shape.world - 1, _stages(shape)
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


def _stages(shape: Shape) -> tuple[_Stage, ...]:
    """The tree over hosts, if there are several, and that inside a host, if it has several ranks."""
    size = min(shape.world, shape.ranks_per_host)
    stages = (_Stage(-(-shape.world // size), BETWEEN), _Stage(size, AT_HOME))
    return tuple(stage for stage in stages if stage.size > 1)
