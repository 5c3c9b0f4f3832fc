"""The double binary tree: nobody moves more than the vector, and both trees are as shallow as one."""

from __future__ import annotations

import pytest
from plan_counts import peers, plans_of, received, rounds, sent

from asyncdist.plan.algorithms.trees import SENDS_UP
from asyncdist.plan.chunks import WINDOW
from asyncdist.plan.cost.constants import ASYNCIO_TCP
from asyncdist.plan.simulation.simulate import Sweep
from asyncdist.plan.steps import Recv, Send

WORLDS = [2, 3, 4, 5, 6, 8, 13, 24, 33, 64]
TOTAL = 48


@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_sends_no_rank_s_bytes_twice(world):
    for root in (0, 1, world - 1):
        plans = plans_of("broadcast", "double_tree", world, TOTAL, root, chunk_length=5)
        assert sum(map(sent, plans)) == (world - 1) * TOTAL
        assert max(map(sent, plans)) <= TOTAL
        assert [received(plan) for plan in plans] == [0 if rank == root else TOTAL for rank in range(world)]


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_receives_no_more_than_the_vector(world):
    for root in (0, 1, world - 1):
        plans = plans_of("reduce", "double_tree", world, TOTAL, root, chunk_length=5)
        assert max(map(received, plans)) <= TOTAL
        assert [sent(plan) for plan in plans] == [0 if rank == root else TOTAL for rank in range(world)]


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_moves_at_most_two_vectors(world):
    plans = plans_of("all_reduce", "double_tree", world, TOTAL, chunk_length=5)
    assert sum(map(sent, plans)) == 2 * (world - 1) * TOTAL
    assert max(map(sent, plans)) <= 2 * TOTAL
    assert [sent(plan) for plan in plans] == [received(plan) for plan in plans]
    assert max(len(peers(plan)) for plan in plans) <= 4


@pytest.mark.parametrize("world", WORLDS)
def test_rounds(world):
    levels = (world - 1).bit_length()
    assert rounds(plans_of("all_reduce", "double_tree", world, 4)) <= 2 * levels
    for root in (0, world // 2):  # one hop to the roots of the trees over the others
        most = 1 + (world - 2).bit_length() if world > 2 else 1
        assert rounds(plans_of("broadcast", "double_tree", world, 4, root)) <= most
        assert rounds(plans_of("reduce", "double_tree", world, 4, root)) <= most


def test_each_half_has_its_own_root():
    """Rank 0 is the root of the first tree and a leaf of the second, rank 7 the other way round."""
    first, last = (plans_of("all_reduce", "double_tree", 8, 40)[rank] for rank in (0, 7))
    sends = [(step.peer, step.source.offset) for step in first.steps if isinstance(step, Send)]
    assert sends == [(4, 0), (1, 20)]
    sends = [(step.peer, step.source.offset) for step in last.steps if isinstance(step, Send)]
    assert sends == [(6, 0), (3, 20)]


def test_halves_that_differ_in_chunks_are_served_in_turn():
    """An odd vector of three chunks: two in the first half, one in the second."""
    for plan in plans_of("broadcast", "double_tree", 5, 21, chunk_length=10):
        assert sorted({step.target.length for step in plan.steps if isinstance(step, Recv)}) in ([], [5, 6, 10])


@pytest.mark.parametrize("chunks", [WINDOW, WINDOW + 1])
def test_no_rank_holds_more_than_two_windows(chunks):
    for collective in ("all_reduce", "reduce"):
        for plan in plans_of(collective, "double_tree", 13, 2 * 10 * chunks, chunk_length=10):
            assert plan.scratch_count <= 2 * WINDOW * 10


@pytest.mark.parametrize("chunks", [SENDS_UP, SENDS_UP + 1])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce"])
def test_a_leaf_has_few_chunks_on_their_way_up(collective, chunks):
    """All are ready at once; the first one too many waits for the first."""
    steps = plans_of(collective, "double_tree", 8, 2 * 10 * chunks, chunk_length=10)[2].steps
    ready = [number for number, step in enumerate(steps) if isinstance(step, Send) and not step.after]
    waiting = [step for step in steps if isinstance(step, Send) and step.after == (ready[0],)]
    assert (len(ready), len(waiting)) == (SENDS_UP, chunks - SENDS_UP)


def test_chunks_of_the_one_tree_do_not_hold_up_those_of_the_other():
    """The wire is busy nearly all the time: two vectors pass each rank of all_reduce, one of reduce and broadcast."""
    nbytes = 64 << 20
    for collective, vectors in (("all_reduce", 2), ("reduce", 1), ("broadcast", 1)):
        seconds = Sweep(collective, ASYNCIO_TCP).seconds("double_tree", 64, nbytes)
        assert seconds < 1.35 * vectors * nbytes * ASYNCIO_TCP.beta_s


def test_one_element_travels_in_one_tree():
    assert [sent(plan) for plan in plans_of("broadcast", "double_tree", 4, 1)] == [1, 1, 0, 1]
