"""Operations one after another on real lanes with memory for hardly an item: they end, right, in whatever order.

All members' steps are taken in random order, as far as their lane lets them. A lane says no for want of memory, or
because another operation's turn to publish comes first; nobody may wait for ever. Where only two ends know a length,
half of the members, by chance, have their pieces in their payload.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from plan_interpreter import UNDEFINED, check_results, data
from plan_proof.prove import exchange_problems, private_problems

from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.shared.layout import LANE_HEAD_BYTES
from asyncdist.collectives.shared.runner import Lane
from asyncdist.plan.algorithms.registry import SHARED_ALGORITHMS, build, ordered_algorithms
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, IN_PLACE, PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.selection.prediction import largest_item_bytes
from asyncdist.plan.steps import Buffer, Copy, Fetch, FetchReduce, Publish, Reduce

SHARED = [(collective, name) for collective, table in SHARED_ALGORITHMS.items() for name in table]
CHUNK = 3
CELL = 64
"""Bytes that an element takes on a lane: a number that stands for it, and room."""


class Member:
    """One rank's part in all operations: those begun, in order, and what is left of each."""

    def __init__(self, world, rank, lane):
        self.world, self.rank, self.lane = world, rank, lane
        self.unbegun = deque(range(len(world.problems)))
        self.parts = {}

    def begin(self):
        number = self.unbegun[0]
        plan = self.world.plans[number][self.rank]
        program = Program(plan)
        part = Part(self, self.world.problems[number][self.rank], plan)
        if plan.collective in PRIVATE_COLLECTIVES and self.world.rng.random() < 0.5:
            operation = part.give(number, program.needs)
        else:
            operation = self.lane.items.begin(number, program.items, program.needs)
        if operation is None:
            return False
        part.operation = operation
        self.unbegun.popleft()
        self.parts[number] = part
        return True

    def move(self, rng):
        """Take one step that is possible, or tell what others may wait for; whether there was any."""
        if self.unbegun and len(self.parts) < self.world.depth and self.begin():
            return True
        self.lane.items.retire()
        if self.lane.turns.news:
            self.lane.turns.news = False
            return True
        for number in rng.sample(sorted(self.parts), len(self.parts)):
            part = self.parts[number]
            if not part.left:
                self.lane.items.end(part.operation)
                self.world.results[number][self.rank] = part.memory[Buffer.OUTPUT]
                del self.parts[number]
                return True
            for index in rng.sample(sorted(part.left), len(part.left)):
                if part.take(index):
                    return True
        return False


class Part:
    """One rank's part in one operation."""

    def __init__(self, member, problem, plan):
        self.member, self.plan, self.given = member, plan, False
        rank = plan.rank
        outputs = [UNDEFINED] * problem.output_length(rank)
        if problem.collective in IN_PLACE or (problem.collective == "broadcast" and rank == problem.root):
            outputs = data(rank, problem.total)
        inputs = data(rank, problem.input_length(rank))
        self.memory = {Buffer.INPUT: inputs, Buffer.OUTPUT: outputs, Buffer.SCRATCH: [UNDEFINED] * plan.scratch_count}
        self.left = set(range(len(plan.steps)))

    def give(self, number, needs):
        """Begin with all that we publish in our payload."""
        lane, payload = self.member.lane, bytearray()
        pieces = [self.member.world.packed(self.read(step.source)) for step in self.plan.steps if type(step) is Publish]
        bounds = [4 * (len(pieces) + 1)]
        for piece in pieces:
            payload += piece
            bounds.append(bounds[0] + len(payload))
        payload[:0] = b"".join(bound.to_bytes(4, "little") for bound in bounds)
        length = len(payload) if pieces else 0
        if lane.inline.turn(length) != lane.turns.issued:
            return None
        lane.inline.payload(lane.turns.issued, lane.turns.rank, length)[:] = payload[:length]
        lane.inline.publish(lane.turns.issued, number, length, needs)
        self.given = True
        return lane.items.in_steps(lane.turns.issued - 1, number, needs)

    def take(self, index):
        step, lane = self.plan.steps[index], self.member.lane
        if not self.left.isdisjoint(step.after):
            return False
        if isinstance(step, Publish):
            if not self.given and not lane.items.bcopy(
                self.operation, memoryview(self.member.world.packed(self.read(step.source)))
            ):
                return False
        elif isinstance(step, Fetch | FetchReduce):
            if step.item >= lane.items.available(self.operation, step.peer):
                return False
            values = self.member.world.unpacked(lane.items.item(self.operation, step.peer, step.item))[step.offset :]
            self.write(step, values[: step.target.length], isinstance(step, FetchReduce) and step.item_left)
            lane.items.take(self.operation, step.peer, step.item)
        else:
            self.write(step, self.read(step.source), isinstance(step, Reduce) and step.source_left)
        self.left.remove(index)
        return True

    def read(self, piece):
        values = self.memory[piece.buffer][piece.offset : piece.end]
        assert UNDEFINED not in values
        return values

    def write(self, step, values, left):
        if isinstance(step, Reduce | FetchReduce):
            own = self.read(step.target)
            pairs = zip(values, own, strict=True) if left else zip(own, values, strict=True)
            values = [first + second for first, second in pairs]
        assert isinstance(step, Copy | Reduce | Fetch | FetchReduce)
        assert len(values) == step.target.length
        self.memory[step.target.buffer][step.target.offset : step.target.end] = values


