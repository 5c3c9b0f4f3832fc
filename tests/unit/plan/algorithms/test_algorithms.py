"""What the algorithms' docstrings promise: bytes, rounds, memory, and what may start at once."""

from __future__ import annotations

import pytest

from asyncdist.plan.algorithms import ring
from asyncdist.plan.algorithms.registry import algorithms, build
from asyncdist.plan.chunks import WINDOW
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import Buffer, Copy, Recv, RecvReduce, Reduce, Send, Symmetry

WORLDS = [2, 3, 4, 5, 7, 8, 13, 16]


def plans_of(collective, algorithm, world, count, root=0, chunk_length=1 << 30):
    problem = Problem.of(collective, world, count, root)
    return [build(problem, algorithm, rank, chunk_length) for rank in range(world)]


def sent(plan):
    return sum(step.source.length for step in plan.steps if isinstance(step, Send))


def messages(plan):
    return sum(isinstance(step, Send) for step in plan.steps)


def rounds(plans):
    """Longest chain of messages, through all ranks."""
    depth = {}

    def of(rank, index):
        key = (rank, index)
        if key not in depth:
            step = plans[rank].steps[index]
            before = max((of(rank, other) for other in step.after), default=0)
            if isinstance(step, Recv | RecvReduce):
                before = max(before, 1 + of(step.peer, sends[step.peer, rank, step.slot]))
            depth[key] = before
        return depth[key]

    sends = {
        (rank, step.peer, step.slot): index
        for rank, plan in enumerate(plans)
        for index, step in enumerate(plan.steps)
        if isinstance(step, Send)
    }
    return max(of(rank, index) for rank, plan in enumerate(plans) for index in range(len(plan.steps)))


def log2(world):
    return (world - 1).bit_length()


@pytest.mark.parametrize("world", WORLDS)
def test_least_bytes(world):
    block = 6
    everything = block * (world - 1)
    for algorithm in ("ring", "circulant"):
        for plan in plans_of("all_reduce", algorithm, world, block * world):
            assert sent(plan) == 2 * everything
        for collective in ("reduce_scatter", "all_gather"):
            for plan in plans_of(collective, algorithm, world, block):
                assert sent(plan) == everything


@pytest.mark.parametrize(
    ("collective", "algorithm", "expected"),
    [
        ("all_reduce", "direct", lambda p: 1),
        ("all_reduce", "linear", lambda p: 2),
        ("all_reduce", "ring", lambda p: 2 * (p - 1)),
        ("all_reduce", "circulant", lambda p: 2 * log2(p)),
        ("all_reduce", "recursive_doubling", lambda p: log2(p) if p & (p - 1) == 0 else log2(p) + 1),
        ("broadcast", "linear", lambda p: 1),
        ("broadcast", "binomial_tree", log2),
        ("broadcast", "chain", lambda p: p - 1),
        ("reduce", "linear", lambda p: 1),
        ("reduce", "binomial_tree", log2),
        ("reduce", "chain", lambda p: p - 1),
        ("barrier", "dissemination", log2),
        ("barrier", "linear", lambda p: 2),
        ("all_gather", "direct", lambda p: 1),
        ("all_gather", "ring", lambda p: p - 1),
        ("all_gather", "circulant", log2),
        ("reduce_scatter", "ring", lambda p: p - 1),
        ("reduce_scatter", "circulant", log2),
        ("gather", "linear", lambda p: 1),
        ("gather", "binomial_tree", log2),
        ("scatter", "linear", lambda p: 1),
        ("scatter", "binomial_tree", log2),
    ],
)
def test_rounds(collective, algorithm, expected):
    for world in WORLDS:
        count = 0 if collective == "barrier" else 2 * world
        found = rounds(plans_of(collective, algorithm, world, count))
        # In other worlds a path may skip a round in which nothing it needs is sent.
        assert found == expected(world) if world & (world - 1) == 0 else found <= expected(world), world


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter"])
def test_nothing_travels_for_nothing(collective):
    for algorithm in algorithms(collective):
        for world in (1, 2, 5):
            assert all(not plan.steps for plan in plans_of(collective, algorithm, world, 0))


def test_one_rank_only_copies():
    for collective in ("all_reduce", "broadcast", "barrier"):
        for algorithm in algorithms(collective):
            assert plans_of(collective, algorithm, 1, 0 if collective == "barrier" else 5)[0].steps == ()
    for collective in ("reduce", "all_gather", "reduce_scatter", "gather", "scatter"):
        for algorithm in algorithms(collective):
            (step,) = plans_of(collective, algorithm, 1, 5)[0].steps
            assert isinstance(step, Copy)


def test_the_smallest_all_reduce_is_three_steps():
    for plan in plans_of("all_reduce", "recursive_doubling", 2, 1):
        assert [type(step) for step in plan.steps] == [Send, Recv, Reduce]


