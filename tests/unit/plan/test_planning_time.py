"""How much work it is to make a plan, counted: no callback may hold the loop for long, however large the vector.

A function call of planning takes 0.05 to 0.1 us, so that twenty thousand take a millisecond or two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from asyncdist.collectives.executor.program import Program
from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, Problem
from asyncdist.plan.records import NO_LANE, USUAL_LANE, LaneMemory
from asyncdist.plan.selection.selector import VECTOR_CHUNKS_MAX, choose
from asyncdist.plan.steps import Plan

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
WORLDS = (2, 4, 8, 64)

STEPS_MAX = 4 * VECTOR_CHUNKS_MAX
"""Steps of a plan of messages."""

SMALL_CALLS = 10_000
LARGE_CALLS = 45_000
SHARED_CALLS = 15_000
"""With up to eight ranks."""


def calls_of(work: Callable[..., object], *arguments: object) -> int:
    """Calls of functions, Python's own included, that `work` makes."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work(*arguments)
    finally:
        sys.setprofile(before)
    return calls


def planned(collective: str, world: int, nbytes: int, memory: LaneMemory) -> Plan:
    """What the first call of a shape does, for a vector of `nbytes` in all."""
    count = nbytes // 4
    if collective in BLOCK_COLLECTIVES or collective in EXCHANGES:
        count = max(1, count // world)
    problem = Problem.of(collective, world, count)
    algorithm, chunk_bytes, _ = choose(problem, 4, memory=memory)
    plan = build(problem, algorithm, world // 2, max(1, chunk_bytes // 4))
    Program(plan)
    return plan


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world", WORLDS)
def test_small_plans_are_made_in_less_than_half_a_millisecond_or_so(collective: str, world: int) -> None:
    for nbytes in (4, 64 * KIB, MIB):
        assert calls_of(planned, collective, world, nbytes, NO_LANE) <= SMALL_CALLS


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("nbytes", [16 * MIB, 256 * MIB, 4 * GIB])
def test_plans_of_messages_have_so_many_steps_at_most(collective: str, world: int, nbytes: int) -> None:
    assert calls_of(planned, collective, world, nbytes, NO_LANE) <= LARGE_CALLS
    assert len(planned(collective, world, nbytes, NO_LANE).steps) <= STEPS_MAX


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_plans_through_shared_memory_are_made_alike_however_long(collective: str, world: int) -> None:
    """A hundred times the steps are no more work."""
    small = calls_of(planned, collective, world, 32 * MIB, USUAL_LANE)
    large = calls_of(planned, collective, world, 4 * GIB, USUAL_LANE)
    assert large <= min(1.25 * small, SHARED_CALLS)
    assert len(planned(collective, world, 4 * GIB, USUAL_LANE).steps) > 4000


def test_they_are_counted() -> None:
    assert calls_of(lambda: [abs(number) for number in range(1000)]) >= 1000
    assert calls_of(lambda: None) < 10
