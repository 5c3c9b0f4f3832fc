"""A naive interpreter of plans, and the definition of each collective to compare with.

Independent of `plan_proof.verify`. The operation is concatenation of strings, which shows each contribution and its
place; steps that are possible are taken in random order. Sends are buffered, or take place when they are received.
There is memory for as many items of a rank as its plan says; they are taken away from the oldest on, once they were
fetched.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from asyncdist.plan.problem import IN_PLACE, REDUCTIONS, Problem
from asyncdist.plan.steps import (
    Buffer,
    Copy,
    Fetch,
    FetchReduce,
    Plan,
    Publish,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Slice,
    Step,
)

__all__ = ["check_barrier", "check_results", "run"]

UNDEFINED = None


def data(rank: int, length: int, first: int = 0) -> list[Any]:
    """What a rank contributes: each element says whose and which it is."""
    return [f"<{rank}.{first + index}>" for index in range(length)]


def run(problems: Sequence[Problem], plans: Sequence[Plan], rng: random.Random, *, buffered: bool = True) -> list[Any]:
    """Take all steps in random order and return every rank's OUTPUT. AssertionError where a step is impossible."""
    world = _World(problems, plans, rng, buffered=buffered)
    world.run()
    assert not world.wire, f"never received: {sorted(world.wire)}"
    return [memory[Buffer.OUTPUT] for memory in world.memory]


def check_results(problems: Sequence[Problem], results: Sequence[Any], *, ordered: bool) -> None:
    """AssertionError unless `results` is what the collective promises; `ordered`: operands in rank order."""
    collective = problems[0].collective
    for rank, result in enumerate(results):
        if collective in REDUCTIONS:
            _check_reduced(problems[0], rank, result, ordered=ordered)
            assert collective != "all_reduce" or result == results[0]
        else:
            assert result == _moved(problems, rank)


def check_barrier(problems: Sequence[Problem], plans: Sequence[Plan], rng: random.Random) -> None:
    """AssertionError unless no rank can leave the barrier while another one has not come."""
    for absent in range(len(plans)):
        world = _World(problems, plans, rng, buffered=True)
        while any(world.take(rank, index) for rank, index in sorted(world.left) if rank != absent):
            pass
        waiting = {rank for rank, _ in world.left}
        assert waiting >= set(range(len(plans))) - {absent}, f"only {waiting} wait for {absent}"


