"""Plans run by a naive interpreter, steps in random order, against the definition of each collective.

Independent of `plan.verify`. The operation is concatenation of strings, which shows each contribution and its place;
steps that are possible are taken in random order, and sends are buffered.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdist.plan.cases import exchange_problems, private_problems
from asyncdist.plan.problem import BLOCK_COLLECTIVES, IN_PLACE, PRIVATE_COLLECTIVES, REDUCTIONS, Problem
from asyncdist.plan.registry import ALGORITHMS, build, ordered_algorithms
from asyncdist.plan.steps import Buffer, Copy, Recv, RecvReduce, Reduce, Send
from asyncdist.plan.verify import verify

EVERY = [(collective, algorithm) for collective, table in ALGORITHMS.items() for algorithm in table]
UNDEFINED = None


@st.composite
def cases(draw):
    collective, algorithm = draw(st.sampled_from(EVERY))
    world = draw(st.integers(1, 9))
    counts = st.integers(0, 20)
    rows = st.lists(counts, min_size=world, max_size=world)
    root = draw(st.integers(0, world - 1))
    if collective == "all_to_all_uneven":
        problems = exchange_problems(draw(st.lists(rows, min_size=world, max_size=world)))
    elif collective in PRIVATE_COLLECTIVES:
        problems = private_problems(collective, draw(rows), root)
    else:
        count = draw(rows) if collective in BLOCK_COLLECTIVES else draw(counts) if collective != "barrier" else 0
        problems = (Problem.of(collective, world, count, root),) * world
    return problems, algorithm, draw(st.integers(1, 9)), draw(st.integers(0, 2**32))


def data(rank, length, first=0):
    """What a rank contributes: each element says whose and which it is."""
    return [f"<{rank}.{first + index}>" for index in range(length)]


class World:
    """All ranks' buffers, and messages between them."""

    def __init__(self, problems, plans, rng):
        self.plans, self.rng = plans, rng
        self.memory, self.started = [], {}
        for rank, (problem, plan) in enumerate(zip(problems, plans, strict=True)):
            inputs = data(rank, problem.input_length(rank))
            outputs = [UNDEFINED] * problem.output_length(rank)
            if problem.collective in IN_PLACE or (problem.collective == "broadcast" and rank == problem.root):
                outputs = data(rank, problem.total)
            self.memory.append({0: inputs, 1: outputs, 2: [UNDEFINED] * plan.scratch_count})
        self.done = [set() for _ in plans]
        self.wire = {}

    def run(self):
        left = {(rank, index) for rank, plan in enumerate(self.plans) for index in range(len(plan.steps))}
        while left:
            ready = [(rank, index) for rank, index in left if self.possible(rank, self.plans[rank].steps[index])]
            assert ready, f"stuck with {len(left)} steps left"
            rank, index = self.rng.choice(sorted(ready))
            self.execute(rank, self.plans[rank].steps[index])
            self.done[rank].add(index)
            left.remove((rank, index))

    def possible(self, rank, step):
        if not self.done[rank].issuperset(step.after):
            return False
        return not isinstance(step, Recv | RecvReduce) or (step.peer, rank, step.slot) in self.wire

    def execute(self, rank, step):
        if isinstance(step, Send):
            self.wire[rank, step.peer, step.slot] = self.read(rank, step.source)
            return
        incoming = (
            self.read(rank, step.source)
            if isinstance(step, Copy | Reduce)
            else self.wire.pop((step.peer, rank, step.slot))
        )
        if isinstance(step, RecvReduce | Reduce):
            own = self.read(rank, step.target)
            left = step.incoming_left if isinstance(step, RecvReduce) else step.source_left
            pairs = zip(incoming, own, strict=True) if left else zip(own, incoming, strict=True)
            incoming = [first + second for first, second in pairs]
        assert step.target.buffer != Buffer.INPUT
        self.memory[rank][step.target.buffer][step.target.offset : step.target.end] = incoming

    def read(self, rank, piece):
        values = self.memory[rank][piece.buffer][piece.offset : piece.end]
        assert len(values) == piece.length
        assert UNDEFINED not in values
        return values


def contributions(value):
    return sorted(value.strip("<>").split("><"))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_plans_do_what_the_collective_says_in_any_order(case):
    problems, algorithm, chunk_length, seed = case
    collective = problems[0].collective
    plans = [build(problem, algorithm, rank, chunk_length) for rank, problem in enumerate(problems)]
    verify(problems, plans)
    world = World(problems, plans, random.Random(seed))
    world.run()
    assert not world.wire
    results = [memory[1] for memory in world.memory]
    for rank, result in enumerate(results):
        if collective in REDUCTIONS:
            check_reduced(problems[0], algorithm, rank, result)
            assert collective != "all_reduce" or result == results[0]
        else:
            assert result == moved(problems, rank)


def check_reduced(problem, algorithm, rank, result):
    first = sum(problem.counts[:rank]) if problem.collective == "reduce_scatter" else 0
    ranks = range(problem.world)
    if problem.collective == "scan" or (problem.collective == "exscan" and not rank):
        ranks = range(rank + 1)
    elif problem.collective == "exscan":
        ranks = range(rank)
    assert len(result) == problem.output_length(rank)
    for index, value in enumerate(result):
        assert contributions(value) == sorted(f"{peer}.{first + index}" for peer in ranks)
        if algorithm in ordered_algorithms(problem.collective):
            assert value == "".join(f"<{peer}.{first + index}>" for peer in ranks)


def moved(problems, rank):
    """What a collective that only moves elements leaves in `rank`'s OUTPUT."""
    problem = problems[rank]
    collective, root = problem.collective.removesuffix("_uneven"), problem.root
    if collective == "broadcast":
        return data(root, problem.total)
    if collective == "scatter":
        counts = problems[root].counts
        return data(root, counts[rank], sum(counts[:rank]))
    if collective == "all_to_all":
        sent = [other.send_counts for other in problems]
        return [value for peer, counts in enumerate(sent) for value in data(peer, counts[rank], sum(counts[:rank]))]
    if collective == "all_gather" or (collective == "gather" and rank == root):
        return [value for peer, count in enumerate(problem.counts) for value in data(peer, count)]
    return []
