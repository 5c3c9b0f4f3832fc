"""Mistakes planted at random in the plans of every algorithm: each is refused, or makes no difference.

What `verify` lets pass is executed by an interpreter that knows nothing of it, in several orders. So nothing that
changes the result passes; and where a mistake cannot be harmless, all are refused.

ASYNCDIST_MUTANTS=20000 plants more of them.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import chain

import pytest
from plan_interpreter import check_barrier, check_results, run
from plan_mutants import CLAIMS, MISTAKES, plant
from plan_proof.prove import exchange_problems, private_problems
from plan_proof.relabel import Relabelling, rotated_problem
from plan_proof.verify import PlanError, verify, verify_rotated

from asyncdist.plan.algorithms.registry import ALGORITHMS, algorithms, build
from asyncdist.plan.chunks import offsets
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, REDUCTIONS, Problem
from asyncdist.plan.steps import Buffer, Copy, Fetch, FetchReduce, Publish, Recv, RecvReduce, Reduce, Send, Symmetry

EVERY = [(collective, name) for collective in ALGORITHMS for name in algorithms(collective, shared=True)]
MUTANTS = int(os.environ.get("ASYNCDIST_MUTANTS", "1500"))
ORDERS = 6
FATAL = {
    "drop_step",
    "wrong_peer",
    "wrong_slot",
    "stretch",
    "repeat_message",
    "wrong_item",
    "wrong_part",
    "publish_more",
}
"""Mistakes that always break something: messages do not match, or a contribution is missing."""


def sample(collective, algorithm, world, root, rng):
    """Problems of all ranks, and their plans."""
    rows = [[rng.choice((0, 1, 3, 5)) for _ in range(world)] for _ in range(world)]
    if collective == "all_to_all_uneven":
        problems = exchange_problems(rows)
    elif collective in ("gather_uneven", "scatter_uneven"):
        problems = private_problems(collective, rows[0], root)
    else:
        count = rows[0] if collective in BLOCK_COLLECTIVES else 0 if collective == "barrier" else rng.choice((2, 5, 13))
        problems = (Problem.of(collective, world, count, root, rng.choice((1, 2))),) * world
    return problems, [build(problem, algorithm, rank, 3) for rank, problem in enumerate(problems)]


def samples(rng):
    """Plans to plant mistakes in: all algorithms, small worlds of every kind, so that each mistake weighs much."""
    for collective, algorithm in EVERY:
        for world in (2, 3, 4, 5, 6):
            problems, plans = sample(collective, algorithm, world, rng.randrange(world), rng)
            if any(plan.steps for plan in plans):
                yield problems, plans


def refused(problems, plans):
    try:
        verify(problems, plans)
    except PlanError:
        return True
    return False


def check_by_execution(problems, plans, seed):
    """AssertionError where one of several orders of execution gives a wrong result, or none."""
    rng = random.Random(seed)
    for order in range(ORDERS):
        results = run(problems, plans, rng, buffered=order % 2 == 0)
        check_results(problems, results, ordered=any(plan.ordered for plan in plans))
    if problems[0].collective == "barrier":
        check_barrier(problems, plans, rng)


@pytest.mark.slow("plants 1,500 mistakes")
def test_a_mistake_is_refused_or_makes_no_difference():
    rng = random.Random(3)
    chosen = list(samples(rng))
    for problems, plans in chosen:
        verify(problems, plans)
        check_by_execution(problems, plans, 1)
    planted, survived = Counter(), Counter()
    while planted.total() < MUTANTS:
        problems, plans = rng.choice(chosen)
        mistake = rng.choice(MISTAKES)
        mutant = plant(plans, rng.randrange(len(plans)), mistake, rng)
        if mutant is None:
            continue
        name = mistake.__name__
        planted[name] += 1
        if refused(problems, mutant):
            continue
        survived[name] += 1
        try:
            check_by_execution(problems, mutant, planted.total())
        except AssertionError as error:
            steps = [
                step for old, new in zip(plans, mutant, strict=True) if old.steps != new.steps for step in new.steps
            ]
            pytest.fail(f"{name} in {plans[0].algorithm} of {problems[0]} was accepted: {error}; now {steps}")
    assert set(planted) == {mistake.__name__ for mistake in MISTAKES}
    print({name: f"{survived[name]} of {planted[name]}" for name in sorted(planted)})
    assert not {name: survived[name] for name in FATAL if survived[name]}
    # What is left is harmless: an edge that others imply, the sides of operands that nobody claims to keep.
    assert survived.total() < planted.total() / 4


def rank_order_kept(problems, plans, rng):
    """Whether results have operands in rank order."""
    try:
        check_results(problems, run(problems, plans, rng), ordered=True)
    except AssertionError:
        return False
    return True


def within_blocks(problem, plan):
    """Whether no slice of the vector that has blocks crosses a boundary."""
    if problem.collective in EXCHANGES:
        boundaries = {Buffer.INPUT: offsets(problem.send_counts), Buffer.OUTPUT: offsets(problem.receive_counts)}
    else:
        scatters = problem.collective in ("reduce_scatter", "scatter", "scatter_uneven")
        boundaries = {Buffer.INPUT if scatters else Buffer.OUTPUT: offsets(problem.counts)}
    slices = [getattr(step, name) for step in plan.steps for name in ("source", "target") if hasattr(step, name)]
    return not any(
        piece.offset < boundary < piece.end for piece in slices for boundary in boundaries.get(piece.buffer, ())
    )


def alike_seen_from_each_rank(plans):
    """Whether peers are at the same distances, in the same steps."""

    def seen(plan):
        return [
            step
            if isinstance(step, Copy | Reduce | Publish)
            else replace(step, peer=(step.peer - plan.rank) % plan.world)
            for step in plan.steps
        ]

    def shape(step):
        slices = [getattr(step, name)[::2] for name in ("source", "target") if hasattr(step, name)]
        names = [getattr(step, name, None) for name in ("peer", "slot", "item", "offset")]
        return type(step), slices, names, step.after

    return len({str([shape(step) for step in seen(plan)]) for plan in plans}) == 1


def test_what_plans_falsely_claim_is_refused_and_what_is_true_is_not():
    rng = random.Random(5)
    refusals = Counter()
    for problems, plans in chain(samples(rng), samples(rng)):
        truths = {
            "ordered": problems[0].collective not in REDUCTIONS or rank_order_kept(problems, plans, rng),
            "block_aligned": all(within_blocks(*pair) for pair in zip(problems, plans, strict=True)),
            "symmetry": alike_seen_from_each_rank(plans),
        }
        for claim, value in CLAIMS.items():
            claiming = [replace(plan, **{claim: value}) for plan in plans]
            assert refused(problems, claiming) != truths[claim], (claim, problems[0], plans[0].algorithm)
            refusals[claim] += not truths[claim]
    assert min(refusals[claim] for claim in CLAIMS) > 10


def renamed(problem, plan, shift):
    """The plan with ranks renamed, of a problem whose blocks have one length."""
    world = problem.world
    blocks = {
        "all_reduce": (0, problem.total // world),
        "all_gather": (0, problem.counts[0]),
        "reduce_scatter": (problem.counts[0], 0),
        "all_to_all": (problem.counts[0], problem.counts[0]),
        "barrier": (0, 0),
    }[problem.collective]

    def moved(piece):
        length = blocks[piece.buffer] if piece.buffer != Buffer.SCRATCH else 0
        offset = (piece.offset + shift * length) % (length * world) if length else piece.offset
        return piece._replace(offset=offset)

    steps = []
    for step in plan.steps:
        changes = {name: moved(getattr(step, name)) for name in ("source", "target") if hasattr(step, name)}
        if isinstance(step, Send | Recv | RecvReduce | Fetch | FetchReduce):
            changes["peer"] = (step.peer + shift) % world
        steps.append(replace(step, **changes))
    return replace(plan, rank=(plan.rank + shift) % world, steps=tuple(steps))


EVEN = [
    (Problem.of(collective, world, count * world if collective == "all_reduce" else count), algorithm)
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
    for algorithm in ALGORITHMS[collective]
    for world in (2, 3, 4, 5)
    for count in ((0,) if collective == "barrier" else (1, 7))
]
ROTATING = [
    (problem, algorithm) for problem, algorithm in EVEN if build(problem, algorithm, 0, 3).symmetry is Symmetry.ROTATION
]


def test_the_same_mistake_on_every_rank_is_found_by_running_one():
    """`verify_rotated` refuses rank 0's plan, renamed for all others, exactly where `verify` refuses all of them."""
    rng = random.Random(7)
    planted, survived = Counter(), Counter()
    while planted.total() < MUTANTS / 4:
        problem, algorithm = rng.choice(ROTATING)
        first = build(problem, algorithm, 0, 3)
        mistake = rng.choice(MISTAKES)
        mutant = plant([first], 0, mistake, rng)
        if mutant is None:
            continue
        plans = [
            replace(renamed(problem, mutant[0], rank), symmetry=Symmetry.ROTATION) for rank in range(problem.world)
        ]
        planted[mistake.__name__] += 1
        try:
            rotated = verify_rotated(problem, plans.__getitem__)
        except PlanError:
            assert refused(problem, plans), (problem, algorithm, plans[0].steps)
            continue
        if rotated:
            survived[mistake.__name__] += 1
            assert not refused(problem, plans), (problem, algorithm, plans[0].steps)
    assert not survived["drop_step"]
    assert 0 < survived.total() < planted.total() / 3


