"""Pieces through shared memory of which a rank knows only its own lengths: what is proven, and what is chosen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from plan_interpreter import check_results, run
from plan_proof.prove import exchange_problems, private_problems
from plan_proof.verify import PlanError, verify

from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.problem import PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.records import NO_LANE, USUAL_LANE
from asyncdist.plan.selection.selector import choose, parse_overrides, plan_for, plan_id
from asyncdist.plan.selection.tuning import DEFAULT_TUNING
from asyncdist.plan.steps import Fetch, Plan, Publish
from asyncdist.plan.summary import peers


def problems_of(collective: str, world: int, rng: random.Random) -> Sequence[Problem]:
    lengths = [[rng.choice((0, 0, 1, 5, 40)) for _ in range(world)] for _ in range(world)]
    if collective == "all_to_all_uneven":
        return exchange_problems(lengths)
    return private_problems(collective, lengths[0], rng.randrange(world))


def plans_of(problems: Sequence[Problem]) -> list[Plan]:
    return [build(problem, "shared", rank, 3) for rank, problem in enumerate(problems)]


@pytest.mark.parametrize("collective", PRIVATE_COLLECTIVES)
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_whatever_the_lengths(collective: str, world: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        problems = problems_of(collective, world, rng)
        plans = plans_of(problems)
        verify(problems, plans)
        check_results(problems, run(problems, plans, rng), ordered=False)


@pytest.mark.parametrize("collective", PRIVATE_COLLECTIVES)
def test_every_piece_is_an_item_even_if_it_is_empty(collective: str) -> None:
    """So the number of an item does not depend on lengths that its reader does not know."""
    shapes = set()
    for seed in range(20):
        problems = [problem._replace(root=0) for problem in problems_of(collective, 4, random.Random(seed))]
        if collective != "all_to_all_uneven":
            problems = list(private_problems(collective, problems[0].counts, 0))
        shapes.add(
            tuple(
                tuple(
                    (type(step), step.item, step.reader if isinstance(step, Publish) else step.peer)
                    for step in plan.steps
                    if isinstance(step, Publish | Fetch)
                )
                for plan in plans_of(problems)
            )
        )
    assert len(shapes) == 1


def test_lengths_that_disagree_are_no_plan() -> None:
    problems = list(exchange_problems([[1, 2], [3, 4]]))
    problems[1] = Problem.of("all_to_all_uneven", 2, (3, 4, 5, 4))
    with pytest.raises(PlanError):
        verify(problems, plans_of(problems))


def changed(plans: Sequence[Plan], rank: int, index: int, **changes: Any) -> list[Plan]:
    steps = list(plans[rank].steps)
    steps[index] = replace(steps[index], **changes)
    return [replace(plan, steps=tuple(steps)) if plan.rank == rank else plan for plan in plans]


def test_an_item_is_for_who_fetches_it() -> None:
    problems = exchange_problems([[1] * 3] * 3)
    plans = plans_of(problems)
    assert [step.reader for step in plans[1].steps if isinstance(step, Publish)] == [2, 0]
    with pytest.raises(PlanError, match=r"item 0 of rank 1 is for rank 0, and ranks \[2\] fetch it"):
        verify(problems, changed(plans, 1, 0, reader=0))


def test_readers_are_peers_to_whom_a_message_may_go() -> None:
    (scatter,) = (build(problem, "shared", 0, 3) for problem in private_problems("scatter_uneven", [1, 2, 3], 0)[:1])
    assert peers(scatter.steps) == (1, 2)


@pytest.mark.parametrize("collective", PRIVATE_COLLECTIVES)
def test_ranks_that_share_memory_use_it_whatever_they_know(collective: str) -> None:
    """The choice rests on nothing but what all know."""
    for seed in range(5):
        for rank, problem in enumerate(problems_of(collective, 3, random.Random(seed))):
            assert choose(problem, 4, memory=USUAL_LANE)[::2] == ("shared", False)
            assert choose(problem, 4, memory=USUAL_LANE._replace(single_copy=True))[::2] == ("shared", True)
            assert choose(problem, 4, memory=NO_LANE)[0] in ("linear", "pairwise")
            plan = plan_for(collective, rank, 3, problem.counts, 4, problem.root, memory=USUAL_LANE)
            assert plan.algorithm == "shared"
    assert (
        len({plan_id(collective, "shared", 3, (count,) * (6 if "all" in collective else 3)) for count in (1, 2)}) == 1
    )


def test_overrides_may_name_it_and_keep_off_it() -> None:
    assert parse_overrides("all_to_all_uneven:shared") == {"all_to_all_uneven": "shared"}
    (problem, *_) = exchange_problems([[1, 2], [3, 4]])
    for name in ("linear", "pairwise", "shared"):
        tuning = replace(DEFAULT_TUNING, overrides=(("all_to_all_uneven", name),))
        assert choose(problem, 4, tuning, memory=USUAL_LANE)[0] == name
        assert choose(problem, 4, tuning)[0] == ("linear" if name == "shared" else name)
