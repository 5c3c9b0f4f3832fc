"""Measuring a link, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

import asyncdist as dist
from asyncdist.plan.cost.constants import Link
from asyncdist.testing import run_world
from asyncdist.transport.in_memory import MAX_FLIGHT_BYTES
from asyncdist.tuning.measure import measure_link


@pytest.mark.parametrize("latency_s", [0.0005, 0.02])
def test_it_finds_latency_and_bandwidth(latency_s):
    budget_s = 400 * latency_s
    phases: list[str] = []

    def report(phase: str, share: float) -> None:
        assert 0 <= share <= 1
        phases.append(phase)

    async def main(group: dist.ProcessGroup) -> tuple[Link, float]:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        return await measure_link(group, budget_s, report, clock), clock() - began_s

    (link, took_s), (other, _) = run_world(2, main, latency_s=latency_s)
    assert link == other
    assert link.alpha_s == pytest.approx(latency_s)
    # A simulated link takes MAX_FLIGHT_BYTES at a time, and asks for more when half of them are there.
    assert latency_s / MAX_FLIGHT_BYTES <= link.beta_s < 2.5 * latency_s / MAX_FLIGHT_BYTES
    assert 0.9 * budget_s < took_s < 1.5 * budget_s
    assert set(phases) == {"latency", "bandwidth"}


def test_a_slow_link_is_measured_all_the_same():
    async def main(group: dist.ProcessGroup) -> Link:
        return await measure_link(group, 0.001, lambda _phase, _share: None, asyncio.get_running_loop().time)

    for link in run_world(2, main, latency_s=5.0):
        assert link.alpha_s == pytest.approx(5.0)
        assert 0 < link.beta_s < 1e-3
