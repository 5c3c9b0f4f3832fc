"""Circulant schedules in chunks."""

from __future__ import annotations

import pytest
from plan_counts import plans_of, received, rounds, sent
from plan_proof.verify import verify

from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import RecvReduce, Send, Symmetry

COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather"]


@pytest.mark.parametrize("world", [2, 3, 5, 8, 13, 24])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_chunks_change_neither_bytes_nor_rounds(collective, world):
    twice = 2 if collective == "all_reduce" else 1
    count = 12 * world if twice == 2 else 12
    for chunk_length in (3, 5, 12, 1 << 30):
        plans = plans_of(collective, "circulant", world, count, chunk_length=chunk_length)
        assert all(sent(plan) == received(plan) == twice * 12 * (world - 1) for plan in plans)
        assert max(step.source.length for step in plans[0].steps if isinstance(step, Send)) <= chunk_length
    assert rounds(plans) <= twice * (world - 1).bit_length()


@pytest.mark.parametrize("world", [1, 2, 3, 7, 8, 13])
@pytest.mark.parametrize("chunk_length", [2, 4, 100])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_any_chunks_are_right(collective, chunk_length, world):
    uneven = [3 + 5 * (rank % 3) for rank in range(world)]
    for count in (9 * world, 9 * world + 5) if collective == "all_reduce" else (9, uneven):
        problem = Problem.of(collective, world, count)
        verify(problem, [build(problem, "circulant", rank, chunk_length) for rank in range(world)])


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_large_blocks_make_ranks_alike(collective):
    """Chunks of single blocks are rotated from rank to rank; runs of small blocks wrap at some."""
    count = 6 * 5 if collective == "all_reduce" else 5
    assert plans_of(collective, "circulant", 6, count, chunk_length=5)[1].symmetry is Symmetry.ROTATION
    assert plans_of(collective, "circulant", 6, count, chunk_length=6)[1].symmetry is Symmetry.NONE


def test_what_is_passed_on_next_comes_first():
    """With 4 ranks slots 2 and 3 are sent in the first round, and slot 1 of what arrives goes on in the second."""
    plan = plans_of("all_reduce", "circulant", 4, 4 * 40, chunk_length=2)[0]
    first = [step for step in plan.steps if isinstance(step, RecvReduce) and step.peer == 2]
    assert {step.target.offset // 40 for step in first[:20]} == {1}
    assert {step.target.offset // 40 for step in first[20:]} == {0}
