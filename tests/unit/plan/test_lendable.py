"""What a rank publishes may be read where it is only if nothing there overwrites it before all have read it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncdist.executor.program import Program
from asyncdist.plan.problem import Problem
from asyncdist.plan.registry import SHARED_ALGORITHMS, build
from asyncdist.plan.steps import Buffer, Fetch, FetchReduce, Plan, Publish, Send, Step

CHUNK = 3
SHARED = [(collective, name) for collective, algorithms in SHARED_ALGORITHMS.items() for name in algorithms]

Node = tuple[int, int]


def problems(collective: str, world: int) -> list[Problem]:
    found = []
    for size in (1, world, 4 * world + 1, 40):
        counts: int | tuple[int, ...] = size
        if collective in ("gather", "scatter", "all_gather", "reduce_scatter"):
            counts = (size,) * world
        found.append(Problem.of(collective, world, counts, world - 1))
    return found


def earlier(plans: list[Plan]) -> dict[Node, set[Node]]:
    """By step of any rank, all steps that are over when it begins."""
    published = {
        (rank, step.item): (rank, index)
        for rank, plan in enumerate(plans)
        for index, step in enumerate(plan.steps)
        if isinstance(step, Publish)
    }
    found: dict[Node, set[Node]] = {}

    def visit(node: Node) -> set[Node]:
        if node not in found:
            rank, index = node
            step = plans[rank].steps[index]
            direct = [(rank, before) for before in step.after]
            if isinstance(step, Fetch | FetchReduce):
                direct.append(published[step.peer, step.item])
            found[node] = set(direct).union(*(visit(before) for before in direct))
        return found[node]

    for rank, plan in enumerate(plans):
        for index in range(len(plan.steps)):
            visit((rank, index))
    return found


def writes(step: Step) -> bool:
    return not isinstance(step, Send | Publish)


def overwritten_too_early(plans: list[Plan]) -> list[str]:
    """Lendable items whose source may change before a rank has read it."""
    before = earlier(plans)
    found = []
    for rank, plan in enumerate(plans):
        for index in Program(plan).lendable:
            item = plan.steps[index]
            assert isinstance(item, Publish)
            readers = [
                (other, at)
                for other, theirs in enumerate(plans)
                for at, step in enumerate(theirs.steps)
                if isinstance(step, Fetch | FetchReduce) and (step.peer, step.item) == (rank, item.item)
            ]
            for later, step in enumerate(plan.steps[index + 1 :], index + 1):
                if writes(step) and step.target.overlaps(item.source):  # type: ignore[union-attr]
                    found += [
                        f"rank {rank} step {later} overwrites what step {index} put out for {reader}"
                        for reader in readers
                        if reader not in before[rank, later]
                    ]
    return found


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize(("collective", "algorithm"), SHARED)
def test_nothing_lendable_is_overwritten_before_all_have_read_it(collective: str, algorithm: str, world: int) -> None:
    for problem in problems(collective, world):
        plans = [build(problem, algorithm, rank, CHUNK) for rank in range(world)]
        assert not overwritten_too_early(plans)


def test_what_large_operations_put_out_is_lendable() -> None:
    for collective in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        for problem in problems(collective, 3)[2:]:
            for rank in range(3):
                plan = build(problem, "shared", rank, CHUNK)
                puts = {index for index, step in enumerate(plan.steps) if isinstance(step, Publish)}
                assert Program(plan).lendable == puts, collective


def test_what_is_overwritten_in_place_is_not() -> None:
    plan = build(Problem.of("all_reduce", 3, 10, 0), "shared_direct", 0, CHUNK)
    assert not Program(plan).lendable


def test_a_planted_claim_is_found_out() -> None:
    """All of shared_direct's items are overwritten by the sums: to call them shielded is wrong."""
    plans = [build(Problem.of("all_reduce", 3, 10, 0), "shared_direct", rank, CHUNK) for rank in range(3)]
    lying = [
        replace(
            plan,
            steps=tuple(replace(step, shielded=True) if isinstance(step, Publish) else step for step in plan.steps),
        )
        for plan in plans
    ]
    assert overwritten_too_early(lying)


def test_slices_of_scratch_and_output_are_told_apart() -> None:
    plan = build(Problem.of("reduce", 3, 40, 0), "shared", 1, CHUNK)
    lendable = Program(plan).lendable
    for index, step in enumerate(plan.steps):
        if isinstance(step, Publish) and step.source.buffer == Buffer.INPUT:
            assert index in lendable
