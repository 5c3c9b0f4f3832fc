"""Plans through shared memory: what verify finds in them, how little memory they need, and what they move."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from plan_interpreter import check_results, run
from plan_proof.verify import PlanError, verify, verify_rotated

from asyncdist.collectives.shared.items import Pool
from asyncdist.collectives.shared.layout import MAX_LANE_RANKS
from asyncdist.plan.algorithms import shared_reduce
from asyncdist.plan.algorithms.registry import (
    ALGORITHMS,
    SHARED_ALGORITHMS,
    algorithms,
    build,
    needs_lane,
    ordered_algorithms,
)
from asyncdist.plan.algorithms.shared_reduce import Slices
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.selection import prediction
from asyncdist.plan.selection.prediction import MAX_SHARED_RANKS, largest_item_bytes, shared_chunk_sizes
from asyncdist.plan.steps import Buffer, Copy, Fetch, FetchReduce, Publish, Slice, Symmetry

SHARED = [
    (collective, name)
    for collective, table in SHARED_ALGORITHMS.items()
    for name in table
    if collective not in PRIVATE_COLLECTIVES
]
"""Of those whose lengths all ranks know; for the others see test_shared_pieces."""
KIB = 1 << 10
MIB = 1 << 20


def plans_of(collective, algorithm, world, count, root=0, chunk_length=4):
    problem = Problem.of(collective, world, count, root)
    return problem, [build(problem, algorithm, rank, chunk_length) for rank in range(world)]


def count_of(collective, world, each=21):
    if collective == "barrier":
        return 0
    return each if collective in BLOCK_COLLECTIVES or collective in EXCHANGES else each * world + 5


def is_item(step):
    return isinstance(step, Publish | Fetch | FetchReduce)


def changed(plans, rank, index, **changes):
    steps = list(plans[rank].steps)
    steps[index] = replace(steps[index], **changes)
    return [replace(plan, steps=tuple(steps)) if plan.rank == rank else plan for plan in plans]


def handed_over(publishes, fetches):
    """A broadcast from rank 0 to rank 1, of 4 elements in 2 items, by these steps; `publishes` of (item, offset)."""
    problem = Problem.of("broadcast", 2, 4)
    plans = [PlanBuilder("broadcast", "test", rank, 2).build() for rank in range(2)]
    root = tuple(Publish(Slice(Buffer.OUTPUT, offset, 2), item, after) for (item, offset), after in publishes)
    other = tuple(
        Fetch(0, item, offset, Slice(Buffer.OUTPUT, start, length)) for item, offset, start, length in fetches
    )
    return problem, [
        replace(plan, steps=steps, outstanding_items=2) for plan, steps in zip(plans, (root, other), strict=True)
    ]


GOOD = [((0, 0), ()), ((1, 2), (0,))]
BOTH = [(0, 0, 0, 2), (1, 0, 2, 2)]


@pytest.mark.parametrize(
    ("publishes", "fetches", "message"),
    [
        (GOOD, BOTH, None),
        (GOOD, [(0, 0, 0, 1), (0, 1, 1, 1), (1, 0, 2, 2)], None),
        (GOOD, [*BOTH[:1], (2, 0, 2, 2)], "never fetched"),
        (GOOD[:1], BOTH, r"fetched and not published: \(rank, item\) \[\(0, 1\)\]"),
        (GOOD, [(0, 0, 0, 3), (1, 1, 3, 1)], "is fetched up to 3"),
        (GOOD, [(0, 1, 0, 1), (1, 0, 2, 2)], "is not fetched from 0 to 1"),
        (GOOD, [(0, 0, 0, 1), (1, 0, 2, 2)], "is fetched up to 1 only"),
        (GOOD, [*BOTH[:1], (1, -1, 2, 2)], "fetches element -1"),
        (GOOD, [*BOTH[:1], (-1, 0, 2, 2)], "of item -1"),
        ([GOOD[0], ((1, 2), ())], BOTH, "unordered with the one before"),
        ([((1, 0), ()), ((0, 2), (0,))], BOTH, "publishes item 1 where 0 is next"),
        ([((0, 2), ()), ((1, 0), (0,))], BOTH, "rank 1 ends with"),
    ],
)
def test_items_are_published_in_order_and_fetched_whole(publishes, fetches, message):
    problem, plans = handed_over(publishes, fetches)
    if message is None:
        verify(problem, plans)
        return
    with pytest.raises(PlanError, match=message):
        verify(problem, plans)


def test_an_item_of_ones_own_is_not_fetched():
    """The others say until when it lies there."""
    problem, plans = plans_of("all_gather", "shared", 2, 3)
    index = next(index for index, step in enumerate(plans[0].steps) if isinstance(step, Fetch))
    with pytest.raises(PlanError, match=f"step {index} has peer 0"):
        verify(problem, changed(plans, 0, index, peer=0))


def test_what_is_published_may_be_overwritten_afterwards_only():
    problem, plans = plans_of("all_reduce", "shared_direct", 2, 3)
    index = next(index for index, step in enumerate(plans[0].steps) if isinstance(step, FetchReduce))
    with pytest.raises(PlanError, match=f"step {index} touches .* unordered with steps \\[0\\]"):
        verify(problem, changed(plans, 0, index, after=()))


def test_a_fetch_before_its_item_can_be_there_is_a_deadlock():
    problem, plans = plans_of("all_reduce", "shared_direct", 2, 3)
    waiting = [
        replace(plan, steps=(FetchReduce(1 - plan.rank, 0, 0, Slice(Buffer.OUTPUT, 0, 3), plan.rank == 1), *plan.steps))
        for plan in plans
    ]
    both = [
        replace(plan, steps=(plan.steps[0], replace(plan.steps[1], after=(0,)))) for plan in waiting
    ]  # each fetches before it publishes
    with pytest.raises(PlanError, match=r"deadlock with 4 steps left.*FetchReduce"):
        verify(problem, both)


def test_a_barrier_that_is_left_too_early_is_found():
    problem, plans = plans_of("barrier", "shared", 3, 0)
    for rank in range(3):
        index = next(index for index, step in enumerate(plans[rank].steps) if isinstance(step, Fetch))
        steps = tuple(step for number, step in enumerate(plans[rank].steps) if number != index)
        with pytest.raises(PlanError, match=r"never fetched|leaves the barrier"):
            verify(problem, [replace(plan, steps=steps) if plan.rank == rank else plan for plan in plans])


# -- memory for items


@pytest.mark.parametrize(("collective", "algorithm"), SHARED)
def test_memory_for_one_item_is_enough(collective, algorithm):
    """The least there is: whatever a lane's size, operations on it come to their end. In all worlds: test_prove.py."""
    for world in (1, 2, 5):
        problem, plans = plans_of(collective, algorithm, world, count_of(collective, world))
        verify(problem, plans)
        for plan in plans:
            assert plan.outstanding_items == int(any(map(is_item, plan.steps))) <= world - 1
            assert plan.symmetry is Symmetry.NONE
        publishing = [plan for plan in plans if any(isinstance(step, Publish) for step in plan.steps)]
        assert bool(publishing) == (world > 1)
        if publishing:
            with pytest.raises(PlanError, match="items, with memory for 0"):
                verify(problem, [replace(plan, outstanding_items=0) for plan in plans])


