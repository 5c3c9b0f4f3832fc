"""Tunings: what ranks publish and believe, and hosts of groups."""

from __future__ import annotations

import math
from dataclasses import replace

import msgpack
import pytest

from asyncdist.plan.cost.constants import ASYNCIO, ASYNCIO_TCP, NCCL
from asyncdist.plan.selection.tuning import (
    DEFAULT_TUNING,
    MAX_CORES,
    MAX_MESSAGE_S,
    MAX_PER_BYTE_S,
    Tuning,
    constants_from_terms,
    constants_to_terms,
)

TERMS = constants_to_terms(ASYNCIO)


@pytest.mark.parametrize("constants", [ASYNCIO, ASYNCIO_TCP, replace(ASYNCIO, cores=3)])
def test_tunings_travel_bit_by_bit(constants):
    tuning = Tuning(constants, 4, (("all_reduce", "ring"), ("broadcast", "chain")))
    again = Tuning.from_terms(msgpack.unpackb(msgpack.packb(tuning.to_terms())))
    assert again == tuning
    assert hash(again) == hash(tuning)
    assert again.override("broadcast") == "chain"
    assert again.override("reduce") is None


def test_constants_may_have_no_overhead():
    assert constants_from_terms(constants_to_terms(NCCL)) == NCCL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha_s", 0),
        ("alpha_s", -1e-6),
        ("alpha_s", math.nan),
        ("alpha_s", math.inf),
        ("alpha_s", MAX_MESSAGE_S * 1.001),
        ("alpha_s", 10**400),
        ("alpha_s", "1e-6"),
        ("alpha_s", True),
        ("alpha_s", None),
        ("beta_s", 0.0),
        ("beta_s", MAX_PER_BYTE_S * 1.001),
        ("gamma_s", -0.0),
        ("overhead_s", -1e-9),
        ("copy_s", MAX_PER_BYTE_S * 1.001),
        ("cores", -1),
        ("cores", MAX_CORES + 1),
        ("cores", 2.0),
        ("cores", True),
        ("between", []),
        ("between", {"alpha_s": 1e-6}),
        ("between", {"alpha_s": 1e-6, "beta_s": math.nan}),
        ("between", {"alpha_s": 1e-6, "beta_s": 1e-9, "gamma_s": 1e-9}),
        ("delta_s", 1e-6),
    ],
)
def test_incredible_constants_are_refused(name, value):
    with pytest.raises(ValueError, match=r"must be|constants|link"):
        constants_from_terms({**TERMS, name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("alpha_s", MAX_MESSAGE_S), ("beta_s", MAX_PER_BYTE_S), ("cores", MAX_CORES), ("copy_s", 0)]
)
def test_constants_at_the_limits_are_believed(name, value):
    assert getattr(constants_from_terms({**TERMS, name: value}), name) == value


@pytest.mark.parametrize("name", ["alpha_s", "beta_s", "gamma_s", "overhead_s"])
def test_constants_must_be_complete(name):
    with pytest.raises(ValueError, match=f"lack {name}"):
        constants_from_terms({key: value for key, value in TERMS.items() if key != name})


@pytest.mark.parametrize(
    "terms",
    [
        None,
        [],
        "ring",
        {},
        {**DEFAULT_TUNING.to_terms(), "more": 1},
        {**DEFAULT_TUNING.to_terms(), "ranks_per_host": 0},
        {**DEFAULT_TUNING.to_terms(), "ranks_per_host": "2"},
        {**DEFAULT_TUNING.to_terms(), "overrides": ["all_reduce"]},
        {**DEFAULT_TUNING.to_terms(), "overrides": {"all_reduce": 1}},
        {**DEFAULT_TUNING.to_terms(), "constants": None},
    ],
)
def test_what_is_no_tuning_is_refused(terms):
    with pytest.raises(ValueError, match=r"tuning|constants"):
        Tuning.from_terms(terms)


@pytest.mark.parametrize(
    ("ranks", "world_ranks_per_host", "expected"),
    [
        (range(8), 4, 4),
        (range(8), 8, 8),
        (range(8), 1, 1),
        (range(4), 8, 4),  # part of one host
        (range(8), 3, (0, 0, 0, 1, 1, 1, 2, 2)),  # the last host has fewer
        ((0, 1, 4, 5), 4, 2),
        ((4, 5, 0, 1), 4, 2),
        ((0, 4, 8, 12), 4, 1),
        ((0, 4, 1, 5), 4, (0, 1, 0, 1)),  # hosts take turns
        ((0, 1, 4, 2), 4, (0, 0, 1, 0)),
        ((0, 1, 2, 4), 4, (0, 0, 0, 1)),
        ((0, 1, 4, 5, 2, 3), 4, (0, 0, 1, 1, 0, 0)),  # a host comes twice
        ((5,), 4, 1),
        ((1, 3, 2), 4, 3),
    ],
)
def test_hosts_of_groups(ranks, world_ranks_per_host, expected):
    per_host, hosts = (1, expected) if isinstance(expected, tuple) else (expected, ())
    group = Tuning(ASYNCIO, world_ranks_per_host).of_group(tuple(ranks))
    assert group == Tuning(ASYNCIO, per_host, hosts=hosts)


def test_groups_of_a_world_whose_hosts_differ():
    world = Tuning(ASYNCIO, 2).placed(["big", "big", "small", "big"])
    assert (world.ranks_per_host, world.hosts) == (1, (0, 0, 1, 0))
    assert (world.of_group((2, 3)).ranks_per_host, world.of_group((2, 3)).hosts) == (1, ())
    assert (world.of_group((3, 1, 0)).ranks_per_host, world.of_group((3, 1, 0)).hosts) == (3, ())
    assert world.of_group(range(4)) is world
    assert replace(world, constants=replace(ASYNCIO, cores=2)).crowded  # three ranks of one host share them
    assert not replace(world, constants=replace(ASYNCIO, cores=3)).crowded
