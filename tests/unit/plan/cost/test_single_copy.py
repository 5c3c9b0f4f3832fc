"""Costs, choice and simulation of collectives whose items are read where they lie."""

import statistics
from dataclasses import replace

import pytest

from asyncdist.plan.algorithms.registry import SHARED_ALGORITHMS
from asyncdist.plan.cost.constants import ASYNCIO, Constants, SharedMemory
from asyncdist.plan.cost.load import RETURNED_S
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.records import SINGLE_COPY_BYTES, USUAL_LANE, LaneMemory
from asyncdist.plan.selection.prediction import LEAST_ITEMS, largest_item_bytes, predict, shared_chunk_sizes
from asyncdist.plan.selection.selector import candidates, choose, plan_for
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.plan.simulation.simulate import simulate
from asyncdist.plan.steps import Publish

KIB = 1 << 10
MIB = 1 << 20

READABLE = USUAL_LANE._replace(single_copy=True)
ITEMS = LaneMemory(1, single_copy=True)
"""A lane so small that everything goes by items."""

ROUND = Constants(
    1.0, 1.0, 1.0, 0.0, shared=SharedMemory(100e-6, 10e-6, operand_s=1e-6, copy_s=1e-9, reduce_s=1e-9, read_s=2e-9)
)
"""Figures to reckon with by hand: to be woken takes 100 us, a step 10, a kilobyte copied or reduced 1, read 2."""

LENDING = [
    name
    for name, table in SHARED_ALGORITHMS.items()
    if "shared" in table and name != "barrier" and name not in PRIVATE_COLLECTIVES
]


def problem_of(collective: str, world: int, nbytes: int) -> Problem:
    """About `nbytes` in all, as elements of a byte."""
    if collective in BLOCK_COLLECTIVES or collective in EXCHANGES:
        nbytes //= world
    return Problem.of(collective, world, nbytes, 0, world)


def one_host(world: int, cores: int = 2) -> Tuning:
    return Tuning(replace(ASYNCIO, cores=cores), world)


@pytest.mark.parametrize(
    ("collective", "algorithm", "microseconds"),
    [
        # 1,000 kB on 4 ranks in one chunk: what is put out costs a step, what is taken is read, reduced besides
        ("broadcast", "shared", 100 + 2 * 10 + 2000),
        ("all_gather", "shared", 100 + 4 * 10 + 250 + 3 * 500),
        ("gather", "shared", 100 + 4 * 10 + 250 + 3 * 500),
        ("scatter", "shared", 100 + 4 * 10 + 250 + 500),
        ("reduce_scatter", "shared", 100 + 6 * 10 + 250 + 3 * (500 + 250)),
        ("all_to_all", "shared", 100 + 6 * 10 + 250 + 3 * 500),
        ("all_reduce", "shared", 2 * 100 + 10 * 10 + 3 * 500 + 3 * (500 + 250)),
        ("reduce", "shared_direct", 100 + 4 * 10 + 1000 + 3 * (2000 + 1000)),
    ],
)
def test_formulas_by_hand(collective: str, algorithm: str, microseconds: float) -> None:
    predicted = predict(problem_of(collective, 4, 1_000_000), algorithm, 1, 10**7, ROUND, ITEMS)
    assert predicted.seconds == pytest.approx(microseconds * 1e-6 + RETURNED_S)
    assert predicted.single_copy


def test_short_items_and_those_that_are_overwritten_are_copied() -> None:
    for problem, algorithm in (
        (problem_of("all_to_all", 4, 4 * (SINGLE_COPY_BYTES - 1)), "shared"),
        (problem_of("all_reduce", 4, MIB), "shared_direct"),
        (problem_of("scan", 4, MIB), "shared_direct"),
    ):
        with_it, without = (
            predict(problem, algorithm, 1, MIB, ROUND, ITEMS._replace(single_copy=single_copy)).seconds
            for single_copy in (True, False)
        )
        assert with_it == without


@pytest.mark.parametrize("collective", LENDING)
def test_formulas_and_simulation_agree(collective: str) -> None:
    ratios = []
    for cores in (0, 2):
        constants = replace(ASYNCIO, cores=cores)
        for world in (2, 3, 4, 8):
            for nbytes in (4 * MIB, 16 * MIB, 64 * MIB):
                problem = problem_of(collective, world, nbytes)
                chunk = shared_chunk_sizes(problem, "shared", 1, READABLE.nbytes, single_copy=True)[-1]
                predicted_s = predict(problem, "shared", 1, chunk, constants, READABLE).seconds
                simulated_s = simulate(problem._replace(single_copy=True), "shared", 1, constants, chunk)
                ratios.append(predicted_s / simulated_s)
                assert 0.6 * simulated_s < predicted_s < 1.6 * simulated_s, (problem, predicted_s, simulated_s)
    assert 0.8 < statistics.median(ratios) < 1.35


@pytest.mark.parametrize("collective", LENDING)
@pytest.mark.parametrize("world", [2, 4])
def test_long_vectors_are_read_and_short_ones_copied(collective: str, world: int) -> None:
    def single_copy(nbytes: int, memory: LaneMemory) -> bool:
        return choose(problem_of(collective, world, nbytes), 1, one_host(world), memory=memory)[2]

    assert not single_copy(256 * KIB, READABLE)
    assert not single_copy(64 * MIB, USUAL_LANE), "who cannot does not"
    if collective not in ("broadcast", "gather", "reduce", "scatter"):  # not all have something to do there
        assert single_copy(64 * MIB, READABLE)


def test_all_ranks_plan_for_it_and_items_fit_the_pool_all_the_same() -> None:
    """An array may lie where the kernel reads nothing for others: then its items are copied."""
    for memory in (READABLE, READABLE._replace(nbytes=2 * MIB)):
        longest = largest_item_bytes(memory.nbytes, LEAST_ITEMS)
        for rank in range(4):
            plan = plan_for("all_reduce", rank, 4, 16 * MIB, 4, tuning=one_host(4), memory=memory)
            assert plan.single_copy
            lengths = [4 * step.source.length for step in plan.steps if isinstance(step, Publish)]
            assert SINGLE_COPY_BYTES <= max(lengths) <= longest


def test_a_candidate_says_how_it_would_be_carried_out() -> None:
    found = {
        one.algorithm: one.single_copy
        for one in candidates(problem_of("all_reduce", 2, 64 * MIB), 1, one_host(2), memory=READABLE)
    }
    assert found["shared"]
    assert not found["shared_direct"]
    assert not found["ring"]
