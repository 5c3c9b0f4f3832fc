"""The cost of shared memory: figures by hand, agreement with plans and with the event simulation, and the choice."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from asyncdist.plan.algorithms import shared_move, shared_reduce
from asyncdist.plan.algorithms.registry import SHARED_ALGORITHMS, build, find, needs_lane
from asyncdist.plan.cost.constants import ASYNCIO, SHARED_MEMORY, Constants, SharedMemory
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, PRIVATE_COLLECTIVES, REDUCTIONS, Problem
from asyncdist.plan.records import PAYLOAD_SHARE, PIECES_BYTES, USUAL_LANE, LaneMemory
from asyncdist.plan.selection.prediction import predict, shape_of, shared_chunk_sizes
from asyncdist.plan.selection.selector import candidates, choose, parse_overrides, plan_for, usable
from asyncdist.plan.selection.tuning import Tuning, constants_from_terms, constants_to_terms
from asyncdist.plan.simulation.simulate import simulate
from asyncdist.plan.steps import Copy, Fetch, FetchReduce, Publish, Reduce

KIB = 1 << 10
MIB = 1 << 20
LANE = USUAL_LANE
WITHOUT_RECORDS = LaneMemory(1)
"""Memory of a lane so small that everything goes by items."""
SHARED = [
    (collective, name)
    for collective, table in SHARED_ALGORITHMS.items()
    for name in table
    if collective not in PRIVATE_COLLECTIVES
]

ROUND = Constants(1.0, 1.0, 1.0, 0.0, shared=SharedMemory(100e-6, 10e-6, operand_s=1e-6, copy_s=1e-9, reduce_s=1e-9))
"""Figures to reckon with by hand: to be woken takes 100 us, a step 10 us, a kilobyte copied or reduced 1 us."""


def problem_of(collective, world, nbytes):
    """About `nbytes` in all, as elements of a byte."""
    if collective in BLOCK_COLLECTIVES or collective in EXCHANGES:
        nbytes = nbytes // world
    return Problem.of(collective, world, 0 if collective == "barrier" else nbytes, 0, world)


@pytest.mark.parametrize(
    ("collective", "algorithm", "world", "microseconds"),
    [
        # 1,000 kB in one chunk: the steps, and the bytes by the rank that has most to do
        ("broadcast", "shared", 4, 100 + 2 * (10 + 1000)),
        ("all_gather", "shared", 4, 100 + 4 * 10 + 5 * 250),
        ("gather", "shared", 4, 100 + 4 * 10 + 5 * 250),
        ("scatter", "shared", 4, 100 + 4 * 10 + 5 * 250),
        ("reduce_scatter", "shared", 4, 100 + 6 * 10 + 4 * 250 + 3 * 250),
        ("all_to_all", "shared", 4, 100 + 6 * 10 + 7 * 250),
        ("all_reduce", "shared", 4, 2 * 100 + 10 * 10 + 7 * 250 + 3 * 250),
        ("reduce", "shared", 4, 2 * 100 + 9 * 10 + 7 * 250 + 3 * 250),
        ("all_reduce", "shared_direct", 2, 100 + 2 * 10 + 2 * 1000),
        ("all_reduce", "shared_direct", 4, 100 + 4 * 10 + 2 * 1000 + 3 * 1000),
        ("reduce", "shared_direct", 4, 100 + 4 * 10 + 2 * 1000 + 3 * 1000),
        ("scan", "shared_direct", 4, 100 + 4 * 10 + 2 * 1000 + 3 * 1000),
    ],
)
def test_formulas_by_hand(collective, algorithm, world, microseconds):
    predicted = predict(problem_of(collective, world, 1_000_000), algorithm, 1, 10**7, ROUND, WITHOUT_RECORDS)
    assert predicted.seconds == pytest.approx(microseconds * 1e-6)
    assert predicted.rounds == 1 + (algorithm == "shared" and collective in ("all_reduce", "reduce"))


@pytest.mark.parametrize(
    ("collective", "algorithm", "microseconds"),
    [
        # 1,000 kB: one step, a look at each of the ranks, and the bytes put out and taken
        ("all_reduce", "shared_direct", 100 + 10 + 4 + 1000 + 3 * 1000),
        ("all_reduce", "shared", 2 * 100 + 2 * 10 + 2 * 4 + 1000 + 4 * 250 + 3 * 250),
        ("all_gather", "shared", 100 + 10 + 4 + 250 + 4 * 250),
        ("reduce_scatter", "shared", 100 + 10 + 4 + 1000 + 3 * 250),
        ("all_to_all", "shared", 100 + 10 + 4 + 1000 + 1000),
        ("barrier", "shared", 100 + 10 + 4),
        ("broadcast", "shared", 100 + 2 * 10 + 1 + 2 * 1000),
        ("scatter", "shared", 100 + 2 * 10 + 1 + 1000 + 250),
        ("gather", "shared", 100 + 10 + 4 + 250 + 4 * 250),
        ("reduce", "shared_direct", 100 + 10 + 4 + 1000 + 3 * 1000),
    ],
)
def test_those_in_records_need_no_steps(collective, algorithm, microseconds):
    predicted = predict(problem_of(collective, 4, 1_000_000), algorithm, 1, 10**7, ROUND, LaneMemory(8_000_000))
    assert predicted.seconds == pytest.approx(microseconds * 1e-6)
    assert predicted.rounds == 1 + ((collective, algorithm) == ("all_reduce", "shared"))


def test_vectors_in_records_at_the_limit_and_one_past():
    largest = LANE.nbytes // PAYLOAD_SHARE
    at, past = (predict(problem_of("all_reduce", 2, largest + more), "shared_direct", 1, MIB, ROUND) for more in (0, 1))
    moved_s = 2 * largest * 1e-9
    assert at.seconds == pytest.approx(100e-6 + 10e-6 + 2e-6 + moved_s)
    assert past.seconds == pytest.approx(100e-6 + 4 * 10e-6 + moved_s, rel=1e-4), "two chunks"


def test_collectives_of_items_have_to_be_begun_and_ended():
    begun = replace(ROUND, shared=replace(ROUND.shared, begin_s=30e-6))
    for collective, algorithm, nbytes, more in (
        ("broadcast", "shared", 2 * MIB, 30),
        ("all_reduce", "shared", MIB, 0),
        ("all_reduce", "shared", MIB + 1, 30),
        ("all_reduce", "shared_direct", MIB + 1, 30),
        ("all_reduce", "shared_direct", MIB, 0),
        ("all_gather", "shared", 4 * MIB + 4, 30),
        ("all_gather", "shared", 4 * MIB, 0),
        ("barrier", "shared", 0, 0),
    ):
        problem = problem_of(collective, 4, nbytes)
        without, alone = (predict(problem, algorithm, 1, MIB, costs).seconds for costs in (ROUND, begun))
        assert alone - without == pytest.approx(more * 1e-6)
        without, crowded = (
            predict(problem, algorithm, 1, MIB, replace(costs, cores=2)).seconds for costs in (ROUND, begun)
        )
        assert crowded - without == pytest.approx(2 * more * 1e-6), "two ranks on each core"
    problem = problem_of("broadcast", 2, MIB)
    without, simulated = (simulate(problem, "shared", 1, costs, MIB) for costs in (ROUND, begun))
    assert simulated - without == pytest.approx(30e-6)


def test_chunks_let_readers_begin_early():
    whole, cut = (
        predict(problem_of("broadcast", 2, MIB), "shared", 1, chunk, ROUND, WITHOUT_RECORDS).seconds
        for chunk in (MIB, MIB // 8)
    )
    assert whole == pytest.approx(100e-6 + 2 * 10e-6 + 2 * MIB * 1e-9)
    assert cut == pytest.approx(100e-6 + 9 * 10e-6 + 9 / 8 * MIB * 1e-9)


def test_ranks_share_the_cores():
    problem = problem_of("all_reduce", 4, MIB)
    alone, shared = (predict(problem, "shared", 1, MIB, replace(ROUND, cores=cores)).seconds for cores in (4, 2))
    waits_s = 2 * 100e-6
    assert shared - waits_s == pytest.approx(2 * (alone - waits_s))
    turns = replace(ROUND, cores=2, turn_s=50e-6)
    assert predict(problem, "shared", 1, MIB, turns).seconds == pytest.approx(shared + 50e-6), "one waits"
    assert simulate(problem, "shared", 1, turns, MIB) == pytest.approx(
        simulate(problem, "shared", 1, replace(ROUND, cores=2), MIB) + 50e-6
    )


@pytest.mark.parametrize(("collective", "algorithm"), SHARED)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_everyones_work_is_that_of_the_plans(collective, algorithm, world):
    if collective == "barrier":
        return  # goes by records, as test_vectors_in_records says
    problem, chunk = problem_of(collective, world, world * 4 * MIB), 256 * KIB
    load = find(collective, algorithm).cost(shape_of(problem, 1, chunk))
    steps = [step for rank in range(world) for step in build(problem, algorithm, rank, chunk).steps]
    items = sum(isinstance(step, Publish | Fetch | FetchReduce) for step in steps)
    reduced = sum(step.target.length for step in steps if isinstance(step, FetchReduce | Reduce))
    copied = sum(
        (step.source if isinstance(step, Publish) else step.target).length
        for step in steps
        if isinstance(step, Publish | Fetch | Copy)
    )
    allowed = 1.01
    for counted, said in (
        (items, load.everyone.steps),
        (copied, load.everyone.copied),
        (reduced, load.everyone.worked),
    ):
        assert counted / 1.001 <= said <= counted * allowed + 1, (collective, algorithm)
    scratch = max(build(problem, algorithm, rank, chunk).scratch_count for rank in range(world))
    assert scratch <= load.scratch * 1.01
    assert load.path.copied <= load.everyone.copied


@pytest.mark.parametrize(
    ("collective", "microseconds"),
    [
        ("all_to_all_uneven", 6 * 10 + 7 * 250),
        ("gather_uneven", 4 * 10 + 5 * 250),
        ("scatter_uneven", 4 * 10 + 5 * 250),
    ],
)
def test_pieces_that_travel_whole(collective, microseconds):
    """As those of known lengths in one chunk, whatever is asked."""
    counts = (250_000,) * (8 if collective == "all_to_all_uneven" else 4)
    problem = Problem.of(collective, 4, counts, 0, 4)
    assert predict(problem, "shared", 1, 1, ROUND, LANE).seconds == pytest.approx((100 + microseconds) * 1e-6)


@pytest.mark.parametrize("collective", PRIVATE_COLLECTIVES)
def test_short_pieces_take_as_long_as_what_all_know(collective):
    even = collective.removesuffix("_uneven")

    def seconds(name, length):
        counts = (length,) * 8 if name == "all_to_all_uneven" else length
        return predict(Problem.of(name, 4, counts, 0, 4), "shared", 1, 1 << 20, ROUND, LANE).seconds

    longest = PIECES_BYTES if even == "gather" else PIECES_BYTES // 4
    for length in (1, longest):
        assert seconds(collective, length) == seconds(even, length)
    assert seconds(collective, longest + 1) > seconds(even, longest + 1)


@pytest.mark.parametrize(("collective", "algorithm"), SHARED)
def test_formulas_and_simulation_agree(collective, algorithm, monkeypatch):
    for module in (shared_move, shared_reduce):  # plans are simulated, and none goes by records
        monkeypatch.setattr(module, "by_records", lambda *_: False)
    ratios = []
    for cores in (0, 2):
        constants = replace(ASYNCIO, cores=cores, shared=replace(SHARED_MEMORY, operand_s=SHARED_MEMORY.step_s))
        for world in (2, 3, 4, 8):
            for nbytes in (0,) if collective == "barrier" else (4 * KIB, 64 * KIB, MIB, 16 * MIB):
                problem = problem_of(collective, world, nbytes)
                chunk = shared_chunk_sizes(problem, algorithm, 1, LANE.nbytes)[-1]
                predicted_s = predict(problem, algorithm, 1, chunk, constants).seconds
                simulated_s = simulate(problem, algorithm, 1, constants, chunk)
                ratios.append(predicted_s / simulated_s)
                late_s = constants.shared.wake_s  # of ranks in step, that need not be woken where they are simulated
                assert 0.6 * simulated_s < predicted_s < 1.6 * simulated_s + late_s, (problem, predicted_s, simulated_s)
    assert 0.8 < statistics.median(ratios) < 1.35


def test_simulation_by_hand():
    """Rank 0 publishes in 10 us and 1,000; rank 1 is woken 100 later, and copies as long."""
    problem = Problem.of("broadcast", 2, 1_000_000)
    assert simulate(problem, "shared", 1, ROUND, 1_000_000) == pytest.approx(2120e-6)
    # two chunks: while rank 1 copies the first, the second is put out, and needs nobody to be woken
    assert simulate(problem, "shared", 1, ROUND, 500_000) == pytest.approx((510 + 100 + 510 + 510) * 1e-6)
    assert simulate(Problem.of("barrier", 3, 0), "shared", 1, ROUND, 1) == pytest.approx((10 + 100 + 2 * 10) * 1e-6)
    # two cores for three readers of 1,010 us
    assert simulate(
        problem_of("broadcast", 4, 1_000_000), "shared", 1, replace(ROUND, cores=2), 10**6
    ) == pytest.approx((1010 + 100 + 2 * 1010) * 1e-6)


# -- choosing


def one_host(world, cores=2):
    return Tuning(replace(ASYNCIO, cores=cores), world)


def chosen(collective, world, nbytes, **how):
    return choose(problem_of(collective, world, nbytes), 1, one_host(world), memory=LANE, **how)[0]


@pytest.mark.parametrize(
    ("world", "direct", "sliced"),
    [(3, MIB, 2 * MIB), (4, 256 * KIB, MIB), (8, 256 * KIB, MIB)],
)
def test_small_vectors_are_reduced_whole_and_large_ones_in_slices(world, direct, sliced):
    """About where measurement on two cores has put it; two ranks take as long by either."""
    assert chosen("all_reduce", world, 4) == "shared_direct"
    assert chosen("all_reduce", world, direct) == "shared_direct"
    assert chosen("all_reduce", world, sliced) == "shared"
    assert chosen("all_reduce", world, 64 * MIB) == "shared"


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_what_moves_items_is_chosen_for_that_however_small(collective):
    """Operations of the user's own were planned as if they went by records, where chunks do not matter."""
    for world in (2, 4, 8):
        for nbytes in (256 * KIB, MIB):
            problem = problem_of(collective, world, nbytes)
            tuning = one_host(world, cores=0)
            found = candidates(problem, 1, tuning, memory=LANE, in_records=False)
            simulated = [simulate(problem, one.algorithm, 1, tuning.constants, one.chunk_bytes) for one in found]
            assert simulated[0] < 1.5 * min(simulated), (problem, found[0])
            assert found[0].seconds > 0.6 * simulated[0]


