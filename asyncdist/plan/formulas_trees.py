"""What the pipelined trees ask: broadcast, reduce and all_reduce, on a single binary tree and on a pair of them."""

from __future__ import annotations

from asyncdist.plan.load import Hop, Load, Shape, Work, cold

__all__ = [
    "binary_all_reduce",
    "binary_broadcast",
    "binary_reduce",
    "double_all_reduce",
    "double_broadcast",
    "double_reduce",
]


def binary_broadcast(shape: Shape) -> Load:
    """L levels; an inner rank sends every chunk twice."""
    return _one_way(shape, shape.levels, trees=1, reduces=False)


def binary_reduce(shape: Shape) -> Load:
    """The same upward, two operands to reduce at each inner rank."""
    return _one_way(shape, shape.levels, trees=1, reduces=True)


def binary_all_reduce(shape: Shape) -> Load:
    """Up and down at once: an inner rank sends every chunk to its parent and to two children."""
    return _up_and_down(shape, trees=1)


def double_broadcast(shape: Shape) -> Load:
    """Two halves, each on its tree below the root; no rank has more than two children in both."""
    return _one_way(shape, (shape.world - 2).bit_length() + 1, trees=2, reduces=False)


def double_reduce(shape: Shape) -> Load:
    """The same upward."""
    return _one_way(shape, (shape.world - 2).bit_length() + 1, trees=2, reduces=True)


def double_all_reduce(shape: Shape) -> Load:
    """Both halves up and down their trees, all at once."""
    return _up_and_down(shape, trees=2)


def _one_way(shape: Shape, levels: int, *, trees: int, reduces: bool) -> Load:
    part = shape.total / trees
    pieces, way, others = shape.pieces(part), shape.tree(), shape.world - 1
    chunk = part / pieces
    children = 2 if trees > 1 else _children(shape, trees)
    moved = children * part
    worked = children * cold(chunk, chunk) if reduces else 0.0
    # A level passes a chunk to two children, one after the other; so does each following chunk on the busiest link.
    path = Hop(levels, (levels + pieces - 1) * children * chunk, levels * worked, way)
    idle = Hop(levels, (levels - 1) * children * chunk, (levels - 1) * worked, way)
    once = shape.total
    sent, received = (once, moved) if reduces else (moved, once)
    busiest = Work((children + trees) * pieces, sent, received, pieces * worked)
    all_worked = cold(others * once, chunk) if reduces else 0.0
    everyone = Work(2 * others * trees * pieces, others * once, others * once, all_worked)
    return Load((path,), (idle,), busiest, everyone, _leaving(shape, trees, sent))


def _up_and_down(shape: Shape, *, trees: int) -> Load:
    part = shape.total / trees
    pieces, way, levels, others = shape.pieces(part), shape.tree(), shape.levels, shape.world - 1
    chunk = part / pieces
    children = _children(shape, trees)
    fan = _children(shape, 1)
    # To the parents in all trees and to two children: three chunks of a single tree, four of a pair.
    sent = children + trees if others > 1 else trees
    worked = children * cold(chunk, chunk)
    path = Hop(2 * levels, (2 * levels * fan + (pieces - 1) * sent) * chunk, levels * fan / children * worked, way)
    idle = Hop(2 * levels, (2 * levels - 1) * fan * chunk, levels * fan / children * worked, way)
    moved = sent * part
    busiest = Work(2 * sent * pieces, moved, moved, pieces * worked)
    total = others * shape.total
    everyone = Work(4 * others * trees * pieces, 2 * total, 2 * total, cold(total, chunk))
    return Load((path,), (idle,), busiest, everyone, _leaving(shape, trees, moved))


def _children(shape: Shape, trees: int) -> int:
    """Children of the busiest rank in all trees: three ranks in a single tree are a line."""
    return min(2, shape.world - 1) if trees > 1 else min(2, shape.world // 2)


def _leaving(shape: Shape, trees: int, sent: float) -> float:
    """Bytes that leave the busiest host; `sent` by its busiest rank.

    Of two trees at most one is in step with the hosts, so that more of the other's edges lead from one to another.
    """
    if shape.ranks_per_host == 1:
        return sent
    return shape.tree().leaving * (1.5 if trees > 1 else 1.0) * shape.total
