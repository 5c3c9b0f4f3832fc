"""Plans run by a naive interpreter, steps in random order, against the definition of each collective.

Independent of `plan_proof.verify`, which must accept the same plans.
"""

from __future__ import annotations

import random

from fewer_cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_interpreter import check_results, run
from plan_proof.prove import exchange_problems, private_problems
from plan_proof.verify import verify, verify_rotated

from asyncdist.plan.algorithms.registry import ALGORITHMS, algorithms, build, ordered_algorithms
from asyncdist.plan.problem import BLOCK_COLLECTIVES, PRIVATE_COLLECTIVES, Problem

EVERY = [(collective, name) for collective in ALGORITHMS for name in algorithms(collective, shared=True)]


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
        ranks_per_host = draw(st.integers(1, world))
        problems = (Problem.of(collective, world, count, root, ranks_per_host),) * world
    return problems, algorithm, draw(st.integers(1, 9)), draw(st.integers(0, 2**32))


@settings(max_examples=examples(33))
@given(cases(), st.booleans())
def test_plans_do_what_the_collective_says_in_any_order(case, buffered):
    problems, algorithm, chunk_length, seed = case
    plans = [build(problem, algorithm, rank, chunk_length) for rank, problem in enumerate(problems)]
    verify(problems, plans)
    results = run(problems, plans, random.Random(seed), buffered=buffered)
    check_results(problems, results, ordered=algorithm in ordered_algorithms(problems[0].collective, shared=True))


@settings(max_examples=examples(33))
@given(cases())
def test_a_proof_by_rotation_is_a_proof_of_all_ranks(case):
    problems, algorithm, chunk_length, _ = case
    plans = [build(problem, algorithm, rank, chunk_length) for rank, problem in enumerate(problems)]
    if verify_rotated(problems[0], lambda rank: plans[rank]):
        verify(problems, plans)