@pytest.mark.parametrize("collective", sorted({name for name, _ in SHARED} - {"scan", "exscan"}))
def test_few_ranks_of_one_host_share_memory_for_all_collectives(collective):
    """For all but the smallest blocks, and for two ranks of which one gives: messages carry those as fast."""
    for world in (3, 4, 8) if collective in ("gather", "scatter") else (2, 3, 4, 8):
        for nbytes in (MIB, 16 * MIB):
            assert needs_lane(collective, chosen(collective, world, nbytes))
            assert not needs_lane(collective, choose(problem_of(collective, world, nbytes), 1, one_host(world))[0])


def test_large_scans_of_many_go_by_messages():
    """Rank r reads r vectors."""
    assert chosen("scan", 4, 64) == "shared_direct"
    assert chosen("scan", 16, 16 * MIB) == "chain"


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_the_order_of_ranks_is_kept_where_that_is_asked(collective):
    for world in (2, 3, 8):
        for nbytes in (64, MIB):
            problem = problem_of(collective, world, nbytes)
            name, chunk, _ = choose(problem, 1, one_host(world), ordered=True, memory=LANE)
            assert all(build(problem, name, rank, chunk).ordered for rank in range(world))


def test_overrides_may_name_them_and_count_where_there_is_a_lane():
    assert parse_overrides("all_reduce:shared,scan:shared_direct") == {"all_reduce": "shared", "scan": "shared_direct"}
    with pytest.raises(ValueError, match=r"no such algorithm; scan has: .*shared_direct"):
        parse_overrides("scan:shared")
    tuning = replace(one_host(4), overrides=(("all_reduce", "shared"),))
    problem = problem_of("all_reduce", 4, 64 * KIB)
    assert choose(problem, 1, tuning, memory=LANE)[0] == "shared"
    assert not needs_lane("all_reduce", choose(problem, 1, tuning)[0])
    assert choose(problem, 1, tuning, ordered=True, memory=LANE)[0] == "shared_direct"
    assert not usable("all_reduce", "shared", ordered=False, shared=False)
    assert not usable("all_reduce", "shared", ordered=True, shared=True)
    assert usable("all_reduce", "ring", ordered=False, shared=False)
    ring = replace(one_host(4), overrides=(("all_reduce", "ring"),))
    assert choose(problem, 1, ring, memory=LANE)[0] == "ring"