class _World:
    """All ranks' buffers, and messages between them."""

    def __init__(self, problems: Sequence[Problem], plans: Sequence[Plan], rng: random.Random, *, buffered: bool):
        self.plans, self.rng, self.buffered = plans, rng, buffered
        self.memory = []
        for rank, (problem, plan) in enumerate(zip(problems, plans, strict=True)):
            inputs = data(rank, problem.input_length(rank))
            outputs = [UNDEFINED] * problem.output_length(rank)
            if problem.collective in IN_PLACE or (problem.collective == "broadcast" and rank == problem.root):
                outputs = data(rank, problem.total)
            self.memory.append({0: inputs, 1: outputs, 2: [UNDEFINED] * plan.scratch_count})
        self.done: list[set[int]] = [set() for _ in plans]
        self.wire: dict[tuple[int, int, int], list[Any]] = {}
        self.items: list[list[list[Any]]] = [[] for _ in plans]
        self.fetches: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for rank, plan in enumerate(plans):
            for index, step in enumerate(plan.steps):
                if isinstance(step, Fetch | FetchReduce):
                    self.fetches.setdefault((step.peer, step.item), set()).add((rank, index))
        self.left = {(rank, index) for rank, plan in enumerate(plans) for index in range(len(plan.steps))}

    def run(self) -> None:
        """Take steps until there are none left."""
        while self.left:
            order = sorted(self.left)
            self.rng.shuffle(order)
            for rank, index in order:
                if self.take(rank, index):
                    break
            else:
                raise AssertionError(f"stuck with {len(self.left)} steps left")

    def take(self, rank: int, index: int) -> bool:
        """Take a step if that is possible."""
        step = self.plans[rank].steps[index]
        if not self.done[rank].issuperset(step.after):
            return False
        if isinstance(step, Send) and self.buffered:
            name = (rank, step.peer, step.slot)
            assert name not in self.wire, f"{name} is sent twice"
            self.wire[name] = self.read(rank, step.source)
        elif isinstance(step, Send):
            return False  # its receiver takes both
        elif isinstance(step, Publish):
            if not self.room(rank):
                return False
            assert step.item == len(self.items[rank])
            self.items[rank].append(self.read(rank, step.source))
        elif isinstance(step, Fetch | FetchReduce):
            assert 0 <= step.peer < len(self.plans)
            assert step.peer != rank
            if step.item >= len(self.items[step.peer]):
                return False
            values = self.items[step.peer][step.item]
            assert 0 <= step.offset <= step.offset + step.target.length <= len(values)
            self.write(rank, step, values[step.offset :][: step.target.length])
        elif isinstance(step, Recv | RecvReduce):
            name = (step.peer, rank, step.slot)
            if name not in self.wire and not self.hand_over(*name):
                return False
            self.write(rank, step, self.wire.pop(name))
        else:
            self.write(rank, step, self.read(rank, step.source))
        self.finish(rank, index)
        return True

    def room(self, rank: int) -> bool:
        """Whether there is memory for another item."""
        last = len(self.items[rank]) - self.plans[rank].outstanding_items
        return all(self.fetches.get((rank, item), set()).isdisjoint(self.left) for item in range(last + 1))

    def hand_over(self, source: int, target: int, slot: int) -> bool:
        """Send what is awaited, if its sender is ready."""
        if self.buffered or not 0 <= source < len(self.plans):
            return False
        for index, step in enumerate(self.plans[source].steps):
            if isinstance(step, Send) and (step.peer, step.slot) == (target, slot) and (source, index) in self.left:
                if not self.done[source].issuperset(step.after):
                    return False
                self.wire[source, target, slot] = self.read(source, step.source)
                self.finish(source, index)
                return True
        return False

    def finish(self, rank: int, index: int) -> None:
        """Note that a step is done."""
        self.done[rank].add(index)
        self.left.remove((rank, index))

    def write(self, rank: int, step: Step, incoming: list[Any]) -> None:
        """Put what came where the step wants it, reduced if so."""
        assert not isinstance(step, Send | Publish)
        if isinstance(step, RecvReduce | Reduce | FetchReduce):
            own = self.read(rank, step.target)
            left = step.source_left if isinstance(step, Reduce) else False
            if isinstance(step, RecvReduce | FetchReduce):
                left = step.incoming_left if isinstance(step, RecvReduce) else step.item_left
            pairs = zip(incoming, own, strict=True) if left else zip(own, incoming, strict=True)
            incoming = [first + second for first, second in pairs]
        assert isinstance(step, Recv | RecvReduce | Reduce | Copy | Fetch | FetchReduce)
        target = step.target
        assert target.buffer != Buffer.INPUT
        assert len(incoming) == target.length
        assert 0 <= target.offset <= target.end <= len(self.memory[rank][target.buffer])
        self.memory[rank][target.buffer][target.offset : target.end] = incoming

    def read(self, rank: int, piece: Slice) -> list[Any]:
        """What is there; all of it must have been written."""
        assert piece.offset >= 0
        values = self.memory[rank][piece.buffer][piece.offset : piece.end]
        assert len(values) == piece.length
        assert UNDEFINED not in values
        return values


def _check_reduced(problem: Problem, rank: int, result: Any, *, ordered: bool) -> None:
    first = sum(problem.counts[:rank]) if problem.collective == "reduce_scatter" else 0
    ranks = range(problem.world)
    if problem.collective == "scan" or (problem.collective == "exscan" and not rank):
        ranks = range(rank + 1)
    elif problem.collective == "exscan":
        ranks = range(rank)
    assert len(result) == problem.output_length(rank)
    for index, value in enumerate(result):
        contributions = sorted(value.strip("<>").split("><"))
        assert contributions == sorted(f"{peer}.{first + index}" for peer in ranks)
        assert not ordered or value == "".join(f"<{peer}.{first + index}>" for peer in ranks)


def _moved(problems: Sequence[Problem], rank: int) -> list[Any]:
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
