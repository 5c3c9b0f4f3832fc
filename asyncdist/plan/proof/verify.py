"""Proof of plans: runs all ranks' plans together on symbols and accepts only what is right in every possible order.

`verify` shows, for one problem and the plans of all its ranks:

1. Form: steps wait only for earlier steps, slices are within their buffers, INPUT is never written, not even where
   the own block's place in OUTPUT is INPUT itself.
2. Matching: every message is sent once and received once, with one length. Every item that is fetched is published,
   items in order, and every element of one is fetched by some rank.
3. Hazards: of two steps of a rank that touch the same elements, one of them writing, one waits for the other. So the
   result is the same in whatever order messages arrive.
4. No deadlock, even if a send is done only when it has been received: no plan relies on buffering. Nor if there is
   memory for as many items of each rank as the plan says (`Plan.outstanding_items`), and not for one more.
5. Data: nothing is read before it is written, operands of a reduction are the same elements of the vector, and the
   result has every rank's contribution exactly once (or, for moved blocks, exactly the right elements). Nothing is
   written in vain: it is read before it is overwritten, all of SCRATCH is, and moved elements are written once.
6. all_reduce: all ranks evaluate the same expression for an element, so results are bit-identical.
7. A claimed symmetry, block alignment or order of reduction holds, and that an item is shielded (`proof.published`).

`verify_rotated` shows the same of plans that are rotations of each other, from rank 0's alone: it compares every other
rank's plan with rank 0's renamed (`proof.relabel`), which carries 1, 3 and 7 over to it, and then runs rank 0's plan
for all of them in step (`run.RotatedRun`): one possible execution of all ranks and, by 3, as good as any. Plans are
made one at a time and thrown away, so that p ranks with p steps each take memory for p steps.

Work is proportional to the steps, whatever the element counts. `proof.prove` says what is proven in which worlds, and
how; `make prove` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from asyncdist.plan.chunks import offsets
from asyncdist.plan.problem import EXCHANGES, REDUCTIONS, Problem
from asyncdist.plan.proof.relabel import Relabelling, bases_shift, may_rotate
from asyncdist.plan.proof.run import RotatedRun, Run
from asyncdist.plan.proof.symbols import PlanError, Values, bits, merged
from asyncdist.plan.proof.wellformed import check_form, check_hazards, check_symmetry
from asyncdist.plan.steps import Buffer, Fetch, FetchReduce, Plan, Publish, Symmetry

__all__ = ["PlanError", "check_goal", "verify", "verify_rotated"]


def verify(problem: Problem | Sequence[Problem], plans: Sequence[Plan]) -> None:
    """Raise PlanError unless `plans` (of rank 0, 1, ...) together solve `problem`.

    Where a rank knows only its own lengths (`Problem.private`), give every rank's problem.
    """
    problems = [problem] * problem.world if isinstance(problem, Problem) else list(problem)
    if not len(plans) == len(problems) == problems[0].world:
        raise PlanError(f"{len(plans)} plans for a world of {problems[0].world}")
    plans = [  # repeated ones worked out, once
        plan if isinstance(plan.steps, tuple) else replace(plan, steps=tuple(plan.steps)) for plan in plans
    ]
    for rank, plan in enumerate(plans):
        _check_alone(problems[rank], rank, plan)
    try:
        _check_run(Run(problems, plans))
        check_symmetry(plans)
    except PlanError as error:
        raise PlanError(f"{_title(plans[0])} of {problems[0]}: {error}") from None


def verify_rotated(problem: Problem, plan_of: Callable[[int], Plan]) -> bool:
    """Prove the plans `plan_of(rank)` from rank 0's alone; False, and nothing shown, where they are no rotations.

    Raises PlanError where they are, and do not solve `problem`.
    """
    if not may_rotate(problem):
        return False
    first = plan_of(0)
    if any(isinstance(step, Publish | Fetch | FetchReduce) for step in first.steps):
        return False  # the items of all ranks are looked at together
    if first.symmetry is not Symmetry.ROTATION or (first.ordered and problem.collective in REDUCTIONS):
        return False
    if not all(Relabelling(problem, 0, rank).maps(first, plan_of(rank)) for rank in range(1, problem.world)):
        return False
    _check_alone(problem, 0, first)
    try:
        _check_run(RotatedRun(problem, first))
    except PlanError as error:
        raise PlanError(f"{_title(first)} of {problem}, on every rank as on 0: {error}") from None
    return True


def _check_alone(problem: Problem, rank: int, plan: Plan) -> None:
    try:
        check_form(problem, rank, plan)
        check_hazards(plan)
    except PlanError as error:
        raise PlanError(f"{_title(plan)} of {problem}, rank {rank}: {error}") from None


def _check_run(run: Run) -> None:
    run.execute()
    check_goal(run)


def _title(plan: Plan) -> str:
    return f"{plan.collective}:{plan.algorithm}"


def check_goal(run: Run) -> None:
    """Raise PlanError unless every rank that ran ends with what the collective promises it."""
    collective = run.problems[0].collective
    if collective == "barrier":
        _check_barrier(run)
        return
    results = [
        memory[Buffer.OUTPUT].read(0, problem.output_length(rank))
        for rank, (problem, memory) in enumerate(zip(run.problems, run.memory, strict=True))
    ]
    if collective in REDUCTIONS:
        for rank, runs in enumerate(results):
            _check_operands(run, rank, runs)
        if collective == "all_reduce":
            _check_alike(run, [merged(runs) for runs in results])
        return
    for rank, (runs, expected) in enumerate(zip(results, _moved(run), strict=True)):
        got, wanted = merged(runs), merged(expected)
        if got != wanted:
            raise PlanError(f"rank {rank} ends with {got[:4]}... instead of {wanted[:4]}...")


def _check_barrier(run: Run) -> None:
    everyone = run.expressions.everyone
    for rank, (first, last) in enumerate(pairwise(run.bases)):
        heard = 1 << rank
        for number in range(first, last):
            heard |= run.heard[number]
        if heard != everyone:
            raise PlanError(f"rank {rank} leaves the barrier before {bits(everyone & ~heard)}")


def _check_operands(run: Run, rank: int, runs: Sequence[Values]) -> None:
    """Whether the elements have their places and the contributions they must have, in the claimed order."""
    problem, expressions = run.problems[rank], run.expressions
    position = sum(problem.counts[:rank]) if problem.collective == "reduce_scatter" else 0
    wanted = expressions.everyone
    if problem.collective == "scan" or (problem.collective == "exscan" and not rank):
        wanted = (2 << rank) - 1  # exscan leaves rank 0's data as it is
    elif problem.collective == "exscan":
        wanted = (1 << rank) - 1
    for length, expression, base in runs:
        if base != position:
            raise PlanError(f"rank {rank} has element {base} where {position} belongs")
        ranks = expressions.ranks(expression)
        if wanted & ~ranks:
            raise PlanError(f"rank {rank}: element {base} lacks the contribution of ranks {bits(wanted & ~ranks)}")
        if ranks & ~wanted:
            raise PlanError(f"rank {rank}: element {base} has a contribution of ranks {bits(ranks & ~wanted)}")
        if run.plans[rank].ordered and not expressions.ordered(expression):
            raise PlanError(f"rank {rank}: element {base} is not reduced in rank order, though the plan says so")
        position += length


def _check_alike(run: Run, results: Sequence[list[Values]]) -> None:
    """Whether all ranks evaluate the same expression for each element, so that results have the same bits.

    Where rank 0 ran for all: rank s has in block b what rank 0 has in block b - s, renamed by s. All ranks have the
    same in each block if and only if rank 0 has in block b what it has in block 0, renamed by b.
    """
    if isinstance(run, RotatedRun):
        block = bases_shift(run.problems[0])
        own = run.memory[0][Buffer.OUTPUT]
        first = own.read(0, block)
        for rank in range(1, run.problems[0].world):
            if merged(own.read(rank * block, block)) != merged(run.renamed(first, rank)):
                raise PlanError(f"block {rank} is reduced in another order on rank 0 than on rank {rank}")
        return
    for rank, result in enumerate(results):
        if result != results[0]:
            raise PlanError(f"rank {rank} reduces in another order than rank 0")


def _moved(run: Run) -> Iterator[list[Values]]:
    """What each rank's OUTPUT must hold, of a collective that moves elements."""
    problem = run.problems[0]
    collective, root = problem.collective, problem.root
    sent = [offsets(sender.send_counts) for sender in run.problems if collective in EXCHANGES]
    if isinstance(run, RotatedRun):
        sent = sent * problem.world
    for rank, own in enumerate(run.problems):
        if collective in EXCHANGES:
            places = [starts[rank : rank + 2] for starts in sent]
            yield [(end - start, source, start) for source, (start, end) in enumerate(places)]
        elif collective == "broadcast":
            yield [(problem.total, root, 0)]
        elif collective in ("scatter", "scatter_uneven"):
            counts = run.problems[root].counts
            yield [(counts[rank], root, sum(counts[:rank]))]
        elif collective == "all_gather" or rank == root:
            yield [(count, source, 0) for source, count in enumerate(own.counts)]
        else:
            yield []