def test_one_that_is_named_needs_a_lane():
    assert plan_for("all_reduce", 1, 4, 100, 4, algorithm="shared", memory=LANE).algorithm == "shared"
    with pytest.raises(ValueError, match="all_reduce:shared needs memory that all ranks share"):
        plan_for("all_reduce", 1, 4, 100, 4, algorithm="shared")


def test_plans_are_cached_by_the_memory_of_the_lane():
    """All ranks have to cut alike, so the length of chunks depends on what they have agreed on."""
    large, small = (
        plan_for("all_reduce", 0, 16, 4 * MIB, 4, algorithm="shared", memory=room)
        for room in (LANE, LaneMemory(2 * MIB))
    )
    assert plan_for("all_reduce", 0, 16, 4 * MIB, 4, algorithm="shared", memory=LANE) is large
    longest = [
        max(step.source.length for step in plan.steps if isinstance(step, Publish)) * 4 for plan in (large, small)
    ]
    assert 16 * longest[1] <= 2 * MIB < 3 * 16 * longest[0] <= LANE.nbytes


def test_candidates_say_what_is_published():
    found = {one.algorithm: one for one in candidates(problem_of("all_reduce", 4, MIB), 1, one_host(4), memory=LANE)}
    assert found["shared"].sent_bytes == found["shared_direct"].sent_bytes == MIB
    assert found["shared"].rounds == 2
    assert "ring" in found


# -- as terms


def test_costs_travel_as_plain_values():
    constants = replace(ASYNCIO, shared=SharedMemory(1e-6, 2e-6, 3e-7, 1e-10, 2e-10))
    terms = constants_to_terms(constants)
    assert constants_from_terms(terms) == constants
    del terms["shared"]
    assert constants_from_terms(terms).shared == SHARED_MEMORY


@pytest.mark.parametrize(
    "shared",
    [
        7,
        {"wake_s": 1e-6},
        {"wake_s": -1.0},
        {**dict.fromkeys(("step_s", "operand_s"), 1e-6), "wake_s": 11, "copy_s": 1e-9, "reduce_s": 1e-9},
    ],
)
def test_costs_that_are_none_are_refused(shared):
    with pytest.raises(ValueError, match=r"shared memory|lack|wake_s"):
        constants_from_terms({**constants_to_terms(ASYNCIO), "shared": shared})
    with pytest.raises(ValueError, match="must not be negative"):
        replace(ASYNCIO, shared=replace(SHARED_MEMORY, step_s=-1.0))
