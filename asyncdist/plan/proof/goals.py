"""What must be in OUTPUT once all steps are done, by collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from asyncdist.plan.chunks import offsets
from asyncdist.plan.problem import EXCHANGES, REDUCTIONS
from asyncdist.plan.proof.relabel import bases_shift
from asyncdist.plan.proof.run import RotatedRun, Run
from asyncdist.plan.proof.symbols import PlanError, Values, bits, merged
from asyncdist.plan.steps import Buffer

__all__ = ["check_goal"]


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
