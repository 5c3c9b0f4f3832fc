"""Direct algorithms, and the window of linear ones."""

from __future__ import annotations

import pytest
from plan_counts import plans_of, received, rounds, sent
from plan_proof.verify import verify

from asyncdist.plan.algorithms.linear import EXCHANGE_WINDOW
from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Recv, Send


@pytest.mark.parametrize("world", [2, 3, 8, 13])
def test_one_round_and_a_message_to_everyone(world):
    for collective, count, each in (("all_reduce", 6, 6), ("all_gather", 6, 6), ("reduce_scatter", 6, 6)):
        plans = plans_of(collective, "direct", world, count)
        assert rounds(plans) == 1
        for plan in plans:
            assert sent(plan) == received(plan) == each * (world - 1)
            assert sum(isinstance(step, Send) for step in plan.steps) == world - 1


def at_once(plan, kind):
    return sum(isinstance(step, kind) and not step.after for step in plan.steps)


@pytest.mark.parametrize("others", [EXCHANGE_WINDOW, EXCHANGE_WINDOW + 1, EXCHANGE_WINDOW + 3])
def test_a_window_of_messages_is_under_way(others):
    world = others + 1
    assert at_once(plans_of("broadcast", "linear", world, 3)[0], Send) == EXCHANGE_WINDOW
    assert at_once(plans_of("scatter", "linear", world, 3)[0], Send) == EXCHANGE_WINDOW
    assert at_once(plans_of("all_reduce", "linear", world, 3)[0], Recv) == EXCHANGE_WINDOW
    assert at_once(plans_of("gather", "linear", world, 3)[0], Recv) == EXCHANGE_WINDOW
    gathering = plans_of("all_gather", "direct", world, 3)[1]
    assert (at_once(gathering, Send), at_once(gathering, Recv)) == (EXCHANGE_WINDOW, EXCHANGE_WINDOW)


@pytest.mark.parametrize(("others", "held"), [(33, 32), (34, 32), (40, 32)])
def test_operands_are_held_in_a_window(others, held):
    """One operand is received where the result will be, or, in all_reduce, those of lower ranks are reduced."""
    world = others + 1
    assert plans_of("reduce", "linear", world, 3)[0].scratch_count == 3 * held
    assert plans_of("reduce_scatter", "direct", world, 3)[5].scratch_count == 3 * held
    assert plans_of("all_reduce", "direct", world, 3)[5].scratch_count == 3 * (1 + held)
    assert plans_of("all_reduce", "linear", world, 3)[0].scratch_count == 3 * held
    assert plans_of("all_reduce", "linear", world, 3)[5].scratch_count == 0


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [("all_reduce", "direct"), ("all_reduce", "linear"), ("reduce", "linear"), ("reduce_scatter", "direct")],
)
def test_more_operands_than_a_window_are_folded_in_rank_order(collective, algorithm):
    world = EXCHANGE_WINDOW + 5
    for root in (0, 20, world - 1) if collective == "reduce" else (0,):
        problem = Problem.of(collective, world, 2, root)
        plans = [build(problem, algorithm, rank, 1) for rank in range(world)]
        assert plans[0].ordered
        verify(problem, plans)
