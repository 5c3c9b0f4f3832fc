"""Time-outs: what is accepted, and what it becomes."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

from asyncdist.concurrency.deadline import INHERIT, Deadline, timeout_seconds


def test_what_is_accepted() -> None:
    assert timeout_seconds(INHERIT, 7.0) == 7.0
    assert timeout_seconds(None, 7.0) is None
    assert timeout_seconds(0, 7.0) == 0.0
    assert timeout_seconds(1.5, None) == 1.5
    assert [timeout_seconds(number, None) for number in (np.int64(2), np.float32(0.5))] == [2.0, 0.5]
    assert timeout_seconds(timedelta(minutes=2), None) == 120.0
    assert timeout_seconds(float("inf"), 7.0) is None


@pytest.mark.parametrize("timeout", ["1", True, [1]])
def test_other_types_are_refused(timeout: object) -> None:
    with pytest.raises(TypeError, match="timeout"):
        timeout_seconds(timeout, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [-1, float("nan"), timedelta(seconds=-1)])
def test_impossible_values_are_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="negative or NaN"):
        timeout_seconds(timeout, None)


def test_a_deadline_is_fixed_once() -> None:
    deadline = Deadline.after(5.0, 100.0)
    assert deadline.remaining_s(102.0) == 3.0
    assert deadline.remaining_s(110.0) == 0.0
    assert not deadline.expired(104.9)
    assert deadline.expired(105.0)
    assert deadline.given_s == 5.0  # whatever is left of it
    never = Deadline.after(None, 100.0)
    assert never.remaining_s(1e9) is None
    assert not never.expired(1e9)
