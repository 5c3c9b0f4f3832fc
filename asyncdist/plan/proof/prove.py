"""Proving an algorithm in a world: making its plans for the problems of `plan.proof.cases`, and verifying them.

Each family's first problem is verified: by rank 0's plan alone where it is rotated (`verify_rotated`), else by running
all ranks'. The others differ from it in the root. Where their plans are the first's with ranks renamed, nothing is left
to show, since nothing that `verify` looks at changes with the names; where they are not, they are verified like it, in
large worlds for some roots (`cases.run_roots`). Where hosts have several ranks, this is so for each place in a host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from asyncdist.plan.algorithms.registry import build, ordered_algorithms
from asyncdist.plan.problem import Problem
from asyncdist.plan.proof.cases import Family, chunk_length_of, families, run_roots
from asyncdist.plan.proof.relabel import Relabelling, rotated_problem
from asyncdist.plan.proof.symbols import PlanError
from asyncdist.plan.proof.verify import verify, verify_rotated
from asyncdist.plan.steps import Plan

__all__ = ["MAX_STEPS", "Proof", "prove"]

MAX_STEPS: Final = 2_500_000
"""Steps of all ranks that are run together: about 2 GB. Larger problems are left out, and reported."""


class Proof:
    """What was shown of an algorithm in one world: numbers of problems by the way they were."""

    def __init__(self) -> None:
        self.run = 0
        """Problems whose ranks ran together."""
        self.rotated = 0
        """Problems of which rank 0 ran for all."""
        self.renamed = 0
        """Problems whose plans are another problem's, renamed."""
        self.left_out = 0
        """Problems too large to run (`MAX_STEPS`)."""

    @property
    def proven(self) -> int:
        """Problems in all."""
        return self.run + self.rotated + self.renamed

    def add(self, other: Proof) -> None:
        """Count another proof's problems too."""
        self.run += other.run
        self.rotated += other.rotated
        self.renamed += other.renamed
        self.left_out += other.left_out


def prove(collective: str, algorithm: str, world: int, *, thorough: bool | None = None) -> Proof:
    """Prove one algorithm in one world, on the problems that `cases.families` names. Raises PlanError."""
    proof = Proof()
    for family in families(collective, algorithm, world, thorough=thorough):
        _prove_family(family, algorithm, proof)
    return proof


def _prove_family(family: Family, algorithm: str, proof: Proof) -> None:
    world, per_host = _one(family[0]).world, _one(family[0]).ranks_per_host
    period = per_host if per_host < world and world % per_host == 0 else 1  # of names that keep ranks together
    firsts: dict[int, tuple[Problem | tuple[Problem, ...], list[Plan]]] = {}
    for problem in family:
        place = _one(problem).root % period
        if place in firsts and _renamed(*firsts[place], problem, algorithm):
            proof.renamed += 1
        elif _one(problem).root in run_roots(world):
            plans = _prove_problem(problem, algorithm, proof)
            if place not in firsts and len(family) > 1:
                firsts[place] = problem, plans or [_plan_of(problem, algorithm)(rank) for rank in range(world)]


def _prove_problem(problem: Problem | tuple[Problem, ...], algorithm: str, proof: Proof) -> list[Plan]:
    """Prove one problem; return its plans, where all were made to run together."""
    plan_of = _plan_of(problem, algorithm)
    if isinstance(problem, Problem) and verify_rotated(problem, plan_of):
        proof.rotated += 1
        return []
    plans: list[Plan] = []
    steps = 0
    for rank in range(_one(problem).world):
        plans.append(plan_of(rank))
        steps += len(plans[-1].steps)
        if steps > MAX_STEPS:
            proof.left_out += 1
            return []
    verify(problem, plans)
    proof.run += 1
    return plans


def _renamed(
    first: Problem | tuple[Problem, ...], plans: list[Plan], other: Problem | tuple[Problem, ...], algorithm: str
) -> bool:
    """Whether `other` is `first` with ranks renamed, and its plans are `plans` renamed alike."""
    if not isinstance(first, Problem) or not isinstance(other, Problem):
        return False
    world, shift = first.world, other.root - first.root
    if other.ranks_per_host < world and (shift % other.ranks_per_host or world % other.ranks_per_host):
        return False  # renamed, ranks of one host would be on two
    if rotated_problem(first, shift) != other:
        return False
    plan_of = _plan_of(other, algorithm)
    return all(
        Relabelling(first, rank, shift).maps(plan, plan_of((rank + shift) % world)) for rank, plan in enumerate(plans)
    )


def _plan_of(problem: Problem | tuple[Problem, ...], algorithm: str) -> Callable[[int], Plan]:
    """Makes a rank's plan. It must say that it keeps the order of ranks where the registry says so."""
    own = [problem] * problem.world if isinstance(problem, Problem) else list(problem)
    ordered = algorithm in ordered_algorithms(own[0].collective, shared=True)
    chunk_length = chunk_length_of(own[0], algorithm)

    def plan_of(rank: int) -> Plan:
        plan = build(own[rank], algorithm, rank, chunk_length)
        if ordered and not plan.ordered:
            raise PlanError(f"{plan.collective}:{algorithm} of {own[rank]}: rank {rank} keeps no order of ranks")
        return plan

    return plan_of


def _one(problem: Problem | tuple[Problem, ...]) -> Problem:
    return problem if isinstance(problem, Problem) else problem[0]
