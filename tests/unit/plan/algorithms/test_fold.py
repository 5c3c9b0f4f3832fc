"""Folding ranks into a power of two of positions."""

from __future__ import annotations

from itertools import pairwise

from asyncdist.plan.algorithms.halving_doubling import Fold, FoldedBlocks
from asyncdist.plan.chunks import offsets
from asyncdist.plan.steps import Buffer


def test_positions_are_in_rank_order_and_even_ranks_act_for_pairs():
    assert Fold.of(1) == (1, 0)
    assert Fold.of(8) == (8, 0)
    assert Fold.of(11) == (8, 6)
    for world in range(1, 70):
        fold = Fold.of(world)
        acting = [fold.rank(position) for position in range(fold.active)]
        assert acting == [rank for rank in range(world) if rank >= fold.folded or rank % 2 == 0]
        assert [fold.position(rank) for rank in acting] == list(range(fold.active))
        assert all(fold.position(rank) == fold.position(rank - 1) for rank in range(1, fold.folded, 2))
        assert fold.rank(fold.active) == world


def test_pieces_cover_a_run_of_positions_once_the_own_first():
    world = 11
    counts = [5, 0, 9, 1, 7, 2, 0, 3, 12, 4, 6]
    blocks = FoldedBlocks(Fold.of(world), offsets(counts), 4)
    for position in range(8):
        for count in (1, 2, 4, 8):
            first = position & -count
            pieces = blocks.pieces(Buffer.OUTPUT, position, count)
            assert sum(piece.length for piece in pieces) == blocks.length(first, count)
            assert max((piece.length for piece in pieces), default=0) <= 4
            for one, other in pairwise(sorted(pieces)):
                assert one.end == other.offset
            half = blocks.pieces(Buffer.OUTPUT, position, count // 2) if count > 1 else []
            if blocks.length(first, count) > 4:
                assert pieces[: len(half)] == half
