"""Rings on a grid: its shape, and what passes between hosts."""

from __future__ import annotations

import pytest
from plan_counts import plans_of, received, rounds, sent
from plan_proof.verify import verify

from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.algorithms.ring_2d import SETS, row_length
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Recv, RecvReduce, Send, Symmetry

COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather"]
GRIDS = [(4, 2), (6, 2), (6, 3), (12, 4), (16, 4), (24, 8)]


@pytest.mark.parametrize(
    ("world", "ranks_per_host", "expected"),
    [
        (24, 8, 8),
        (24, 2, 2),
        (12, 8, 4),  # hosts of eight, the last with four
        (24, 1, 4),  # unknown hosts: nearly a square
        (24, 24, 4),
        (24, 48, 4),
        (16, 1, 4),
        (13, 4, 1),
        (13, 13, 1),
        (2, 2, 1),
        (1, 1, 1),
        (24_576, 8, 8),
    ],
)
def test_rows_are_within_hosts_or_make_a_square(world, ranks_per_host, expected):
    assert row_length(Problem.of("all_reduce", world, 1, ranks_per_host=ranks_per_host)) == expected


@pytest.mark.parametrize(("world", "width"), GRIDS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_least_bytes_and_few_of_them_between_hosts(collective, world, width):
    twice = 2 if collective == "all_reduce" else 1
    height, block = world // width, 6
    count = block * world if twice == 2 else block
    plans = plans_of(collective, "ring_2d", world, count, chunk_length=4, ranks_per_host=width)
    for rank, plan in enumerate(plans):
        assert sent(plan) == received(plan) == twice * block * (world - 1)
        crossing = [step for step in plan.steps if isinstance(step, Send) and step.peer // width != rank // width]
        assert sum(step.source.length for step in crossing) == twice * block * (height - 1)
        assert {step.peer % width for step in crossing} == {rank % width}


@pytest.mark.parametrize(("world", "width"), GRIDS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_rounds_are_those_of_a_row_and_a_column(collective, world, width):
    twice = 2 if collective == "all_reduce" else 1
    plans = plans_of(collective, "ring_2d", world, 2 * world, ranks_per_host=width)
    assert rounds(plans) == twice * (width + world // width - 2)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_prime_world_is_the_plain_ring(collective):
    for grid, plain in zip(plans_of(collective, "ring_2d", 7, 14), plans_of(collective, "ring", 7, 14), strict=True):
        assert (grid.steps, grid.algorithm, grid.symmetry) == (plain.steps, "ring_2d", Symmetry.ROTATION)


def test_reduce_scatter_holds_two_columns_of_partial_sums_at_most():
    for width, columns in ((2, 1), (3, SETS), (4, SETS)):
        for plan in plans_of("reduce_scatter", "ring_2d", 12, 5, chunk_length=2, ranks_per_host=width):
            assert plan.scratch_count == columns * 5 * 12 // width


@pytest.mark.parametrize(("ranks_per_host", "hosts"), [(2, ()), (3, ()), (1, (0, 1, 0, 1, 2, 2)), (1, (0, 0, 0, 1))])
@pytest.mark.parametrize("count", [24, 121, 333])
def test_pieces_of_several_chunks_are_right(ranks_per_host, hosts, count):
    world = len(hosts) or 6
    problem = Problem.of("all_reduce", world, count, 0, ranks_per_host)._replace(hosts=hosts)
    for chunk_length in (1, 3, 7):
        verify(problem, [build(problem, "ring_2d", rank, chunk_length) for rank in range(world)])


def test_columns_begin_with_the_first_chunks_of_rows_and_rows_end_with_the_last_of_columns():
    """A link between hosts waits for one chunk of its host before it begins, and its host for one after it ends."""
    for rank, plan in enumerate(plans_of("all_reduce", "ring_2d", 6, 96, chunk_length=2, ranks_per_host=2)):

        def of(kind, peer, steps=plan.steps):
            return [index for index, step in enumerate(steps) if isinstance(step, kind) and step.peer == peer]

        above, below, beside = (rank - 2) % 6, (rank + 2) % 6, rank ^ 1
        in_row, out, back = of(RecvReduce, beside), of(Send, beside), of(Recv, beside)
        down = of(Send, below)
        assert [plan.steps[index].target.length for index in in_row[:4]] == [1, 1, 3, 3]
        assert [plan.steps[index].after for index in down[:2]] == [(in_row[0],), (in_row[2],)]
        assert plan.steps[of(RecvReduce, above)[0]].after == (in_row[1],)
        assert plan.steps[out[-1]].source.length == 1
        assert plan.steps[out[-1]].after == (of(Recv, above)[-1],)
        assert len(in_row) == 2 * (1 + 1 + 1 + 1) + 3  # of three blocks with six chunks and four halves each
        assert len(back) == 3 + 3 + (1 + 1 + 1 + 1)
