"""Plans of which most steps are left out are the plans that they stand for, and are proven as those."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from plan_proof.verify import PlanError, verify

from asyncdist.collectives.executor.program import Program, Waiting
from asyncdist.plan.algorithms.registry import SHARED_ALGORITHMS, build
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.problem import BLOCK_COLLECTIVES, PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.steps import Buffer, Copy, Fetch, Gap, Plan, Publish, Recv, RepeatedSteps, Slice, repeats
from asyncdist.plan.summary import items, needs, peers

ALGORITHMS = [
    (collective, name)
    for collective, names in SHARED_ALGORITHMS.items()
    for name in names
    if collective not in PRIVATE_COLLECTIVES  # in which nothing is cut
]
LARGE = 61
"""Elements of a part, in chunks of three: enough for every algorithm to repeat itself, with a shorter chunk behind."""


def all_rounds(_builder: PlanBuilder, count: int, alike: range, period: int = 1) -> Iterator[int]:
    """Leave nothing out."""
    del alike, period
    return iter(range(count))


def both(monkeypatch: pytest.MonkeyPatch, problem: Problem, algorithm: str, rank: int, chunk: int) -> tuple[Plan, Plan]:
    """A plan as it is, and in full."""
    plan = build(problem, algorithm, rank, chunk)
    with monkeypatch.context() as patch:
        patch.setattr(PlanBuilder, "rounds", all_rounds)
        return plan, build(problem, algorithm, rank, chunk)


def large(collective: str, world: int, *, root: int = 0) -> Problem:
    return Problem.of(collective, world, LARGE if collective in BLOCK_COLLECTIVES else LARGE * world, root)


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
@pytest.mark.parametrize("world", [2, 3, 5])
def test_what_is_left_out_is_what_would_be_there(
    monkeypatch: pytest.MonkeyPatch, collective: str, algorithm: str, world: int
) -> None:
    repeated = 0
    for rank in range(world):
        plan, full = both(monkeypatch, large(collective, world, root=1), algorithm, rank, 3)
        assert isinstance(full.steps, tuple)
        assert plan == full
        steps = plan.steps
        assert list(steps) == [steps[index] for index in range(len(steps))] == list(full.steps)
        assert (steps[-1], steps[2:9:3]) == (full.steps[-1], full.steps[2:9:3]) if full.steps else True
        assert (items(steps), needs(steps), peers(steps)) == (items(full.steps), needs(full.steps), peers(full.steps))
        ways, full_ways = Waiting(steps), Waiting(full.steps)
        assert ways.counts() == full_ways.counts()
        assert [ways.for_step(step) for step in range(len(steps))] == [
            full_ways.for_step(step) for step in range(len(steps))
        ]
        repeated += isinstance(steps, RepeatedSteps)
    assert repeated or collective == "barrier"


@pytest.mark.parametrize("seed", range(40))
def test_so_it_is_with_whatever_lengths(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    for collective, algorithm in ALGORITHMS:
        world, count = rng.randrange(1, 7), rng.choice((0, 1, 7, 40, 100, 203))
        counts: int | tuple[int, ...] = count
        if collective in BLOCK_COLLECTIVES:
            counts = rng.choice(
                (
                    (count,) * world,
                    tuple(rng.choice((0, 1, count)) for _ in range(world)),
                    tuple(count + rng.randrange(3) for _ in range(world)),
                )
            )
        problem = Problem.of(collective, world, counts, rng.randrange(world))
        rank, chunk = rng.randrange(world), rng.choice((1, 2, 3, 10))
        plan, full = both(monkeypatch, problem, algorithm, rank, chunk)
        assert plan == full, (problem, algorithm, rank, chunk)


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_they_are_proven(collective: str, algorithm: str) -> None:
    problem = large(collective, 3)
    verify(problem, [build(problem, algorithm, rank, 3) for rank in range(3)])


def test_a_wrong_step_among_those_left_out_is_found() -> None:
    """The examples reach into what was left out: there, a length too far is no proof any more."""
    problem = large("broadcast", 2)
    plans = [build(problem, "shared", rank, 3) for rank in range(2)]
    steps = plans[1].steps
    assert isinstance(steps, RepeatedSteps)
    written = list(steps.written)
    example = written[steps.gap.first - 2]
    assert isinstance(example, Fetch)
    written[steps.gap.first - 2] = replace(example, target=example.target._replace(offset=example.target.offset - 1))
    with pytest.raises(PlanError):
        verify(problem, [plans[0], replace(plans[1], steps=RepeatedSteps(tuple(written), steps.gap))])


def publish_unlike(builder: PlanBuilder) -> None:
    for number in builder.rounds(20, range(20)):
        builder.publish(Slice(Buffer.INPUT, number * (3 if number < 15 else 4), 3))


def fetch_by_turns(builder: PlanBuilder) -> None:
    room = builder.scratch(4)
    for number in builder.rounds(40, range(40)):
        builder.fetch(0, number, 0, Slice(room.buffer, room.offset + number % 4, 1))


@pytest.mark.parametrize("add", [publish_unlike, fetch_by_turns])
def test_rounds_that_are_not_as_said_are_found_out(add: Callable[[PlanBuilder], None]) -> None:
    with pytest.raises(AssertionError, match="broadcast by test says that rounds are alike which are not"):
        add(PlanBuilder("broadcast", "test", 1, 2))


def test_rounds_with_messages_are_never_left_out() -> None:
    builder = PlanBuilder("broadcast", "test", 1, 2)
    for number in builder.rounds(100, range(100)):
        builder.recv(0, Slice(Buffer.OUTPUT, number, 1))
    assert len(builder.build().steps) == 100
    assert not repeats([Recv(0, Slice(Buffer.OUTPUT, 0, 1), 0)], [Recv(0, Slice(Buffer.OUTPUT, 1, 1), 1)])


def test_only_numbers_may_differ_between_examples() -> None:
    def piece(offset: int, length: int = 1, buffer: Buffer = Buffer.OUTPUT) -> Slice:
        return Slice(buffer, offset, length)

    assert repeats([Publish(piece(0), 0)], [Publish(piece(1), 1, ())])
    assert repeats([Publish(piece(0), 3, (1,))], [Publish(piece(0), 3, (2,))])
    assert not repeats([], [])
    assert not repeats([Publish(piece(0), 0)], [Publish(piece(1), 1), Publish(piece(2), 2)])
    assert not repeats([Publish(piece(0), 0)], [Publish(piece(1), 1, (0,))])
    assert not repeats([Publish(piece(0), 0)], [Publish(piece(1), 1, (), shielded=True)])
    assert not repeats([Publish(piece(0), 0)], [Publish(piece(1, 2), 1)])
    assert not repeats([Publish(piece(0), 0)], [Publish(piece(1, 1, Buffer.INPUT), 1)])
    assert not repeats([Publish(piece(0), 0)], [Fetch(1, 1, 0, piece(1))])
    assert not repeats([Fetch(1, 0, 0, piece(0))], [Fetch(2, 1, 0, piece(1))])


def test_steps_are_a_sequence_and_no_more() -> None:
    steps = RepeatedSteps(
        tuple(Copy(Slice(Buffer.INPUT, at, 1), Slice(Buffer.OUTPUT, at, 1)) for at in (0, 1, 9)), Gap(2, 1, 7)
    )
    assert len(steps) == 10
    assert [step.target.offset for step in steps if isinstance(step, Copy)] == list(range(10))
    assert steps[-10] == steps[0]
    assert steps == tuple(steps)
    assert steps != tuple(steps)[1:]
    assert steps != "steps"
    assert hash(steps) == hash(RepeatedSteps(steps.written, steps.gap))
    for beyond in (10, -11):
        with pytest.raises(IndexError):
            steps[beyond]


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_instructions_are_those_of_the_full_plan(
    monkeypatch: pytest.MonkeyPatch, collective: str, algorithm: str
) -> None:
    for rank in range(3):
        plan, full = both(monkeypatch, large(collective, 3), algorithm, rank, 3)
        program, full_program = Program(plan), Program(full)
        for itemsize in (1, 1 << 20):
            assert program.first_steps(itemsize) == full_program.first_steps(itemsize)
        for index in range(len(full.steps)):
            made, wanted = program.instructions[index], full_program.instructions[index]
            if isinstance(full.steps[index], Publish) and wanted.lendable != made.lendable:
                assert wanted.lendable  # the last of what takes turns in memory is overwritten by nothing
                wanted = wanted._replace(lendable=False)
            assert made == wanted
