"""How much a rank is ready to receive from another host: what is on the way in a round trip, within limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_proof.prove import exchange_problems, private_problems
from plan_proof.verify import verify

from asyncdist.plan.algorithms.registry import ALGORITHMS, build
from asyncdist.plan.chunks import WINDOW
from asyncdist.plan.cost.constants import ASYNCIO, Link
from asyncdist.plan.problem import BLOCK_COLLECTIVES, Problem
from asyncdist.plan.selection.selector import (
    CHUNK_MAX_BYTES,
    CHUNK_MIN_BYTES,
    IN_FLIGHT_BYTES,
    IN_FLIGHT_MAX_BYTES,
    choose,
    plan_for,
    window_size,
)
from asyncdist.plan.selection.tuning import Tuning

GIGABIT = 1 / 125e6


def tuning_of(alpha_s: float, beta_s: float = GIGABIT, ranks_per_host: int = 1) -> Tuning:
    return Tuning(replace(ASYNCIO, between=Link(alpha_s, beta_s)), ranks_per_host)


def size_of(tuning: Tuning, chunk_bytes: int = CHUNK_MIN_BYTES, world: int = 8) -> int:
    return window_size(Problem.of("all_reduce", world, 1 << 24, 0, tuning.ranks_per_host), chunk_bytes, tuning)


def test_on_one_host_a_few_chunks():
    assert size_of(tuning_of(10e-3, ranks_per_host=8)) == WINDOW
    assert size_of(tuning_of(10e-3, ranks_per_host=4)) > WINDOW


@pytest.mark.parametrize(
    ("alpha_s", "in_flight_bytes"),
    [
        (60e-6, IN_FLIGHT_BYTES),
        (IN_FLIGHT_BYTES * GIGABIT / 4, IN_FLIGHT_BYTES),
        (IN_FLIGHT_BYTES * GIGABIT / 4 * 1.5, IN_FLIGHT_BYTES * 1.5),
        (IN_FLIGHT_MAX_BYTES * GIGABIT / 4, IN_FLIGHT_MAX_BYTES),
        (IN_FLIGHT_MAX_BYTES * GIGABIT, IN_FLIGHT_MAX_BYTES),
    ],
)
def test_between_hosts_twice_a_round_trip_within_limits(alpha_s, in_flight_bytes):
    assert size_of(tuning_of(alpha_s)) == in_flight_bytes // CHUNK_MIN_BYTES
    assert size_of(tuning_of(alpha_s), CHUNK_MAX_BYTES) == max(WINDOW, in_flight_bytes // CHUNK_MAX_BYTES)
    assert size_of(tuning_of(alpha_s), 2 * IN_FLIGHT_MAX_BYTES) == WINDOW


def test_links_that_nobody_described_are_those_of_a_host():
    constants = replace(ASYNCIO, between=None, alpha_s=10e-3, beta_s=GIGABIT)
    assert size_of(Tuning(constants)) == IN_FLIGHT_MAX_BYTES // CHUNK_MIN_BYTES
    assert size_of(Tuning(replace(constants, beta_s=0.0))) == IN_FLIGHT_BYTES // CHUNK_MIN_BYTES


def test_plans_are_made_with_it():
    tuning = tuning_of(10e-3)
    problem = Problem.of("all_gather", 4, 4 << 20)
    _, chunk_bytes, _ = choose(problem, 4, tuning, algorithm="ring")
    plan = plan_for("all_gather", 0, 4, 4 << 20, 4, algorithm="ring", tuning=tuning)
    wide = problem._replace(window_size=window_size(problem, chunk_bytes, tuning))
    assert wide.window_size > WINDOW
    narrow = build(problem, "ring", 0, chunk_bytes // 4)
    assert plan.steps == build(wide, "ring", 0, chunk_bytes // 4).steps != narrow.steps


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("collective", ALGORITHMS)
def test_plans_are_right_with_windows_of_any_size(collective, size):
    for algorithm in ALGORITHMS[collective]:
        for world in (3, 8):
            elements = 9 * (1 if collective in BLOCK_COLLECTIVES or collective == "all_to_all" else world) + 2
            if collective == "all_to_all_uneven":
                problems = exchange_problems([[elements] * world] * world)
            elif collective in ("gather_uneven", "scatter_uneven"):
                problems = private_problems(collective, [elements] * world, 1)
            else:
                count = 0 if collective == "barrier" else elements
                problems = (Problem.of(collective, world, count, 1, 2 if world == 8 else 1),) * world
            problems = tuple(problem._replace(window_size=size) for problem in problems)
            plans = [build(problem, algorithm, rank, 1) for rank, problem in enumerate(problems)]
            verify(problems if problems[0].private else problems[0], plans)
