"""What the docstrings of exchanges, prefix and ordered reductions promise: bytes, rounds, memory, windows."""

from __future__ import annotations

import pytest
from plan_proof.prove import exchange_problems, private_problems

from asyncdist.plan.algorithms import linear
from asyncdist.plan.algorithms.registry import algorithms, build, ordered_algorithms
from asyncdist.plan.chunks import WINDOW
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Copy, Recv, RecvReduce, Send, Symmetry

WORLDS = [2, 3, 4, 5, 7, 8, 13, 16, 33]


def plans_of(collective, algorithm, world, count, root=0, chunk_length=1 << 30):
    problem = Problem.of(collective, world, count, root)
    return [build(problem, algorithm, rank, chunk_length) for rank in range(world)]


def sends(plan):
    return [step for step in plan.steps if isinstance(step, Send)]


def sent(plan):
    return sum(step.source.length for step in sends(plan))


def depth(plan, kind):
    """Longest chain of steps of a kind on one rank."""
    levels = []
    for step in plan.steps:
        levels.append(max((levels[other] for other in step.after), default=0) + isinstance(step, kind))
    return max(levels, default=0)


@pytest.mark.parametrize("world", WORLDS)
def test_direct_exchanges_send_the_least(world):
    for algorithm in ("linear", "pairwise"):
        for plan in plans_of("all_to_all", algorithm, world, 6):
            assert (len(sends(plan)), sent(plan)) == (world - 1, 6 * (world - 1))
            assert plan.scratch_count == 0
            assert plan.symmetry is Symmetry.ROTATION


@pytest.mark.parametrize("world", WORLDS)
def test_bruck_takes_log_rounds_and_about_two_copies_a_rank(world):
    rounds = (world - 1).bit_length()
    for plan in plans_of("all_to_all", "bruck", world, 6):
        assert len(sends(plan)) == rounds
        assert depth(plan, Send) <= rounds
        slots = sum(slot.bit_count() for slot in range(world))
        assert sent(plan) == 6 * slots <= 6 * rounds * ((world + 1) // 2)
        copies = sum(isinstance(step, Copy) for step in plan.steps)
        assert copies <= 2 * world + rounds


def test_pairwise_has_one_partner_at_a_time():
    for plan in plans_of("all_to_all", "pairwise", 5, 3):
        assert depth(plan, Send) == depth(plan, Recv) == 4


@pytest.mark.parametrize(("more", "levels"), [(0, 1), (1, 2)])
def test_linear_has_a_window_of_messages_under_way(more, levels):
    """A world with as many others as fit into the window, and with one more."""
    plan = plans_of("all_to_all", "linear", linear.EXCHANGE_WINDOW + 1 + more, 3)[0]
    assert depth(plan, Send) == depth(plan, Recv) == levels
    at_once = [step for step in plan.steps if isinstance(step, Send) and not step.after]
    assert len(at_once) == linear.EXCHANGE_WINDOW


def test_empty_blocks_travel_only_where_nobody_else_knows_that_they_are_empty():
    for algorithm in algorithms("all_to_all"):
        assert all(not plan.steps for plan in plans_of("all_to_all", algorithm, 5, 0))
    for problems in (
        exchange_problems([[0] * 4 for _ in range(4)]),
        private_problems("gather_uneven", [0] * 4, 1),
        private_problems("scatter_uneven", [0] * 4, 1),
    ):
        for algorithm in algorithms(problems[0].collective):
            plans = [build(problem, algorithm, rank, 4) for rank, problem in enumerate(problems)]
            messages = sum(len(sends(plan)) for plan in plans)
            assert messages == (12 if problems[0].collective == "all_to_all_uneven" else 3)
            assert all(step.source.length == 0 for plan in plans for step in sends(plan))


def test_large_blocks_are_one_message_so_that_both_ends_compare_lengths():
    for collective, count in (("all_to_all_uneven", (100,) * 6), ("gather_uneven", 100), ("scatter_uneven", 100)):
        for algorithm in algorithms(collective):
            for plan in plans_of(collective, algorithm, 3, count, chunk_length=7):
                assert {step.source.length for step in sends(plan)} <= {100}


@pytest.mark.parametrize("collective", ["scan", "exscan"])
@pytest.mark.parametrize("world", WORLDS)
def test_prefix_reductions_keep_their_rounds_and_bytes(collective, world):
    rounds = (world - 1).bit_length()
    for rank, plan in enumerate(plans_of(collective, "recursive_doubling", world, 9)):
        assert len(sends(plan)) == (world - 1 - rank).bit_length() <= rounds
        receives = [step for step in plan.steps if isinstance(step, Recv)]
        assert len(receives) == rank.bit_length()
        assert all(not step.after for step in receives)  # posted at the start
    for rank, plan in enumerate(plans_of(collective, "chain", world, 9, chunk_length=3)):
        assert sent(plan) == (9 if rank < world - 1 else 0)
        assert len(sends(plan)) == (3 if rank < world - 1 else 0)


@pytest.mark.parametrize("collective", ["scan", "exscan"])
def test_prefix_reductions_of_one_rank_or_nothing_do_nothing(collective):
    for algorithm in algorithms(collective):
        assert plans_of(collective, algorithm, 1, 5)[0].steps == ()
        assert all(not plan.steps for plan in plans_of(collective, algorithm, 5, 0))


def test_exscan_leaves_rank_0_alone():
    for algorithm in algorithms("exscan"):
        plan = plans_of("exscan", algorithm, 5, 6, chunk_length=2)[0]
        assert all(isinstance(step, Send) for step in plan.steps)


@pytest.mark.parametrize(("chunks", "held"), [(WINDOW, WINDOW), (WINDOW + 1, WINDOW)])
def test_a_chain_holds_a_window_of_chunks(chunks, held):
    inner = plans_of("exscan", "chain", 3, 10 * chunks, chunk_length=10)[1]
    assert inner.scratch_count == held * 10
    inner = plans_of("scan", "chain", 3, 10 * chunks, chunk_length=10)[1]
    receives = [step for step in inner.steps if isinstance(step, RecvReduce)]
    assert sum(not step.after for step in receives) == held


@pytest.mark.parametrize(("chunks", "held"), [(4, WINDOW), (5, WINDOW)])
def test_the_ordered_chain_holds_a_window_and_sends_each_element_once(chunks, held):
    for root in range(5):
        plans = plans_of("reduce", "ordered_chain", 5, 10 * chunks, root, chunk_length=10)
        for rank, plan in enumerate(plans):
            assert sent(plan) == (0 if rank == root else 10 * chunks)
            ends = {0, 4, root}
            assert plan.scratch_count == (0 if rank in ends else held * 10)


def test_the_ordered_chain_meets_at_the_root():
    plans = plans_of("reduce", "ordered_chain", 6, 4, root=2)
    assert [[step.peer for step in sends(plan)] for plan in plans] == [[1], [2], [], [2], [3], [4]]


def test_direct_reduce_scatter_keeps_its_promises():
    for plan in plans_of("reduce_scatter", "direct", 5, 3):
        assert (len(sends(plan)), sent(plan), plan.scratch_count) == (4, 12, 9)
        assert all(step.source.buffer is Buffer.INPUT for step in sends(plan))
        assert all(not step.after for step in plan.steps if isinstance(step, Recv))


def test_only_reductions_have_an_order():
    assert ordered_algorithms("all_gather") == ()
    with pytest.raises(ValueError, match="unknown collective"):
        ordered_algorithms("nothing")
