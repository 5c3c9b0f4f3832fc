"""Plans run by a naive interpreter, steps in random order, against the definition of each collective.

Independent of `plan.verify`. The operation is concatenation of strings, which shows each contribution and its place;
steps that are possible are taken in random order, and sends are buffered.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdist.plan.problem import BLOCK_COLLECTIVES, Problem
from asyncdist.plan.registry import ALGORITHMS, build
from asyncdist.plan.steps import Buffer, Copy, Recv, RecvReduce, Reduce, Send
from asyncdist.plan.verify import verify

EVERY = [(collective, algorithm) for collective, table in ALGORITHMS.items() for algorithm in table]
IN_RANK_ORDER = {("all_reduce", "linear"), ("all_reduce", "recursive_doubling")}
UNDEFINED = None


@st.composite
def cases(draw):
    collective, algorithm = draw(st.sampled_from(EVERY))
    world = draw(st.integers(1, 9))
    counts = st.integers(0, 20)
    if collective in BLOCK_COLLECTIVES:
        count = tuple(draw(st.lists(counts, min_size=world, max_size=world)))
    else:
        count = draw(counts) if collective != "barrier" else 0
    problem = Problem.of(collective, world, count, draw(st.integers(0, world - 1)))
    return problem, algorithm, draw(st.integers(1, 9)), draw(st.integers(0, 2**32))


def data(rank, length, first=0):
    """What a rank contributes: each element says whose and which it is."""
    return [f"<{rank}.{first + index}>" for index in range(length)]


class World:
    """All ranks' buffers, and messages between them."""

    def __init__(self, problem, plans, rng):
        self.problem, self.plans, self.rng = problem, plans, rng
        self.memory, self.started = [], {}
        for rank, plan in enumerate(plans):
            inputs = data(rank, problem.input_length(rank))
            outputs = [UNDEFINED] * problem.output_length(rank)
            if problem.collective == "all_reduce" or (problem.collective == "broadcast" and rank == problem.root):
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


@settings(max_examples=100, deadline=None)
@given(cases())
def test_plans_do_what_the_collective_says_in_any_order(case):
    problem, algorithm, chunk_length, seed = case
    plans = [build(problem, algorithm, rank, chunk_length) for rank in range(problem.world)]
    verify(problem, plans)
    world = World(problem, plans, random.Random(seed))
    world.run()
    assert not world.wire
    results = [memory[1] for memory in world.memory]
    whole = [value for rank, count in enumerate(problem.counts) for value in data(rank, count)]
    for rank, result in enumerate(results):
        if problem.collective in ("all_reduce", "reduce", "reduce_scatter"):
            first = sum(problem.counts[:rank]) if problem.collective == "reduce_scatter" else 0
            for index, value in enumerate(result):
                assert contributions(value) == sorted(f"{peer}.{first + index}" for peer in range(problem.world))
            if problem.collective == "all_reduce":
                assert result == results[0]
            if (problem.collective, algorithm) in IN_RANK_ORDER:
                assert result == ["".join(f"<{r}.{i}>" for r in range(problem.world)) for i in range(problem.total)]
        elif problem.collective == "broadcast":
            assert result == data(problem.root, problem.total)
        elif problem.collective == "scatter":
            assert result == data(problem.root, problem.counts[rank], sum(problem.counts[:rank]))
        elif problem.collective == "all_gather" or (problem.collective == "gather" and rank == problem.root):
            assert result == whole
        else:
            assert result == []
