"""What plans cost, counted: elements sent and received, rounds, and temporary memory."""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Plan, Recv, RecvReduce, Send


def plans_of(
    collective: str,
    algorithm: str,
    world: int,
    count: int | Sequence[int],
    root: int = 0,
    chunk_length: int = 1 << 40,
    ranks_per_host: int = 1,
) -> list[Plan]:
    """Every rank's plan."""
    problem = Problem.of(collective, world, count, root, ranks_per_host)
    return [build(problem, algorithm, rank, chunk_length) for rank in range(world)]


def sent(plan: Plan) -> int:
    """Elements sent."""
    return sum(step.source.length for step in plan.steps if isinstance(step, Send))


def received(plan: Plan) -> int:
    """Elements received."""
    return sum(step.target.length for step in plan.steps if isinstance(step, Recv | RecvReduce))


def peers(plan: Plan) -> set[int]:
    """Ranks that messages go to or come from."""
    return {step.peer for step in plan.steps if isinstance(step, Send | Recv | RecvReduce)}


def rounds(plans: Sequence[Plan]) -> int:
    """Longest chain of messages, through all ranks."""
    sends = {
        (rank, step.peer, step.slot): index
        for rank, plan in enumerate(plans)
        for index, step in enumerate(plan.steps)
        if isinstance(step, Send)
    }
    depths: list[dict[int, int]] = [{} for _ in plans]

    def depth(rank: int, index: int) -> int:
        known = depths[rank].get(index)
        if known is None:
            step = plans[rank].steps[index]
            known = max((depth(rank, other) for other in step.after), default=0)
            if isinstance(step, Recv | RecvReduce):
                known = max(known, 1 + depth(step.peer, sends[step.peer, rank, step.slot]))
            depths[rank][index] = known
        return known

    return max((depth(rank, index) for rank, plan in enumerate(plans) for index in range(len(plan.steps))), default=0)


def staged(plan: Plan) -> int:
    """Elements that receives under way for reduction can hold at a time, at most.

    Those receives are covered with chains in which each waits for the one before: no two of a chain are under way at
    once.
    """
    before: list[int] = []
    last: list[int] = []
    longest: list[int] = []
    for index, step in enumerate(plan.steps):
        mask = 0
        for other in step.after:
            mask |= before[other] | 1 << other
        before.append(mask)
        if not isinstance(step, RecvReduce):
            continue
        chain = next((number for number, tail in enumerate(last) if mask >> tail & 1), None)
        if chain is None:
            last.append(index)
            longest.append(step.target.length)
        else:
            last[chain] = index
            longest[chain] = max(longest[chain], step.target.length)
    return sum(longest)