def problems_of(collective, size, count, root, rng):
    """Every rank's problem. Where a rank knows only its own lengths, these are drawn, none longer than a chunk."""

    def lengths():
        return [rng.choice((0, 1, CHUNK)) for _ in range(size)]

    if collective == "all_to_all_uneven":
        return exchange_problems([lengths() for _ in range(size)])
    if collective in PRIVATE_COLLECTIVES:
        return private_problems(collective, lengths(), root)
    return (Problem.of(collective, size, count, root),) * size


class World:
    """All members, and their operations."""

    def __init__(self, size, cases, rng, lane_bytes, depth):
        self.problems, self.plans = [], []
        for collective, algorithm, count, root in cases:
            problems = problems_of(collective, size, count, root, rng)
            self.problems.append(problems)
            self.plans.append([build(problem, algorithm, rank, CHUNK) for rank, problem in enumerate(problems)])
        self.cases, self.rng, self.depth = cases, rng, depth
        self.results = [[None] * size for _ in cases]
        self.texts, self.numbers = [], {}
        segments = [memoryview(bytearray(LANE_HEAD_BYTES + lane_bytes)) for _ in range(size)]
        self.members = [Member(self, rank, Lane(rank, segments)) for rank in range(size)]

    def packed(self, values):
        """Texts as the numbers they are known by, so that what lies on a lane is bytes that may be overwritten."""
        numbers = []
        for value in values:
            if value not in self.numbers:
                self.numbers[value] = len(self.texts)
                self.texts.append(value)
            numbers.append(self.numbers[value].to_bytes(CELL, "little"))
        return bytearray(b"".join(numbers))

    def unpacked(self, item):
        return [self.texts[int.from_bytes(item[start : start + CELL], "little")] for start in range(0, len(item), CELL)]

    def run(self):
        while any(member.unbegun or member.parts for member in self.members):
            if not any(member.move(self.rng) for member in self.rng.sample(self.members, len(self.members))):
                left = [(member.rank, sorted(member.parts)) for member in self.members]
                pytest.fail(f"nobody can move; under way: {left} of {self.cases}")
        for (collective, algorithm, _, _), problems, results in zip(
            self.cases, self.problems, self.results, strict=True
        ):
            ordered = algorithm in ordered_algorithms(collective, shared=True)
            check_results(problems, results, ordered=ordered)


def drawn(rng, size, operations):
    cases = []
    for _ in range(operations):
        collective, algorithm = rng.choice(SHARED)
        count = rng.choice((0, 1, 4, 17)) if collective in BLOCK_COLLECTIVES or collective in EXCHANGES else 0
        if not count and collective != "barrier":
            count = rng.choice((0, 1, 9, 11 * size))
        cases.append((collective, algorithm, count, rng.randrange(size)))
    return cases


@pytest.mark.parametrize("room", [1, 2, 5])
@pytest.mark.parametrize("seed", range(12))
def test_operations_in_any_order_end_with_memory_for_hardly_an_item(seed, room):
    rng = random.Random(seed)
    size = rng.randint(2, 5)
    lane_bytes = CHUNK * CELL * room if room == 1 else CHUNK * CELL * (room + 1)
    assert largest_item_bytes(lane_bytes, room) == CHUNK * CELL
    World(size, drawn(rng, size, 12), rng, lane_bytes, rng.choice((1, 3, 12))).run()


@pytest.mark.parametrize(("collective", "algorithm"), SHARED)
def test_several_of_a_kind_follow_each_other(collective, algorithm):
    rng = random.Random(1)
    blocks = collective in BLOCK_COLLECTIVES or collective in EXCHANGES
    count = 0 if collective == "barrier" else 13 if blocks else 4 * 13
    cases = [(collective, algorithm, count, root) for root in (0, 3, 1)]
    World(4, cases, rng, CHUNK * CELL, 3).run()
