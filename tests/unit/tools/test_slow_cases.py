"""What a run says of slow cases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from slow_cases import LOUD_S, PROPERTY, Durations, remember


def report(nodeid: str, duration_s: float, reason: str = "") -> Any:
    return SimpleNamespace(nodeid=nodeid, duration=duration_s, user_properties=[(PROPERTY, reason)] * bool(reason))


def test_slow_cases_are_summed_over_setup_call_and_teardown() -> None:
    reports = [report("a", 1.0, "waits"), report("a", 8.0, "waits"), report("a", 1.0, "waits"), report("b", 2.0)]
    assert Durations(reports).lines() == ["10 of 12 s in cases marked slow: 1"]


def test_who_takes_long_without_a_reason_is_listed_from_just_above_the_limit() -> None:
    reports = [report("a", LOUD_S), report("b", LOUD_S), report("b", 0.1), report("c", 2 * LOUD_S)]
    assert Durations(reports).lines()[1:] == ["SLOW WITHOUT A REASON: 8.0 s c", "SLOW WITHOUT A REASON: 4.1 s b"]


def test_reports_of_a_marked_case_carry_its_reason() -> None:
    marked = SimpleNamespace(
        get_closest_marker=lambda name: pytest.mark.slow("computes").mark if name == "slow" else None,
        user_properties=[],
    )
    remember([marked])
    assert marked.user_properties == [(PROPERTY, "computes")]