def test_plans_by_messages_need_none():
    for collective in ("all_reduce", "broadcast", "all_gather"):
        for algorithm in algorithms(collective):
            assert all(plan.outstanding_items == 0 for plan in plans_of(collective, algorithm, 4, 8)[1])


def all_to_all_by_hand(world, memory, *, backward):
    """Everyone publishes for the next ranks in turn, and fetches one after another: nearest or farthest first."""
    problem = Problem.of("all_to_all", world, 1)
    plans = []
    for rank in range(world):
        builder = PlanBuilder("all_to_all", "test", rank, world)
        builder.copy(Slice(Buffer.INPUT, rank, 1), Slice(Buffer.OUTPUT, rank, 1))
        for distance in range(1, world):
            builder.publish(Slice(Buffer.INPUT, (rank + distance) % world, 1))
        last = None
        for distance in range(world - 1, 0, -1) if backward else range(1, world):
            peer = (rank - distance) % world
            last = builder.fetch(peer, distance - 1, 0, Slice(Buffer.OUTPUT, peer, 1), after=[last])
        plans.append(replace(builder.build(), outstanding_items=memory))
    return problem, plans


@pytest.mark.parametrize("world", [3, 4, 7])
def test_too_little_memory_is_a_deadlock(world):
    """What is fetched first is published last: there must be memory for all but that."""
    verify(*all_to_all_by_hand(world, 1, backward=False))
    needed = world - 1
    for memory in range(1, world):
        problem, plans = all_to_all_by_hand(world, memory, backward=True)
        if memory >= needed:
            verify(problem, plans)
            check_results([problem] * world, run([problem] * world, plans, random.Random(1)), ordered=False)
            continue
        with pytest.raises(PlanError, match=r"deadlock with \d+ steps left, among them .*Publish"):
            verify(problem, plans)
        with pytest.raises(AssertionError, match="stuck"):
            run([problem] * world, plans, random.Random(1))


