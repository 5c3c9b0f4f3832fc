"""Recursive halving and doubling: bytes, rounds, order, and chunks that nest."""

from __future__ import annotations

import pytest
from plan_counts import peers, plans_of, received, rounds, sent
from plan_proof.verify import verify

from asyncdist.plan.algorithms.halving_doubling import Fold
from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.chunks import WINDOW
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Recv, RecvReduce, Send

POWERS = [2, 4, 8, 16, 64]
OTHERS = [3, 5, 6, 7, 12, 13, 33]
FAMILY = [
    ("all_reduce", "halving_doubling"),
    ("reduce_scatter", "recursive_halving"),
    ("all_gather", "recursive_doubling"),
]


@pytest.mark.parametrize("world", POWERS)
@pytest.mark.parametrize(("collective", "algorithm"), FAMILY)
def test_powers_of_two_send_least_bytes_in_logarithmic_rounds(collective, algorithm, world):
    block, levels = 6, world.bit_length() - 1
    twice = 2 if collective == "all_reduce" else 1
    plans = plans_of(collective, algorithm, world, block * world if twice == 2 else block)
    assert rounds(plans) == twice * levels
    for plan in plans:
        assert sent(plan) == received(plan) == twice * block * (world - 1)
        assert len(peers(plan)) == levels


@pytest.mark.parametrize("world", OTHERS)
def test_folded_all_reduce_sends_two_vectors_more(world):
    fold = Fold.of(world)
    total = fold.active * 6
    plans = plans_of("all_reduce", "halving_doubling", world, total)
    assert rounds(plans) == 2 * fold.active.bit_length()
    for rank, plan in enumerate(plans):
        least = 2 * total * (fold.active - 1) // fold.active
        expected = least + total if rank < fold.folded else least
        assert sent(plan) == (total if rank < fold.folded and rank % 2 else expected)


@pytest.mark.parametrize("world", OTHERS)
def test_folded_reduce_scatter_and_all_gather(world):
    fold, block = Fold.of(world), 6
    total = world * block
    for rank, plan in enumerate(plans_of("reduce_scatter", "recursive_halving", world, block)):
        if rank < fold.folded and rank % 2:
            assert (sent(plan), received(plan)) == (total, block)
        elif rank < fold.folded:
            assert (sent(plan), plan.scratch_count >= total) == (total - block, True)
    for rank, plan in enumerate(plans_of("all_gather", "recursive_doubling", world, block)):
        if rank < fold.folded and rank % 2:
            assert (sent(plan), received(plan)) == (block, total - block)
        elif rank < fold.folded:
            assert received(plan) == total - block


@pytest.mark.parametrize("world", [1, 2, 3, 7, 8, 13])
@pytest.mark.parametrize("chunk_length", [2, 4, 100])
@pytest.mark.parametrize(("collective", "algorithm"), FAMILY)
def test_any_chunks_are_right(collective, algorithm, chunk_length, world):
    for count in (
        (9 * world, 9 * world + 5) if collective == "all_reduce" else (9, [3 + 5 * (r % 3) for r in range(world)])
    ):
        problem = Problem.of(collective, world, count)
        verify(problem, [build(problem, algorithm, rank, chunk_length) for rank in range(world)])


def test_all_reduce_keeps_rank_order():
    assert all(plan.ordered for plan in plans_of("all_reduce", "halving_doubling", 7, 20))


def test_the_largest_messages_go_to_the_neighbor():
    plan = plans_of("all_reduce", "halving_doubling", 8, 64)[5]
    assert [(step.peer, step.source.length) for step in plan.steps if isinstance(step, Send)][:3] == [
        (4, 32),
        (7, 16),
        (1, 8),
    ]


def test_a_chunk_is_passed_on_while_the_next_is_on_its_way():
    """Each chunk sent in the second round waits for the one chunk received in the first that it is."""
    plan = plans_of("all_reduce", "halving_doubling", 4, 64, chunk_length=2)[0]
    incoming = {index for index, step in enumerate(plan.steps) if isinstance(step, RecvReduce) and step.peer == 1}
    passed_on = [step.after for step in plan.steps if isinstance(step, Send) and step.peer == 2][:8]
    assert passed_on == [(index,) for index in sorted(incoming)[:8]]


@pytest.mark.parametrize(("chunks", "windowed"), [(WINDOW, 0), (WINDOW + 1, WINDOW + 1)])
def test_what_fits_into_a_window_is_received_at_once(chunks, windowed):
    for plan in plans_of("all_reduce", "halving_doubling", 2, 2 * 3 * chunks, chunk_length=3):
        assert sum(isinstance(step, RecvReduce) for step in plan.steps) == windowed
        waiting = [step for step in plan.steps[: 3 * chunks] if isinstance(step, Recv) and step.after]
        assert not waiting or windowed
