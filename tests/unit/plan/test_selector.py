"""The choice of algorithm, the cache, overrides and fingerprints."""

from __future__ import annotations

import subprocess
import sys
import timeit

import pytest

from asyncdist.plan import selector
from asyncdist.plan.problem import COLLECTIVES, Problem
from asyncdist.plan.selector import algorithms, choose, chunk_bytes, parse_overrides, plan_for, plan_id

KIB = 1 << 10
MIB = 1 << 20


def chosen(collective, world, count):
    return choose(Problem.of(collective, world, count), 1)


@pytest.mark.parametrize(
    ("collective", "world", "limit", "up_to", "above"),
    [
        ("all_reduce", 2, selector.DOUBLING_PAIR_BYTES, "recursive_doubling", "ring"),
        ("all_reduce", 3, selector.DIRECT_REDUCE_BYTES, "linear", "recursive_doubling"),
        ("all_reduce", 4, selector.DOUBLING_BYTES, "recursive_doubling", "circulant"),
        ("all_reduce", 4, 4 * selector.RING_BLOCK_BYTES - 1, "circulant", "ring"),
        ("broadcast", 4, selector.LINEAR_BROADCAST_BYTES, "linear", "binomial_tree"),
        ("broadcast", 4, selector.CHAIN_BYTES - 1, "binomial_tree", "chain"),
        ("broadcast", 64, 64 * selector.CHAIN_RANK_BYTES - 1, "binomial_tree", "chain"),
        ("reduce", 4, selector.LINEAR_BROADCAST_BYTES, "linear", "binomial_tree"),
        ("reduce", 16, 16 * selector.CHAIN_RANK_BYTES - 1, "binomial_tree", "chain"),
        ("all_gather", 8, selector.DIRECT_GATHER_BYTES, "linear", "circulant"),
        ("all_gather", 16, selector.RING_BLOCK_BYTES - 1, "circulant", "ring"),
        ("reduce_scatter", 4, selector.RING_BLOCK_BYTES - 1, "circulant", "ring"),
        ("gather", 33, selector.TREE_BLOCK_BYTES - 1, "binomial_tree", "linear"),
        ("scatter", 33, selector.TREE_BLOCK_BYTES - 1, "binomial_tree", "linear"),
    ],
)
def test_thresholds_at_and_one_past(collective, world, limit, up_to, above):
    assert chosen(collective, world, limit) == up_to
    assert chosen(collective, world, limit + 1) == above


@pytest.mark.parametrize(
    ("collective", "world", "count", "up_to", "above"),
    [
        ("all_reduce", 7, 4, "linear", "recursive_doubling"),  # 8 is a power of two, 9 is past DIRECT_WORLD
        ("broadcast", 4, 4, "linear", "binomial_tree"),
        ("all_gather", 8, 4, "linear", "circulant"),
        ("gather", 32, 4, "linear", "binomial_tree"),
        ("scatter", 32, 4, "linear", "binomial_tree"),
    ],
)
def test_world_limits_at_and_one_past(collective, world, count, up_to, above):
    assert chosen(collective, world, count) == up_to
    assert chosen(collective, world + 1, count) == above


def test_worlds_past_the_direct_limit_double():
    assert chosen("all_reduce", 9, 4) == "recursive_doubling"


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("count", [0, 1, 1000, 10**6])
def test_every_choice_exists(collective, world, count):
    if collective == "all_to_all_uneven":
        count = (count,) * 2 * world
    assert chosen(collective, world, count) in algorithms(collective)


def test_chunks_stay_within_their_limits():
    assert chunk_bytes(Problem.of("all_reduce", 4, 1), 8) == selector.CHUNK_MIN_BYTES
    assert chunk_bytes(Problem.of("all_reduce", 2, MIB), 2) == selector.CHUNK_MIN_BYTES * 2
    assert chunk_bytes(Problem.of("all_reduce", 2, 8 * MIB), 1) == selector.CHUNK_MAX_BYTES
    largest = selector.CHUNKS_MAX * selector.CHUNK_MAX_BYTES
    assert chunk_bytes(Problem.of("broadcast", 2, largest), 1) == selector.CHUNK_MAX_BYTES
    assert chunk_bytes(Problem.of("broadcast", 2, largest + 1), 1) == selector.CHUNK_MAX_BYTES + 1
    assert chunk_bytes(Problem.of("all_gather", 2, (1, 2 * MIB)), 1) == MIB // 2


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
        (("all_reduce", 0, 2, 1, 4, 0, "chain"), "has no algorithm 'chain'; it has: linear"),
        (("all_reduce", 2, 2, 1, 4), "rank 2 is not in a world of 2"),
        (("all_reduce", -1, 2, 1, 4), "rank -1"),
        (("all_reduce", 0, 2, 1, 0), "at least one byte"),
        (("nothing", 0, 2, 1, 4), "unknown collective"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_for(*arguments)


def test_a_cached_lookup_is_quick():
    plan_for("all_reduce", 0, 4, 1000, 4)
    best_s = min(timeit.repeat(lambda: plan_for("all_reduce", 0, 4, 1000, 4), number=1000, repeat=20)) / 1000
    assert best_s < 2e-6


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
        ("all_reduce:chain", "no such algorithm; all_reduce has: linear, recursive_doubling"),
        ("all_reduce:ring,all_reduce:linear", "given twice"),
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
    code = "from asyncdist.plan.selector import plan_id; print(plan_id('all_gather', 'ring', 3, (5, 6, 5)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == plan_id("all_gather", "ring", 3, (5, 6, 5))