@pytest.mark.parametrize("world", WORLDS)
def test_small_algorithms_post_their_receives_at_the_start(world):
    """Else a message can arrive before its place is known, and is stored and copied."""
    for collective, algorithm in [
        ("all_reduce", "direct"),
        ("all_reduce", "recursive_doubling"),
        ("broadcast", "binomial_tree"),
        ("reduce", "linear"),
        ("reduce", "binomial_tree"),
        ("all_gather", "direct"),
        ("all_gather", "circulant"),
        ("reduce_scatter", "circulant"),
        ("gather", "linear"),
        ("gather", "binomial_tree"),
    ]:
        for rank, plan in enumerate(plans_of(collective, algorithm, world, 4)):
            for step in plan.steps:
                folded_out = rank % 2 and collective == "all_reduce"  # waits for its own send of the same array
                assert not isinstance(step, Recv) or not step.after or folded_out


@pytest.mark.parametrize("algorithm", algorithms("all_gather"))
def test_all_gather_sends_its_own_block_without_waiting_for_the_copy(algorithm):
    for plan in plans_of("all_gather", algorithm, 5, 8):
        first = next(step for step in plan.steps if isinstance(step, Send))
        assert first.source.buffer is Buffer.INPUT
        assert first.after == ()


def width(steps, kind):
    """Most steps of a kind that can be under way at once."""
    chosen = [index for index, step in enumerate(steps) if isinstance(step, kind)]
    before = []
    for step in steps:
        before.append(set(step.after).union(*(before[other] for other in step.after)))
    level = {}
    for index in chosen:
        level[index] = 1 + max((level[other] for other in before[index] if other in level), default=0)
    return max(sum(1 for index in chosen if level[index] == depth) for depth in set(level.values()))


@pytest.mark.parametrize(("blocks", "expected"), [(WINDOW, WINDOW), (WINDOW + 1, WINDOW)])
def test_ring_receives_at_most_a_window_for_reduction(blocks, expected):
    """`blocks` chunks to receive, with 2 ranks: as many as the window, and one more."""
    for plan in plans_of("all_reduce", "ring", 2, 2 * blocks, chunk_length=1):
        assert width(plan.steps, RecvReduce) == expected


def test_ring_reduce_scatter_holds_two_blocks_of_partial_sums():
    for world, blocks in ((2, 0), (3, 1), (4, ring.SCRATCH_BLOCKS), (5, ring.SCRATCH_BLOCKS)):
        for plan in plans_of("reduce_scatter", "ring", world, 10, chunk_length=3):
            assert plan.scratch_count == blocks * 10


@pytest.mark.parametrize(("chunks", "held"), [(WINDOW, WINDOW), (WINDOW + 1, WINDOW)])
def test_chain_reduce_holds_a_window_of_partial_sums(chunks, held):
    plans = plans_of("reduce", "chain", 4, 10 * chunks, chunk_length=10)
    assert [plan.scratch_count for plan in plans] == [0, held * 10, held * 10, 0]


def test_chunks_overlap_transfer_and_reduction():
    """A rank of the ring reduces and passes on the first chunk of a block while the second is still to come."""
    plan = plans_of("all_reduce", "ring", 3, 12, chunk_length=2)[0]
    reduces = [index for index, step in enumerate(plan.steps) if isinstance(step, RecvReduce)]
    passing = [step for step in plan.steps if isinstance(step, Send) and step.after]
    assert passing[0].after == (reduces[0],)
    assert passing[1].after == (reduces[1],)


def test_symmetry_is_claimed_for_even_blocks_only():
    assert plans_of("all_gather", "ring", 3, 2)[0].symmetry is Symmetry.ROTATION
    assert plans_of("all_gather", "ring", 3, (2, 2, 3))[0].symmetry is Symmetry.NONE


def test_messages_of_linear_and_tree():
    assert [messages(plan) for plan in plans_of("broadcast", "linear", 5, 3, root=2)] == [0, 0, 4, 0, 0]
    assert [messages(plan) for plan in plans_of("broadcast", "binomial_tree", 8, 3)] == [3, 0, 1, 0, 2, 0, 1, 0]
    assert [messages(plan) for plan in plans_of("all_reduce", "linear", 5, 3)] == [4, 1, 1, 1, 1]
    assert [messages(plan) for plan in plans_of("gather", "linear", 4, 3, root=3)] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", "ring", 0, 1), "unknown collective"),
        (("all_reduce", "magic", 0, 1), "no algorithm 'magic'"),
        (("all_reduce", "ring", 2, 1), "rank 2 is not in a world of 2"),
        (("all_reduce", "ring", 0, 0), "at least one element"),
    ],
)
def test_build_refuses_nonsense(arguments, message):
    collective, algorithm, rank, chunk_length = arguments
    with pytest.raises(ValueError, match=message):
        build(Problem(collective, 2, (1,)), algorithm, rank, chunk_length)
