"""Simulation of worlds of any size: what is derived from few ranks agrees with all ranks' events."""

from __future__ import annotations

import time

import pytest

from asyncdist.plan.algorithms.algorithm import TREE
from asyncdist.plan.algorithms.registry import ALGORITHMS, EVERY, build
from asyncdist.plan.cost.constants import ASYNCIO_TCP, MPI_LIKE, NCCL
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.simulation.events import Hosts, feeds_of, run
from asyncdist.plan.simulation.simulate import EXACT_WORLD, Method, Sweep, grow, simulate, simulated_collectives

CHUNK = 32768
BASE = 128
CLOSE = 0.01
NEAR = 0.07
"""Where plans differ from rank to rank by where their blocks wrap around."""

ROUGH = {
    ("all_reduce", "circulant"),
    ("all_gather", "circulant"),
    ("reduce_scatter", "circulant"),
    ("all_reduce", "ring_2d"),
    ("all_to_all", "bruck"),
    ("scan", "recursive_doubling"),
    ("exscan", "recursive_doubling"),
}

LINES = ("linear", "direct", "pairwise", "bruck", "ring", "ring_2d", "neighbor_exchange", "chain", "ordered_chain")
"""Those with a message for every rank, or most of them: smaller worlds have enough of them."""

PAIRS = [
    (collective, algorithm)
    for collective, table in ALGORITHMS.items()
    if collective not in PRIVATE_COLLECTIVES
    for algorithm in table
]


def problem_of(collective, world, total, ranks_per_host=1):
    if collective == "barrier":
        return Problem.of(collective, world, 0, 0, ranks_per_host)
    blocks = collective in BLOCK_COLLECTIVES or collective in EXCHANGES
    return Problem.of(collective, world, max(1, total // world) if blocks else total, 0, ranks_per_host)


def both(problem, algorithm, constants=ASYNCIO_TCP, base=BASE):
    exact = simulate(problem, algorithm, 4, constants, CHUNK, method=Method.EVENTS)
    derived = simulate(problem, algorithm, 4, constants, CHUNK, method=Method.SYMMETRY, base_ranks=base)
    return exact, derived


@pytest.mark.parametrize(
    ("collective", "algorithm", "total"),
    [(*pair, total) for pair in PAIRS for total in (2, 16384) if total > 2 or pair[1] not in LINES],
)
def test_derived_times_are_those_of_the_events(collective, algorithm, total):
    world, base = (72, 64) if algorithm in LINES else (128, 64)
    exact, derived = both(problem_of(collective, world, total), algorithm, base=base)
    assert derived == pytest.approx(exact, rel=NEAR if (collective, algorithm) in ROUGH else CLOSE)


@pytest.mark.parametrize("world", [256, 300, 384, 512])
@pytest.mark.parametrize("total", [2, 16384, 100_000])
@pytest.mark.parametrize("algorithm", ["recursive_doubling", "binary_tree", "double_tree"])
def test_other_worlds_agree_too(world, total, algorithm):
    exact, derived = both(problem_of("all_reduce", world, total), algorithm, MPI_LIKE)
    assert derived == pytest.approx(exact, rel=CLOSE)


def test_where_messages_up_and_down_two_trees_meet_one_waits():
    """So an overhead more in a world of 200 than what smaller and larger ones show."""
    exact, derived = both(problem_of("all_reduce", 200, 2), "double_tree")
    assert exact - derived == pytest.approx(ASYNCIO_TCP.overhead_s, rel=CLOSE)


@pytest.mark.parametrize(
    ("world", "count"),
    [(200, 3), *(pytest.param(*case, marks=pytest.mark.thorough) for case in ((160, 160 * 1000 + 7), (144, 65535)))],
)
def test_rings_agree_where_blocks_are_uneven(world, count):
    exact, derived = both(Problem.of("all_reduce", world, count), "ring")
    assert derived == pytest.approx(exact, rel=CLOSE)


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "ring_2d"])
def test_hosts_agree(algorithm):
    world = 144 if algorithm in LINES else 256
    exact, derived = both(problem_of("all_reduce", world, 4096, 8), algorithm, NCCL, base=128)
    assert derived == pytest.approx(exact, rel=2 * CLOSE)


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce"])
@pytest.mark.parametrize(("hosts", "size"), [(128, 2), (96, 4)])
@pytest.mark.parametrize("algorithm", ["binary_tree", "double_tree"])
def test_trees_over_hosts_agree(collective, algorithm, hosts, size):
    for total in (2, 100_000):
        problem = problem_of(collective, hosts * size, total, size)
        exact, derived = both(problem, algorithm, NCCL, base=64)
        assert derived == pytest.approx(exact, rel=3 * CLOSE)


