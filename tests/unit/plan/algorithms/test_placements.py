"""Hosts of any size, with any ranks: every plan that knows of them is right, and hosts are told what they lack once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from plan_proof.prove import BY_PLACEMENT
from plan_proof.verify import verify

from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.cost.constants import ASYNCIO
from asyncdist.plan.problem import Problem
from asyncdist.plan.selection.selector import choose
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.plan.simulation.simulate import simulate
from asyncdist.plan.steps import Plan, Send

UNEQUAL = [
    (0, 0, 0, 1),
    (0, 0, 0, 1, 2, 2),
    (0, 1, 1, 1),
    (0, 1, 0, 1),
    (0, 0, 1, 0, 2, 2),
    (0, 0, 0, 0, 1, 1),
    (0, 1, 2, 2, 1, 0, 0),
]


def placements(world: int, hosts: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every way to put ranks on hosts, whose numbers do not matter."""
    if len(hosts) == world:
        yield hosts
        return
    for host in range(max(hosts, default=-1) + 2):
        yield from placements(world, (*hosts, host))


def problem_of(collective: str, hosts: tuple[int, ...], count: int, root: int = 0) -> Problem:
    placed = Tuning(ASYNCIO).placed(hosts)
    return Problem.of(collective, len(hosts), count, root, placed.ranks_per_host)._replace(hosts=placed.hosts)


def crossing(plans: list[Plan], hosts: tuple[int, ...]) -> list[int]:
    """Elements that each host sends to others."""
    sent = [0] * (max(hosts) + 1)
    for rank, plan in enumerate(plans):
        for step in plan.steps:
            if isinstance(step, Send) and hosts[step.peer] != hosts[rank]:
                sent[hosts[rank]] += step.source.length
    return sent


@pytest.mark.parametrize("world", [2, 3, 4, 5, pytest.param(6, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("collective", "algorithm"), BY_PLACEMENT)
def test_plans_are_right_wherever_ranks_are(collective, algorithm, world):
    for hosts in placements(world):
        for count in (1, 25) if world < 6 else (25,):
            problem = problem_of(collective, hosts, count, world // 2)
            verify(problem, [build(problem, algorithm, rank, 3) for rank in range(world)])


@pytest.mark.parametrize("hosts", UNEQUAL)
def test_a_host_sends_what_a_ring_over_hosts_would(hosts):
    number, count = max(hosts) + 1, 360
    problem = problem_of("all_reduce", hosts, count)
    plans = [build(problem, "ring_2d", rank, 7) for rank in range(len(hosts))]
    assert crossing(plans, hosts) == [2 * count * (number - 1) // number] * number
    streams = {(rank, step.peer) for rank, plan in enumerate(plans) for step in plan.steps if isinstance(step, Send)}
    least = min(map(hosts.count, range(number)))
    assert sum(hosts[source] != hosts[target] for source, target in streams) == least * number  # one for each slice


@pytest.mark.parametrize("hosts", UNEQUAL)
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce"])
def test_what_is_chosen_for_long_vectors_knows_the_hosts(collective, hosts):
    problem = problem_of(collective, hosts, 4 << 20)
    algorithm, chunk_bytes, _ = choose(problem, 4, Tuning(ASYNCIO).placed(hosts))
    assert (collective, algorithm) in (*BY_PLACEMENT, ("broadcast", "chain"), ("reduce", "chain"))
    known = simulate(problem, algorithm, 4, ASYNCIO, chunk_bytes // 4)
    unknown, chunk_bytes, _ = choose(problem._replace(hosts=()), 4)
    assert known < 1.02 * simulate(problem, unknown, 4, ASYNCIO, chunk_bytes // 4)


def test_a_single_tree_keeps_the_order_of_ranks():
    problem = problem_of("all_reduce", (0, 1, 0, 1), 8)
    assert all(build(problem, "binary_tree", rank, 3).ordered for rank in range(4))


def test_folded_ranks_are_not_taken_for_neighbors_of_one_host():
    problem = Problem.of("all_reduce", 6, 4 << 20, 0, 2)
    assert choose(problem, 4, Tuning(ASYNCIO, 2))[0] == "ring_2d"  # halving_doubling sends an eighth more from a host
