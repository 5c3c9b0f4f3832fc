"""The choice of algorithm, the cache, overrides and fingerprints."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest

from asyncdist.plan.algorithms.registry import EVERY, ordered_algorithms
from asyncdist.plan.cost.constants import ASYNCIO, ASYNCIO_LOOPBACK, ASYNCIO_TCP, Link
from asyncdist.plan.problem import COLLECTIVES, PRIVATE_COLLECTIVES, Problem
from asyncdist.plan.records import LaneMemory
from asyncdist.plan.selection import selector
from asyncdist.plan.selection.prediction import predict
from asyncdist.plan.selection.selector import (
    algorithms,
    candidates,
    choose,
    chunk_sizes,
    parse_overrides,
    plan_for,
    plan_id,
)
from asyncdist.plan.selection.tuning import Tuning

KIB = 1 << 10
MIB = 1 << 20


def one_host(ranks, cores=2):
    return Tuning(replace(ASYNCIO, cores=cores), ranks)


def chosen(collective, world, count, tuning=None, itemsize=1, **how):
    tuning = tuning or one_host(world)
    problem = Problem.of(collective, world, count, 0, tuning.ranks_per_host)
    return choose(problem, itemsize, tuning, **how)[0]


@pytest.mark.parametrize(
    ("world", "nbytes", "algorithm"),
    [
        # As fitted by measurement on two cores, where all that is left to win is messages and reductions.
        (2, 4, "recursive_doubling"),
        (2, 256 * KIB, "recursive_doubling"),
        (2, 1 * MIB, "ring"),
        (2, 64 * MIB, "ring"),
        (4, 4, "linear"),
        (4, 256 * KIB, "linear"),
        (4, 64 * MIB, "ring"),
    ],
)
def test_all_reduce_on_one_small_host_is_as_measured(world, nbytes, algorithm):
    assert chosen("all_reduce", world, nbytes) == algorithm


def test_ranks_that_share_cores_meet_at_rank_0():
    """Measured by `bench collectives --pin --transport tcp`: 120 us, not 128, on 4 ranks, and 312, not 471, on 8."""
    for world in (4, 8):
        assert chosen("barrier", world, 0, Tuning(replace(ASYNCIO_LOOPBACK, cores=2), world)) == "linear"
    assert chosen("barrier", 8, 0, Tuning(ASYNCIO_TCP)) == "dissemination"


def test_four_ranks_use_few_rounds_of_least_bytes_between_the_smallest_and_the_largest():
    assert chosen("all_reduce", 4, 1 * MIB) in ("circulant", "halving_doubling")


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_no_tree_whose_inner_ranks_are_on_one_core(collective):
    """Measured by `bench collectives --pin --transport tcp`: 16 MiB take a chain 10.2 ms, a binomial tree 12.9."""
    tuning = Tuning(replace(ASYNCIO_LOOPBACK, cores=2), 4)
    assert chosen(collective, 4, 16 * MIB, tuning) == "chain"


@pytest.mark.parametrize(
    ("world", "limits"),
    [(2, (512 * KIB, 768 * KIB)), (8, (128 * KIB, 192 * KIB)), (64, (76 * KIB, 160 * KIB))],
)
def test_over_tcp_recursive_doubling_ends_where_the_cost_table_says(world, limits):
    tuning = Tuning(ASYNCIO_TCP)
    below, above = limits
    assert chosen("all_reduce", world, below // 2, tuning) == "recursive_doubling"
    assert chosen("all_reduce", world, above, tuning) != "recursive_doubling"


def test_worlds_that_are_no_power_of_two_need_no_fold():
    assert chosen("all_reduce", 6, 256 * KIB, Tuning(ASYNCIO_TCP)) == "circulant"


def test_small_worlds_broadcast_directly_and_large_ones_by_trees():
    tuning = Tuning(ASYNCIO_TCP)
    assert chosen("broadcast", 4, 4, tuning) == "linear"
    assert chosen("broadcast", 64, 4, tuning) == "binomial_tree"
    assert chosen("broadcast", 64, 4 * MIB, tuning) == "double_tree"
    assert chosen("gather", 8, 4, tuning) == "linear"
    assert chosen("gather", 1024, 4, tuning) == "binomial_tree"
    assert chosen("all_to_all", 64, 4, tuning) == "bruck"
    assert chosen("all_to_all", 8, 64 * KIB, tuning) == "linear"


def test_hosts_of_several_ranks_keep_bytes_at_home():
    crossing = replace(ASYNCIO, cores=8)
    assert chosen("all_reduce", 64, 64 * MIB, Tuning(crossing, 1)) == "ring"
    problem = Problem.of("all_reduce", 64, 1 * MIB, 0, 8)
    assert choose(problem, 1, Tuning(crossing, 8))[0] == "halving_doubling"  # neighbors come first there
    circulant = predict(problem, "circulant", 1, MIB, crossing).seconds
    assert circulant > 2 * predict(problem, "halving_doubling", 1, MIB, crossing).seconds


def test_memory_bounds_the_choice():
    large = 4 * selector.SCRATCH_MAX_BYTES
    found = candidates(Problem.of("all_reduce", 7, large, 0, 7), 1, one_host(7))
    assert found[0].scratch_bytes <= selector.SCRATCH_MAX_BYTES
    greedy = [one for one in found if one.scratch_bytes > selector.SCRATCH_MAX_BYTES]
    assert greedy
    assert found[-len(greedy) :] == greedy
    [only] = candidates(Problem.of("all_reduce", 7, large, 0, 7), 1, one_host(7), algorithm="direct")
    assert only.scratch_bytes > selector.SCRATCH_MAX_BYTES  # named, so the caller's affair


def test_the_bound_of_memory_at_and_one_past(monkeypatch):
    """Recursive doubling needs a vector of memory between two ranks, and is best here."""
    assert chosen("all_reduce", 2, 64 * KIB) == "recursive_doubling"
    monkeypatch.setattr(selector, "SCRATCH_MAX_BYTES", 64 * KIB)
    assert chosen("all_reduce", 2, 64 * KIB) == "recursive_doubling"
    best = candidates(Problem.of("all_reduce", 2, 64 * KIB + 1), 1, one_host(2))[0]
    assert best.scratch_bytes <= 64 * KIB
    assert best.algorithm not in ("recursive_doubling", "direct")


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_choice_exists(collective):
    for world, count in itertools.product((1, 2, 3, 5, 8, 100), (0, 1, 1000, 10**6)):
        if collective == "all_to_all_uneven":
            count = (count,) * 2 * world
        elif collective == "barrier":
            count = 0
        assert chosen(collective, world, count) in algorithms(collective), (world, count)
        if ordered_algorithms(collective):
            assert chosen(collective, world, count, ordered=True) in ordered_algorithms(collective), (world, count)


@pytest.mark.parametrize("collective", PRIVATE_COLLECTIVES)
def test_lengths_that_others_do_not_know_sway_nothing(collective):
    per_rank = 2 if collective == "all_to_all_uneven" else 1
    small, large = (0,) * 4 * per_rank, (10 * MIB,) * 4 * per_rank
    tuning = one_host(4)
    assert choose(Problem.of(collective, 4, small), 8, tuning) == choose(Problem.of(collective, 4, large), 8, tuning)


def test_overrides_of_the_tuning_count_unless_order_matters():
    tuning = replace(one_host(4), overrides=(("all_reduce", "ring"),))
    assert chosen("all_reduce", 4, 4, tuning) == "ring"
    assert chosen("all_reduce", 4, 4, tuning, algorithm="direct") == "direct"
    assert chosen("all_reduce", 4, 4, tuning, ordered=True) in ordered_algorithms("all_reduce")
    assert chosen("broadcast", 4, 4, tuning) != "ring"


def test_ranks_that_plan_alike_choose_alike():
    tuning = one_host(4)
    again = Tuning.from_terms(tuning.to_terms())
    for nbytes in (4, 10**5, 10**7):
        plans = [plan_for("all_reduce", rank, 4, nbytes, 1, tuning=tuning) for rank in range(4)]
        assert len({plan.algorithm for plan in plans}) == 1
        assert plan_for("all_reduce", 0, 4, nbytes, 1, tuning=again) is plans[0]


def test_chunks_stay_within_their_limits():
    problem = Problem.of("broadcast", 2, 1)
    assert chunk_sizes(problem, 1) == (128 * KIB, 256 * KIB, 512 * KIB, 1 * MIB)
    assert chunk_sizes(problem, 1)[0] == selector.CHUNK_MIN_BYTES
    assert chunk_sizes(problem, 1)[-1] == selector.CHUNK_MAX_BYTES
    largest = selector.CHUNKS_MAX * selector.CHUNK_MAX_BYTES
    assert chunk_sizes(Problem.of("broadcast", 2, largest), 1) == (selector.CHUNK_MAX_BYTES,)
    assert chunk_sizes(Problem.of("broadcast", 2, largest + 1), 1) == (selector.CHUNK_MAX_BYTES + 1,)
    assert chunk_sizes(Problem.of("all_reduce", 2, 2 * largest), 1) == (selector.CHUNK_MAX_BYTES,)


@pytest.mark.parametrize(
    ("gigabits", "least"), [(10, 128 * KIB), (4.2, 128 * KIB), (2, 64 * KIB), (1, 32 * KIB), (0.01, 32 * KIB)]
)
def test_chunks_are_smaller_on_slow_links_between_hosts(gigabits, least):
    tuning = Tuning(replace(ASYNCIO, between=Link(alpha_s=60e-6, beta_s=8e-9 / gigabits)))
    problem = Problem.of("all_reduce", 4, MIB)
    assert chunk_sizes(problem, 1, tuning)[0] == least
    assert chunk_sizes(problem._replace(ranks_per_host=2), 1, tuning)[0] == least
    assert chunk_sizes(problem._replace(ranks_per_host=4), 1, tuning)[0] == selector.CHUNK_MIN_BYTES
    assert candidates(problem, 1, tuning, algorithm="ring")[0].chunk_bytes == least


def test_what_ranks_pass_on_between_hosts_is_cut_into_few_chunks():
    slow = Tuning(replace(ASYNCIO, between=Link(alpha_s=60e-6, beta_s=40e-9)))
    for tuning in (slow, Tuning(ASYNCIO)):
        assert chunk_sizes(Problem.of("all_reduce", 4, 16 * MIB), 1, tuning)[0] == 512 * KIB
        assert chunk_sizes(Problem.of("all_reduce", 4, 64 * MIB), 1, tuning)[0] == selector.CHUNK_MAX_BYTES
    assert chunk_sizes(Problem.of("broadcast", 4, 16 * MIB), 1, Tuning(ASYNCIO))[0] == selector.CHUNK_MIN_BYTES
    assert chunk_sizes(Problem.of("all_reduce", 4, 16 * MIB, 0, 4), 1)[0] == selector.CHUNK_MIN_BYTES


def test_chunks_of_a_vector_at_the_most_there_are_and_one_past():
    largest = selector.VECTOR_CHUNKS_MAX * selector.CHUNK_MAX_BYTES
    assert chunk_sizes(Problem.of("all_reduce", 8, largest), 1) == (selector.CHUNK_MAX_BYTES,)
    assert chunk_sizes(Problem.of("all_reduce", 8, largest + 1), 1) == (selector.CHUNK_MAX_BYTES + 1,)
    half = largest // 2
    assert chunk_sizes(Problem.of("all_reduce", 64, half), 1) == (512 * KIB, 1 * MIB)
    assert chunk_sizes(Problem.of("all_reduce", 64, half + 1), 1) == (1 * MIB,)


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name not in PRIVATE_COLLECTIVES])
def test_one_prediction_is_made_of_those_that_cut_nothing_and_of_no_others(collective):
    """Whether predictions differ between chunks, somewhere."""
    cutting = set()
    for world, nbytes in [(2, 256 * KIB), (3, 4 * MIB), (8, 4 * MIB), (64, 64 * MIB)]:
        count = {"all_gather": nbytes // world, "barrier": 0}.get(collective, nbytes)
        problem = Problem.of(collective, world, count, 0, world)
        for name in algorithms(collective, shared=True):
            sizes = (size << 10 for size in (32, 128, 512, 1024))
            found = {predict(problem, name, 1, size, ASYNCIO)._replace(chunk_bytes=0) for size in sizes}
            if len(found) > 1:
                cutting.add(name)
    assert cutting == {one.name for one in EVERY if one.collective == collective and one.chunked}


@pytest.mark.parametrize("nbytes", [128 * KIB, 128 * KIB + 1, 512 * KIB, 3 * MIB])
def test_larger_chunks_than_all_there_is_would_change_nothing(nbytes, monkeypatch):
    for collective in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"):
        problem = Problem.of(collective, 4, nbytes if collective in ("all_reduce", "broadcast") else nbytes // 4)
        found = candidates(problem, 1, one_host(4), memory=LaneMemory(8 * MIB))
        with monkeypatch.context() as patch:
            patch.setattr(selector, "_first_of_all", lambda sizes, nbytes: len(sizes))
            assert candidates(problem, 1, one_host(4), memory=LaneMemory(8 * MIB)) == found


def test_the_chunk_is_the_best_of_those():
    problem = Problem.of("all_reduce", 16, 8 * MIB)
    tuning = Tuning(ASYNCIO_TCP)
    name, chunk, _ = choose(problem, 1, tuning, algorithm="ring")
    times = {size: predict(problem, "ring", 1, size, tuning.constants).seconds for size in chunk_sizes(problem, 1)}
    assert name == "ring"
    assert times[chunk] == min(times.values())
    assert len(set(times.values())) > 1


def test_large_elements_still_make_chunks():
    plan = plan_for("all_reduce", 0, 2, 4, 4 * MIB, algorithm="ring")
    assert len(plan.steps) > 0


def test_the_same_question_gets_the_same_plan():
    plan = plan_for("all_gather", 1, 4, (1, 2, 3, 4), 8)
    assert plan_for("all_gather", 1, 4, [1, 2, 3, 4], 8) is plan
    assert plan_for("all_gather", 2, 4, (1, 2, 3, 4), 8) is not plan
    assert (plan.collective, plan.rank, plan.world) == ("all_gather", 1, 4)


def test_an_override_wins():
    assert plan_for("all_reduce", 0, 4, 10, 4, algorithm="ring").algorithm == "ring"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce", 0, 2, 1, 4, 0, "chain"), "has no algorithm 'chain'; it has: recursive_doubling"),
        (("all_reduce", 2, 2, 1, 4), "rank 2 is not in a world of 2"),
        (("all_reduce", -1, 2, 1, 4), "rank -1"),
        (("all_reduce", 0, 2, 1, 0), "at least one byte"),
        (("nothing", 0, 2, 1, 4), "unknown collective"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_for(*arguments)


def test_what_is_cached_is_neither_chosen_nor_built_again(monkeypatch):
    plan = plan_for("all_reduce", 0, 4, 1001, 4)
    for name in ("build", "candidates", "choose", "predict"):
        monkeypatch.setattr(selector, name, lambda *_, **__: pytest.fail("planned again"))
    for _ in range(3):
        assert plan_for("all_reduce", 0, 4, 1001, 4) is plan


def test_the_cache_is_bounded():
    before = selector._plan.cache_info().maxsize
    assert before == selector.PLAN_CACHE_PLANS
    for count in range(selector.PLAN_CACHE_PLANS + 1):
        plan_for("barrier", 0, 1, (0,), 1 + count)
    assert selector._plan.cache_info().currsize == selector.PLAN_CACHE_PLANS


def test_overrides():
    assert parse_overrides("") == {}
    assert parse_overrides(" all_reduce:ring , broadcast : chain,") == {"all_reduce": "ring", "broadcast": "chain"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring", "'ring' is not of the form collective:algorithm"),
        ("all_reduce:", "not of the form"),
        (":ring", "not of the form"),
        ("allreduce:ring", "no such collective; known: all_reduce"),
        ("all_reduce:chain", "no such algorithm; all_reduce has: recursive_doubling, linear, direct"),
        ("all_reduce:ring,all_reduce:direct", "given twice"),
    ],
)
def test_bad_overrides_say_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse_overrides(text)


def test_fingerprints_differ_where_ranks_would_disagree():
    base = ("broadcast", "linear", 4, 100, 1)
    others = [
        ("reduce", "linear", 4, 100, 1),
        ("broadcast", "chain", 4, 100, 1),
        ("broadcast", "linear", 5, 100, 1),
        ("broadcast", "linear", 4, 101, 1),
        ("broadcast", "linear", 4, 100, 2),
        ("broadcast", "linear", 4, 100, 1, "float32 sum"),
    ]
    ids = {plan_id(*base)} | {plan_id(*other) for other in others}
    assert len(ids) == len(others) + 1
    assert all(0 <= number < 1 << 32 for number in ids)
    assert plan_id("all_gather", "ring", 3, 5) == plan_id("all_gather", "ring", 3, (5, 5, 5))
    assert plan_id("all_gather", "ring", 3, (5, 5, 6)) != plan_id("all_gather", "ring", 3, (5, 6, 5))


def test_fingerprints_are_the_same_in_another_process():
    code = "from asyncdist.plan.selection.selector import plan_id; print(plan_id('all_gather', 'ring', 3, (5, 6, 5)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == plan_id("all_gather", "ring", 3, (5, 6, 5))


@pytest.mark.parametrize(("cores", "ranks", "crowded"), [(0, 8, False), (2, 2, False), (2, 3, True)])
def test_a_host_is_crowded_where_ranks_share_its_cores(cores, ranks, crowded):
    assert Tuning(replace(ASYNCIO, cores=cores), ranks).crowded is crowded