def test_fewer_levels_are_looked_at_together_where_more_would_take_long():
    worlds = []

    def timing(problem):
        worlds.append(problem.world)
        return 1.0

    problem = problem_of("all_reduce", 8 * 3072, 1 << 20, 8)
    for base_ranks, expected in ((1024, (96, 12)), (192, (96, 12)), (191, (48, 12)), (96, (48, 12)), (95, (24, 12))):
        worlds.clear()
        assert grow(problem, TREE, timing, base_ranks) == 1.0
        assert [world // 8 for world in worlds] == list(expected)


@pytest.mark.parametrize(
    ("collective", "algorithm", "gain"),
    [
        ("all_reduce", "double_tree", 1.3),
        ("broadcast", "double_tree", 2.4),
        ("reduce", "double_tree", 2.2),
        ("all_reduce", "binary_tree", 1.08),
    ],
)
def test_trees_over_hosts_are_faster_than_over_ranks(collective, algorithm, gain):
    """On eight hosts of eight, large vectors by `gain`: of those over ranks more messages share a host's card."""
    for total, chunk_length, faster in ((1 << 22, 1 << 18, gain), (2, CHUNK, 1.1)):
        by_host, by_rank = [
            [build(problem_of(collective, 64, total, size), algorithm, rank, chunk_length) for rank in range(64)]
            for size in (8, 1)
        ]
        host_s, rank_s = (run(plans, feeds_of(plans), 4, Hosts(NCCL, 8)) for plans in (by_host, by_rank))
        assert rank_s > faster * host_s


def test_rotation_is_exact():
    """One rank stands for all, to the last digits."""
    for algorithm in ("ring", "direct"):
        problem = Problem.of("all_gather", 24, 100)
        exact = simulate(problem, algorithm, 4, ASYNCIO_TCP, 32, method=Method.EVENTS)
        assert simulate(problem, algorithm, 4, ASYNCIO_TCP, 32) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_more_bytes_and_more_ranks_take_longer(collective, algorithm):
    small = simulate(problem_of(collective, 16, 1 << 10), algorithm, 4, MPI_LIKE, CHUNK)
    assert small > 0
    if collective != "barrier":
        assert simulate(problem_of(collective, 16, 1 << 16), algorithm, 4, MPI_LIKE, CHUNK) > small
    assert simulate(problem_of(collective, 64, 1 << 12), algorithm, 4, MPI_LIKE, CHUNK) > small
    dearer = simulate(problem_of(collective, 16, 1 << 10), algorithm, 4, ASYNCIO_TCP, CHUNK)
    assert dearer > small


def test_the_figures_of_24576_ranks():
    """Those of the textbook's formulas: rings pay 2(p - 1) latencies, trees and doubling their logarithm."""
    sweep = Sweep("all_reduce", ASYNCIO_TCP)
    assert sweep.seconds("ring", 24_576, 8) == pytest.approx(2 * 24_575 * 60e-6, rel=CLOSE)
    assert sweep.seconds("recursive_doubling", 24_576, 8) == pytest.approx(16 * 60e-6, rel=0.05)
    assert sweep.seconds("double_tree", 24_576, 8) == pytest.approx(2 * 15 * 75e-6, rel=0.05)
    ring, tree = (Sweep("all_reduce", NCCL, 8).seconds(name, 24_576, 8) for name in ("ring", "double_tree"))
    assert ring > 180 * tree


@pytest.mark.parametrize(
    "algorithms",
    [("ring", "double_tree"), pytest.param(("circulant", "halving_doubling"), marks=pytest.mark.thorough)],
    ids=", ".join,
)
def test_large_worlds_are_quick(algorithms):
    started_s = time.process_time()
    sweep = Sweep("all_reduce", ASYNCIO_TCP)
    for algorithm in algorithms:
        assert sweep.seconds(algorithm, 24_576, 1 << 12) > 0
    assert time.process_time() - started_s < 30


def test_every_algorithm_can_be_simulated_in_large_worlds():
    known = {(one.collective, one.name) for one in EVERY if one.growth}
    assert {pair for pair in PAIRS if pair not in known and pair[1] != "ring_2d"} == set()
    assert {collective for collective, _ in PAIRS} == set(simulated_collectives())


def test_nothing_takes_no_time():
    assert simulate(Problem.of("all_reduce", 1, 100), "ring", 4, ASYNCIO_TCP, CHUNK) == 0
    assert simulate(Problem.of("all_reduce", 8, 0), "ring", 4, ASYNCIO_TCP, CHUNK) == 0
    assert simulate(Problem.of("all_reduce", 2 * EXACT_WORLD, 0), "ring", 4, ASYNCIO_TCP, CHUNK) == 0


def test_uneven_blocks_are_simulated_rank_by_rank_only():
    counts = [5, 0, 1, 0] * (EXACT_WORLD // 4)
    assert simulate(Problem.of("all_gather", EXACT_WORLD, counts), "circulant", 4, ASYNCIO_TCP, CHUNK) > 0
    larger = Problem.of("all_gather", EXACT_WORLD + 4, [*counts, 5, 0, 1, 0])
    with pytest.raises(ValueError, match="rank by rank"):
        simulate(larger, "circulant", 4, ASYNCIO_TCP, CHUNK)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="no algorithm 'star'"):
        simulate(Problem.of("all_reduce", 4, 1), "star", 4, ASYNCIO_TCP, CHUNK)
    with pytest.raises(ValueError, match="differs from rank to rank"):
        simulate(Problem.of("gather_uneven", 2, [1, 1]), "linear", 4, ASYNCIO_TCP, CHUNK)
