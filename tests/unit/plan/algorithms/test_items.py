"""Plans of items: one message each, by every algorithm, and proven."""

from __future__ import annotations

import pytest
from plan_proof.verify import PlanError, verify

from asyncdist.plan.algorithms.registry import algorithms, build
from asyncdist.plan.builder import one_by_one
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Plan, Recv, Send

CASES = [
    (collective, name)
    for collective in ("all_gather", "broadcast", "gather", "scatter")
    for name in algorithms(collective)
]


def item_plan(collective: str, rank: int, world: int, root: int, algorithm: str) -> Plan:
    return one_by_one(build(Problem.of(collective, world, 1, root), algorithm, rank, 1))


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_every_algorithm_moves_items_one_by_one(collective: str, algorithm: str) -> None:
    for world in (*range(1, 14), 16, 33):
        for root in {0, world // 2, world - 1} if collective != "all_gather" else {0}:
            plans = [item_plan(collective, rank, world, root, algorithm) for rank in range(world)]
            verify(Problem.of(collective, world, 1, root), plans)
            for plan in plans:
                assert all(step.source.length == 1 for step in plan.steps if isinstance(step, Send))
                assert all(step.target.length == 1 for step in plan.steps if isinstance(step, Recv))


def test_a_message_of_another_item_is_found() -> None:
    """The proof is able to fail: a rank that sends its items in another order."""
    world = 4
    plans = [item_plan("scatter", rank, world, 0, "linear") for rank in range(world)]
    swapped = [item_plan("scatter", 0, world, 0, "linear")]
    steps = list(swapped[0].steps)
    first, second = (index for index, step in enumerate(steps) if isinstance(step, Send) and step.peer in (1, 2))
    steps[first], steps[second] = (
        Send(steps[first].peer, steps[second].source, steps[first].slot),
        Send(steps[second].peer, steps[first].source, steps[second].slot),
    )
    object.__setattr__(swapped[0], "steps", tuple(steps))
    verify(Problem.of("scatter", world, 1, 0), plans)
    with pytest.raises(PlanError):
        verify(Problem.of("scatter", world, 1, 0), [*swapped, *plans[1:]])


def test_what_reduces_is_refused() -> None:
    with pytest.raises(ValueError, match="reduces"):
        one_by_one(build(Problem.of("all_reduce", 2, 2), "ring", 0, 1))
