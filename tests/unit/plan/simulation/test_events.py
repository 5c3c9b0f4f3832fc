"""What the event simulator says of cases that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.cost.constants import COPY_SHARE, Constants, Link
from asyncdist.plan.problem import Problem
from asyncdist.plan.simulation.events import Hosts, feeds_of, run
from asyncdist.plan.steps import Buffer, Copy, Plan, Recv, Reduce, Send, Slice

ALPHA, BETA, GAMMA, OVERHEAD = 60.0, 0.5, 0.25, 15.0
COSTS = Constants(ALPHA, BETA, GAMMA, OVERHEAD)
N = 1000


def plans_of(collective, algorithm, world, count, chunk=1 << 20, ranks_per_host=1):
    problem = Problem.of(collective, world, count, 0, ranks_per_host)
    return [build(problem, algorithm, rank, chunk) for rank in range(world)]


def seconds(plans, costs=COSTS, ranks_per_host=1):
    return run(plans, feeds_of(plans), 1, Hosts(costs, ranks_per_host))


def timed(collective, algorithm, world, count, costs=COSTS, ranks_per_host=1, **more):
    return seconds(
        plans_of(collective, algorithm, world, count, ranks_per_host=ranks_per_host, **more), costs, ranks_per_host
    )


def test_one_message_takes_alpha_and_its_bytes():
    assert timed("broadcast", "linear", 2, N) == pytest.approx(ALPHA + N * BETA)


def test_a_received_operand_is_reduced_after_it_came():
    assert timed("reduce", "linear", 2, N) == pytest.approx(ALPHA + N * BETA + N * GAMMA)


def test_messages_of_one_rank_leave_one_after_another():
    first_leaves = OVERHEAD
    assert timed("broadcast", "linear", 4, N) == pytest.approx(
        first_leaves + 3 * N * BETA + (ALPHA - 2 * OVERHEAD) + OVERHEAD
    )


def test_without_bytes_the_overhead_is_what_messages_wait_for():
    assert timed("broadcast", "linear", 4, 0) == 0
    costs = replace(COSTS, beta_s=0.0)
    assert timed("broadcast", "linear", 4, N, costs) == pytest.approx(3 * OVERHEAD + (ALPHA - 2 * OVERHEAD) + OVERHEAD)


def test_a_receiver_takes_in_one_message_at_a_time():
    costs = replace(COSTS, gamma_s=0.0)
    assert timed("gather", "linear", 4, N, costs) == pytest.approx(ALPHA + 3 * N * BETA)


def test_rounds_of_an_exchange_follow_each_other():
    assert timed("all_reduce", "recursive_doubling", 8, N) == pytest.approx(3 * (ALPHA + N * BETA + N * GAMMA))
    assert timed("barrier", "dissemination", 8, 0) == pytest.approx(3 * ALPHA)


def test_chunks_overlap_with_the_reduction_of_those_before():
    whole = timed("all_reduce", "ring", 2, 2 * N)
    assert whole == pytest.approx(2 * (ALPHA + N * BETA) + N * GAMMA)
    assert timed("all_reduce", "ring", 2, 2 * N, chunk=N // 4) < whole


def test_local_work_is_done_by_the_rank_alone():
    steps = (
        Copy(Slice(Buffer.INPUT, 0, N), Slice(Buffer.OUTPUT, 0, N)),
        Reduce(Slice(Buffer.INPUT, 0, N), Slice(Buffer.OUTPUT, 0, N), True, (0,)),
    )
    assert seconds([Plan("reduce", "x", 0, 1, steps)]) == pytest.approx(N * GAMMA * (COPY_SHARE + 1))


def test_copies_by_the_processor_hide_behind_the_wire_until_a_thread_has_too_many():
    costs = replace(COSTS, copy_s=BETA)
    assert timed("broadcast", "linear", 2, N, costs) == pytest.approx(ALPHA + N * BETA)
    both_ways = timed("all_gather", "direct", 2, N, replace(costs, gamma_s=0.0))
    assert both_ways == pytest.approx(OVERHEAD + N * BETA + N * BETA + OVERHEAD)  # the thread sends, then receives


def test_ranks_wait_for_cores():
    costs = replace(COSTS, cores=1, alpha_s=2 * OVERHEAD, beta_s=0.0, gamma_s=0.0)
    alone = timed("broadcast", "linear", 2, N, costs)
    assert alone == pytest.approx(2 * OVERHEAD)
    exchange = timed("all_reduce", "recursive_doubling", 4, N, costs, ranks_per_host=4)
    assert exchange == pytest.approx(4 * 2 * 2 * OVERHEAD)  # 4 ranks, 2 rounds, 2 ends, on one core
    spread = timed("all_reduce", "recursive_doubling", 4, N, replace(costs, cores=4), ranks_per_host=4)
    assert spread == pytest.approx(2 * 2 * OVERHEAD)


def test_between_hosts_the_card_is_shared():
    costs = replace(COSTS, between=Link(2 * ALPHA, 3 * BETA))
    within = plans_of("broadcast", "linear", 2, N, ranks_per_host=2)
    assert seconds(within, costs, 2) == pytest.approx(ALPHA + N * BETA)
    assert seconds(within, costs, 1) == pytest.approx(2 * ALPHA + 3 * N * BETA)
    swap = []
    for rank in range(4):  # rank r to r + 2 and back: both ranks of a host send through one card
        peer = (rank + 2) % 4
        steps = (Send(peer, Slice(Buffer.INPUT, 0, N), 0), Recv(peer, Slice(Buffer.OUTPUT, 0, N), 0))
        swap.append(Plan("all_to_all", "x", rank, 4, steps))
    assert seconds(swap, costs, 2) == pytest.approx(2 * ALPHA + 2 * 3 * N * BETA)


def test_what_nobody_sends_is_refused():
    plan = Plan("broadcast", "x", 0, 2, (Recv(1, Slice(Buffer.OUTPUT, 0, 1), 0),))
    with pytest.raises(ValueError, match="never sent"):
        feeds_of([plan, Plan("broadcast", "x", 1, 2, ())])


def test_steps_that_wait_for_each_other_are_refused():
    plans = [
        Plan(
            "x", "x", rank, 2, (Recv(1 - rank, Slice(Buffer.OUTPUT, 0, 1), 0), Send(1 - rank, Slice(0, 0, 1), 0, (0,)))
        )
        for rank in range(2)
    ]
    with pytest.raises(ValueError, match="wait for each other"):
        seconds(plans)


def test_constants_are_not_negative():
    with pytest.raises(ValueError, match="negative"):
        Constants(-1.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="negative"):
        Constants(1.0, 0.0, 0.0, 0.0, between=Link(float("nan"), 0.0))


def test_the_same_arguments_give_the_same_bits():
    first = timed("all_reduce", "circulant", 13, 4097, chunk=64)
    assert timed("all_reduce", "circulant", 13, 4097, chunk=64) == first
