"""What a rank publishes may be read where it is only if nothing there overwrites it before all have read it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_proof.verify import PlanError, verify

from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Plan, Publish
from asyncdist.plan.summary import lendable

CHUNK = 3


def plans_of(problem: Problem, algorithm: str) -> list[Plan]:
    return [build(problem, algorithm, rank, CHUNK) for rank in range(problem.world)]


def items(plan: Plan) -> set[int]:
    return {index for index, step in enumerate(plan.steps) if isinstance(step, Publish)}


def claiming(plan: Plan, *indices: int) -> Plan:
    """The plan with some of its items called shielded."""
    steps = list(plan.steps)
    for index in indices:
        steps[index] = replace(steps[index], shielded=True)  # type: ignore[call-arg]
    return replace(plan, steps=tuple(steps))


def shielded(plan: Plan) -> set[int]:
    return {index for index in items(plan) if plan.steps[index].shielded}  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 3, 13, 40])
def test_what_large_operations_put_out_is_lendable(size: int) -> None:
    for collective in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        counts = (size,) * 3 if collective in ("gather", "scatter", "all_gather", "reduce_scatter") else size
        for plan in plans_of(Problem.of(collective, 3, counts, 2), "shared"):
            found = lendable(plan)
            assert all(item in found for item in items(plan)), collective


def test_what_is_overwritten_in_place_is_not() -> None:
    plan = build(Problem.of("all_reduce", 3, 10, 0), "shared_direct", 0, CHUNK)
    assert items(plan)
    found = lendable(plan)
    assert not any(item in found for item in items(plan))


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_a_true_claim_is_proven(world: int) -> None:
    problem = Problem.of("all_reduce", world, 5 * world, 0)
    plans = plans_of(problem, "shared")
    assert all(shielded(plan) for plan in plans)
    verify(problem, plans)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_wrong_claim_is_refused(world: int) -> None:
    """All of shared_direct's items are overwritten by the sums."""
    problem = Problem.of("all_reduce", world, 10, 0)
    plans = plans_of(problem, "shared_direct")
    verify(problem, plans)
    for rank in range(world):
        lying = [claiming(plan, *items(plan)) if plan.rank == rank else plan for plan in plans]
        with pytest.raises(PlanError, match=rf"rank {rank} says that step \d+ is shielded, but its step \d+"):
            verify(problem, lying)


def test_a_claim_that_a_reader_does_not_keep_is_refused() -> None:
    """The owner of a part puts its result out before it has read what the next rank has published of that part."""
    problem = Problem.of("all_reduce", 2, 2, 0)
    plans = plans_of(problem, "shared")
    verify(problem, plans)
    last = max(items(plans[1]))
    result = replace(plans[1].steps[last], after=())
    hasty = replace(plans[1], steps=(*plans[1].steps[:last], result, *plans[1].steps[last + 1 :]))
    with pytest.raises(PlanError):
        verify(problem, [plans[0], hasty])


def test_slices_of_scratch_and_output_are_told_apart() -> None:
    plan = build(Problem.of("reduce", 3, 40, 0), "shared", 1, CHUNK)
    inputs = {
        index
        for index, step in enumerate(plan.steps)
        if isinstance(step, Publish) and step.source.buffer == Buffer.INPUT
    }
    assert inputs
    found = lendable(plan)
    assert all(item in found for item in inputs)