def test_a_mistake_of_one_rank_is_no_rotation():
    rng = random.Random(9)
    for problem, algorithm in ROTATING:
        plans = [build(problem, algorithm, rank, 3) for rank in range(problem.world)]
        assert verify_rotated(problem, plans.__getitem__)
        for mistake in MISTAKES:
            mutant = plant(plans, rng.randrange(problem.world), mistake, rng)
            if mutant is not None:
                claiming = [replace(plan, symmetry=Symmetry.ROTATION) for plan in mutant]
                with suppress(PlanError):  # world - 1, written as -1 on rank 0
                    assert not verify_rotated(problem, claiming.__getitem__), (mistake, problem, algorithm)


def test_a_mistake_for_one_root_is_no_renaming():
    rng = random.Random(11)
    compared = 0
    for collective, algorithm in EVERY:
        if collective not in ("broadcast", "reduce", "gather", "scatter"):
            continue
        first = Problem.of(collective, 5, 3)
        other = rotated_problem(first, 2)
        for rank in range(5):
            plan, target = build(first, algorithm, rank, 3), build(other, algorithm, (rank + 2) % 5, 3)
            same = Relabelling(first, rank, 2)
            if not same.maps(plan, target):
                continue
            for mistake in MISTAKES:
                mutant = plant([target], 0, mistake, rng)
                assert mutant is None or not same.maps(plan, mutant[0]), (mistake, algorithm)
                compared += mutant is not None
    assert compared > 300