def test_reduce_holds_as_many_results_as_it_is_ahead(monkeypatch):
    """With one fewer, folding a chunk waits for a result to be put out, that for input of others, that for memory."""
    verify(*plans_of("reduce", "shared", 3, 3 * 21))
    monkeypatch.setattr(shared_reduce, "RESULTS", shared_reduce.RESULTS - 1)
    with pytest.raises(PlanError, match="deadlock"):
        verify(*plans_of("reduce", "shared", 3, 3 * 21))


@pytest.mark.parametrize("outstanding", [1, 2, 3, 5])
def test_a_lane_has_room_for_items_of_the_largest_length(outstanding):
    """Whatever lengths come before, and wherever items lie: one more fits whenever fewer than that many are there."""
    size = 4096
    largest = largest_item_bytes(size, outstanding)
    assert largest >= size // (outstanding + 1) - 64
    rng = random.Random(outstanding)
    for most in (largest, max(1, largest // 3)):
        pool = Pool(size, 64)
        freed = 0
        for number in range(4000):
            if len(pool.items) == outstanding or rng.random() < 0.3:
                freed = max(freed, number - rng.randrange(outstanding))
                pool.free(freed)
            length = rng.choice((most, most, rng.randint(0, most)))
            at = pool.place(length)
            assert 0 <= at <= size - length, (number, length, len(pool.items))
            pool.add(number, at, length)


def test_the_largest_item_is_about_the_largest_that_fits():
    """A third one of twice the length has no room, where two lie there."""
    largest = largest_item_bytes(4096, 2)
    pool = Pool(4096, 64)
    for number in range(2):
        pool.add(number, pool.place(largest), largest)
    pool.free(1)
    assert pool.place(largest) >= 0
    assert pool.place(largest + 128) < 0


def blocks_of(collective, total, world):
    return total // world if collective in BLOCK_COLLECTIVES or collective in EXCHANGES else total


@pytest.mark.parametrize("lane_bytes", [64 * KIB, 2 * MIB, 8 * MIB])
@pytest.mark.parametrize(("collective", "algorithm"), SHARED)
def test_chunks_fit_the_lane(collective, algorithm, lane_bytes):
    for world in (2, 4, 33, MAX_SHARED_RANKS):
        for total in (0, 4, 100 * KIB, 64 * MIB, 16 << 30) if collective != "barrier" else (0,):
            count = 0 if collective == "barrier" else blocks_of(collective, total, world)
            sizes = shared_chunk_sizes(Problem.of(collective, world, count), algorithm, 1, lane_bytes)
            assert sizes
            for size in sizes:
                assert 1 <= size <= largest_item_bytes(lane_bytes, prediction.LEAST_ITEMS)
                items = total // (world if collective in ("all_gather", "gather") else 1) // size
                full = size >= largest_item_bytes(lane_bytes, prediction.LEAST_ITEMS) - 1
                assert items <= prediction.ITEMS_MAX or full


def test_chunks_are_shorter_where_there_are_more_slices():
    problem = Problem.of("all_reduce", 4, 64 * MIB)
    assert max(shared_chunk_sizes(problem, "shared", 1, 8 * MIB)) == prediction.CHUNK_MAX_BYTES
    many = Problem.of("all_reduce", MAX_SHARED_RANKS, 64 * MIB)
    assert shared_chunk_sizes(many, "shared", 1, 2 * MIB) == (prediction.CHUNK_MIN_BYTES,)
    between = shared_chunk_sizes(Problem.of("all_reduce", 16, 64 * MIB), "shared", 1, 8 * MIB)
    assert max(between) * 16 * 3 <= 8 * MIB


def test_few_chunks_at_the_limit_and_one_past():
    """From one byte more on, chunks are longer."""
    at = prediction.ITEMS_MAX * prediction.CHUNK_MAX_BYTES
    assert shared_chunk_sizes(Problem.of("broadcast", 2, at), "shared", 1, 8 * MIB) == (prediction.CHUNK_MAX_BYTES,)
    past = shared_chunk_sizes(Problem.of("broadcast", 2, at + 1), "shared", 1, 8 * MIB)
    assert past == (prediction.CHUNK_MAX_BYTES + 1,)


def test_plans_and_lanes_are_for_as_many_ranks():
    assert MAX_SHARED_RANKS == MAX_LANE_RANKS


# -- what they are


def test_which_there_are():
    assert set(SHARED_ALGORITHMS) == set(ALGORITHMS)
    for collective, table in SHARED_ALGORITHMS.items():
        for algorithm in table:
            assert needs_lane(collective, algorithm)
            assert algorithm not in algorithms(collective)
            assert algorithm in algorithms(collective, shared=True)
    assert not any(needs_lane(name, algorithm) for name, table in ALGORITHMS.items() for algorithm in table)


@pytest.mark.parametrize(("collective", "algorithm"), SHARED)
def test_the_order_of_ranks_is_kept_where_the_registry_says_so(collective, algorithm):
    claims = {
        plan.ordered
        for world in range(2, 6)
        for root in range(world)
        for plan in plans_of(collective, algorithm, world, count_of(collective, world), root)[1]
    }
    assert claims == {algorithm in ordered_algorithms(collective, shared=True)}
    assert algorithm not in ordered_algorithms(collective)


@pytest.mark.parametrize(("collective", "algorithm"), SHARED)
def test_one_rank_only_copies_and_nothing_takes_no_steps(collective, algorithm):
    (plan,) = plans_of(collective, algorithm, 1, 0 if collective == "barrier" else 3)[1]
    assert all(isinstance(step, Copy) for step in plan.steps)
    assert len(plan.steps) == (collective not in ("all_reduce", "broadcast", "barrier", "scan", "exscan"))
    if collective != "barrier":
        assert all(not plan.steps for plan in plans_of(collective, algorithm, 4, 0)[1])


def moved(plan):
    """Elements published, fetched, reduced, and copied here."""
    totals = {Publish: 0, Fetch: 0, FetchReduce: 0, Copy: 0}
    for step in plan.steps:
        if type(step) in totals:
            totals[type(step)] += (step.source if isinstance(step, Publish) else step.target).length
    return tuple(totals.values())


@pytest.mark.parametrize("world", [2, 3, 8])
def test_what_they_move(world):
    """As the docstrings say: in elements, with vectors of 24 per rank."""
    block, others = 24, world - 1
    total = block * world
    for plan in plans_of("all_reduce", "shared", world, total)[1]:
        assert moved(plan) == (total, others * block, others * block, 0)
    for plan in plans_of("all_reduce", "shared_direct", world, total)[1]:
        apart = total if plan.rank > 1 else 0
        assert moved(plan)[:3] == (total, apart, others * total - apart - (total if plan.rank > 1 else 0) + apart)
    for plan in plans_of("reduce_scatter", "shared", world, block)[1]:
        assert sum(moved(plan)) == 2 * others * block + (block if plan.rank == 0 else 0)
    for plan in plans_of("all_to_all", "shared", world, block)[1]:
        assert moved(plan) == (others * block, others * block, 0, block)
    root = world - 1
    for plan in plans_of("broadcast", "shared", world, total, root)[1]:
        assert moved(plan) == ((total, 0, 0, 0) if plan.rank == root else (0, total, 0, 0))
    for plan in plans_of("reduce", "shared", world, total, root)[1]:
        assert moved(plan)[0] == (others * block if plan.rank == root else total)
    assert moved(plans_of("scan", "shared_direct", world, total)[1][-1])[0] == 0  # nobody needs the last operand


def test_slices_number_items_as_they_are_published():
    rng = random.Random(1)
    for _ in range(200):
        world = rng.randint(2, 6)
        counts = tuple(rng.choice((0, 1, 2, 5, 9)) for _ in range(world))
        if not any(counts):
            continue
        lookahead, root = rng.choice(((None, None), (2, None), (2, rng.randrange(world))))
        slices = Slices(counts, rng.randint(1, 4), lookahead, root)
        for rank in range(world):
            number = 0
            for chunk in range(slices.chunks + (lookahead or 0)):
                for distance in range(1, world) if chunk < slices.chunks else ():
                    to = (rank + distance) % world
                    if slices.piece(Buffer.INPUT, to, chunk).length:
                        assert slices.input_item(rank, to, chunk) == number
                        number += 1
                done = chunk - (lookahead or 0)
                if lookahead and done >= 0 and rank != root and slices.piece(Buffer.INPUT, rank, done).length:
                    assert slices.result_item(rank, done) == number
                    number += 1


def test_plans_are_made_in_time_for_their_steps():
    """Item numbers are worked out, not counted, so that a plan for many ranks takes milliseconds."""
    world, touched = 64, []
    problem = Problem.of("all_reduce", world, world * 8)

    class Counting(Slices):
        def piece(self, buffer, part, chunk):
            touched.append(part)
            return super().piece(buffer, part, chunk)

    original, shared_reduce.Slices = shared_reduce.Slices, Counting
    try:
        plan = build(problem, "shared", 3, 1)
    finally:
        shared_reduce.Slices = original
    assert len(touched) <= len(plan.steps)


def test_no_plan_with_items_is_proven_by_rotation():
    problem, plans = plans_of("all_gather", "shared", 4, 3)
    claiming = [replace(plan, symmetry=Symmetry.ROTATION) for plan in plans]
    assert not verify_rotated(problem, claiming.__getitem__)
    verify(problem, claiming)  # though they are: item, part and distance are the same on all
    other = changed(claiming, 1, 0, item=1)
    with pytest.raises(PlanError):
        verify(problem, other)
