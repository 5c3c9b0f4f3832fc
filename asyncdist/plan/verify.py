"""Proof of plans: runs all ranks' plans together on symbols and accepts only what is right in every possible order.

`verify` shows, for one problem and the plans of all its ranks:

1. Form: steps wait only for earlier steps, slices are within their buffers, INPUT is never written.
2. Matching: every message is sent once and received once, with one length.
3. Hazards: of two steps of a rank that touch the same elements, one of them writing, one waits for the other. So the
   result is the same in whatever order messages arrive.
4. No deadlock, even if a send is done only when it has been received: no plan relies on buffering.
5. Data: nothing is read before it is written, operands of a reduction are the same elements of the vector, and the
   result has every rank's contribution exactly once (or, for moved blocks, exactly the right elements).
6. all_reduce: all ranks evaluate the same expression for an element, so results are bit-identical.
7. A claimed symmetry, block alignment or order of reduction holds.

Values are runs of elements (length, expression, base): element i of the run is the expression applied to element
base + i of the ranks' vectors. Work is proportional to the steps, whatever the element counts.

    python -m asyncdist.plan.verify --worlds 1..64
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from asyncdist.plan.chunks import offsets
from asyncdist.plan.problem import EXCHANGES, IN_PLACE, REDUCTIONS, Problem
from asyncdist.plan.steps import Buffer, Plan, RecvReduce, Reduce, Send
from asyncdist.plan.symbols import Expressions, Memory, PlanError, Values, bits
from asyncdist.plan.wellformed import LOCALS, RECEIVES, check_form, check_hazards, check_symmetry, slices_of

__all__ = ["PlanError", "verify"]

LOCAL: Final = -1
"""The partner of a step that is no message."""


def verify(problem: Problem | Sequence[Problem], plans: Sequence[Plan]) -> None:
    """Raise PlanError unless `plans` (of rank 0, 1, ...) together solve `problem`.

    Where a rank knows only its own lengths (`Problem.private`), give every rank's problem.
    """
    problems = [problem] * problem.world if isinstance(problem, Problem) else list(problem)
    problem = problems[0]
    if not len(plans) == len(problems) == problem.world:
        raise PlanError(f"{len(plans)} plans for a world of {problem.world}")
    for rank, plan in enumerate(plans):
        try:
            check_form(problems[rank], rank, plan)
            check_hazards(plan)
        except PlanError as error:
            raise PlanError(f"{plan.collective}:{plan.algorithm} of {problems[rank]}, rank {rank}: {error}") from None
    try:
        _Run(problems, plans).check()
        check_symmetry(plans)
    except PlanError as error:
        raise PlanError(f"{plans[0].collective}:{plans[0].algorithm} of {problem}: {error}") from None


class _Run:
    """Executes all plans together; steps are numbered through all ranks."""

    def __init__(self, problems: Sequence[Problem], plans: Sequence[Plan]) -> None:
        self._problems = problems
        self._problem = problem = problems[0]
        self._plans = plans
        self._bases = offsets([len(plan.steps) for plan in plans])
        self._steps = [step for plan in plans for step in plan.steps]
        self._ranks = [plan.rank for plan in plans for _ in plan.steps]
        self._expressions = Expressions(problem.world)
        self._memory = [(Memory(), Memory(), Memory()) for _ in plans]
        self._heard = [0] * len(self._steps)
        self._partners = self._match()
        self._fill()

    def check(self) -> None:
        """Run to the end and look at the results."""
        self._execute()
        if self._problem.collective == "barrier":
            self._check_barrier()
        elif self._problem.collective in REDUCTIONS:
            self._check_reduced()
        else:
            self._check_moved()

    def _match(self) -> list[int]:
        sends: dict[tuple[int, int, int], int] = {}
        receives: dict[tuple[int, int, int], int] = {}
        for number, (rank, step) in enumerate(zip(self._ranks, self._steps, strict=True)):
            if isinstance(step, LOCALS):
                continue
            sending = isinstance(step, Send)
            name = (rank, step.peer, step.slot) if sending else (step.peer, rank, step.slot)
            table = sends if sending else receives
            if name in table:
                raise PlanError(f"message (source, destination, slot) {name} appears twice")
            table[name] = number
        if sends.keys() != receives.keys():
            lost = sorted(sends.keys() - receives.keys())[:3]
            missing = sorted(receives.keys() - sends.keys())[:3]
            raise PlanError(f"sent and not received: {lost}; awaited and not sent: {missing}")
        partners = [LOCAL] * len(self._steps)
        for name, sender in sends.items():
            receiver = receives[name]
            partners[sender], partners[receiver] = receiver, sender
            sent, expected = slices_of(self._steps[sender])[0].length, slices_of(self._steps[receiver])[0].length
            if sent != expected:
                raise PlanError(f"message {name} is {sent} elements, {expected} are expected")
        return partners

    def _fill(self) -> None:
        """Put the ranks' own data where the operation finds it."""
        for rank, (problem, memory) in enumerate(zip(self._problems, self._memory, strict=True)):
            length = problem.input_length(rank)
            buffer = Buffer.INPUT
            if problem.collective in IN_PLACE or (problem.collective == "broadcast" and rank == problem.root):
                length, buffer = problem.total, Buffer.OUTPUT
            if length:
                memory[buffer].write(0, [Values(length, rank, 0)])

    def _execute(self) -> None:
        waiting = [len(step.after) for step in self._steps]
        followers: list[list[int]] = [[] for _ in self._steps]
        for rank, plan in enumerate(self._plans):
            base = self._bases[rank]
            for index, step in enumerate(plan.steps):
                for other in step.after:
                    followers[base + other].append(base + index)
        ready = [number for number, count in enumerate(waiting) if not count]
        offered = [False] * len(self._steps)
        done = 0
        while ready:
            number = ready.pop()
            partner = self._partners[number]
            if partner == LOCAL:
                self._local(number)
                finished: tuple[int, ...] = (number,)
            elif offered[partner]:
                sender, receiver = (number, partner) if isinstance(self._steps[number], Send) else (partner, number)
                self._message(sender, receiver)
                finished = (sender, receiver)
            else:
                offered[number] = True
                continue
            for step_number in finished:
                done += 1
                for follower in followers[step_number]:
                    waiting[follower] -= 1
                    if not waiting[follower]:
                        ready.append(follower)
        if done < len(self._steps):
            stuck = [
                f"rank {self._ranks[number]}: {self._steps[number]}"
                for number, step_offered in enumerate(offered)
                if step_offered and not offered[self._partners[number]]
            ]
            raise PlanError(f"deadlock with {len(self._steps) - done} steps left, among them {stuck[:4]}")

    def _local(self, number: int) -> None:
        step = self._steps[number]
        assert isinstance(step, LOCALS)
        memory = self._memory[self._ranks[number]]
        runs = memory[step.source.buffer].read(step.source.offset, step.source.length)
        if isinstance(step, Reduce):
            own = memory[step.target.buffer].read(step.target.offset, step.target.length)
            left, right = (runs, own) if step.source_left else (own, runs)
            runs = self._expressions.combine(left, right)
        memory[step.target.buffer].write(step.target.offset, runs)

    def _message(self, sender: int, receiver: int) -> None:
        send, receive = self._steps[sender], self._steps[receiver]
        assert isinstance(send, Send)
        assert isinstance(receive, RECEIVES)
        if not send.source.length:  # a barrier's: what it carries is who has arrived
            self._heard[sender] = self._before(sender)
            self._heard[receiver] = self._before(receiver) | self._heard[sender]
            return
        runs = self._memory[self._ranks[sender]][send.source.buffer].read(send.source.offset, send.source.length)
        memory = self._memory[self._ranks[receiver]][receive.target.buffer]
        if isinstance(receive, RecvReduce):
            own = memory.read(receive.target.offset, receive.target.length)
            left, right = (runs, own) if receive.incoming_left else (own, runs)
            runs = self._expressions.combine(left, right)
        memory.write(receive.target.offset, runs)

    def _before(self, number: int) -> int:
        """Ranks known to have arrived when a step starts."""
        rank = self._ranks[number]
        heard = 1 << rank
        for other in self._steps[number].after:
            heard |= self._heard[self._bases[rank] + other]
        return heard

    def _check_barrier(self) -> None:
        for rank, (first, last) in enumerate(pairwise(self._bases)):
            heard = 1 << rank
            for number in range(first, last):
                heard |= self._heard[number]
            if heard != self._expressions.everyone:
                raise PlanError(f"rank {rank} leaves the barrier before {bits(self._expressions.everyone & ~heard)}")

    def _check_reduced(self) -> None:
        problem = self._problem
        reference: list[Values] | None = None
        for rank, memory in enumerate(self._memory):
            position = sum(problem.counts[:rank]) if problem.collective == "reduce_scatter" else 0
            runs = memory[Buffer.OUTPUT].read(0, problem.output_length(rank))
            self._check_operands(rank, runs, position)
            if problem.collective == "all_reduce":
                merged = _merged(runs)
                if reference is not None and merged != reference:
                    raise PlanError(f"rank {rank} reduces in another order than rank 0")
                reference = merged

    def _check_operands(self, rank: int, runs: Sequence[Values], position: int) -> None:
        """Whether `runs` are elements `position`, ... with the contributions they must have, in the claimed order."""
        wanted = self._expressions.everyone
        if self._problem.collective == "scan" or (self._problem.collective == "exscan" and not rank):
            wanted = (2 << rank) - 1  # exscan leaves rank 0's data as it is
        elif self._problem.collective == "exscan":
            wanted = (1 << rank) - 1
        for length, expression, base in runs:
            if base != position:
                raise PlanError(f"rank {rank} has element {base} where {position} belongs")
            ranks = self._expressions.ranks[expression]
            if wanted & ~ranks:
                raise PlanError(f"rank {rank}: element {base} lacks the contribution of ranks {bits(wanted & ~ranks)}")
            if ranks & ~wanted:
                raise PlanError(f"rank {rank}: element {base} has a contribution of ranks {bits(ranks & ~wanted)}")
            if self._plans[rank].ordered and not self._expressions.ordered[expression]:
                raise PlanError(f"rank {rank}: element {base} is not reduced in rank order, though the plan says so")
            position += length

    def _check_moved(self) -> None:
        sent = [offsets(problem.send_counts) for problem in self._problems if problem.collective in EXCHANGES]
        for rank, memory in enumerate(self._memory):
            if sent:
                places = enumerate(starts[rank : rank + 2] for starts in sent)
                expected = [Values(end - start, source, start) for source, (start, end) in places]
            else:
                expected = self._moved(rank)
            got = _merged(memory[Buffer.OUTPUT].read(0, self._problems[rank].output_length(rank)))
            if got != _merged(expected):
                raise PlanError(f"rank {rank} ends with {got[:4]}... instead of {expected[:4]}...")

    def _moved(self, rank: int) -> list[Values]:
        """What `rank`'s OUTPUT must hold, of a collective that moves elements and is no exchange."""
        problem, collective = self._problems[rank], self._problem.collective
        if collective == "broadcast":
            return [Values(problem.total, problem.root, 0)]
        if collective in ("scatter", "scatter_uneven"):
            counts = self._problems[problem.root].counts
            return [Values(counts[rank], problem.root, sum(counts[:rank]))]
        if collective == "all_gather" or rank == problem.root:
            return [Values(count, source, 0) for source, count in enumerate(problem.counts)]
        return []


def _merged(runs: Sequence[Values]) -> list[Values]:
    """Join neighbors that continue each other, drop empty runs."""
    result: list[Values] = []
    for run in runs:
        last = result[-1] if result else None
        if last and last.expression == run.expression and last.base + last.length == run.base:
            result[-1] = Values(last.length + run.length, last.expression, last.base)
        elif run.length:
            result.append(run)
    return result


if __name__ == "__main__":
    from asyncdist.plan.cases import main

    sys.exit(main(sys.argv[1:]))
