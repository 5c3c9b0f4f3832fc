"""Busy polling: how long, how often, and never when nothing is asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from asyncdist_server.busy_poll import MAX_BUSY_POLL_US, MAX_SKIPPED, PATIENCE, BusyPoll, busy_poll
from asyncdist_server.config import ConfigError, ServerConfig


class Turns:
    """A loop whose turns take 10 us each; counts those in which it did not sleep."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.due: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.due.append(callback)

    def turn(self) -> bool:
        """Whether there was anything to do."""
        self.now_s += 10e-6
        due, self.due = self.due, []
        for callback in due:
            callback()
        return bool(due)

    def turns_until_asleep(self) -> int:
        turns = 0
        while self.turn():
            turns += 1
            assert turns < 1000
        return turns


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def poll(turns: Turns) -> BusyPoll:
    loop: Any = turns
    return BusyPoll(loop, 50, lambda: turns.now_s)


def test_nothing_is_polled_before_the_first_answer(turns: Turns, poll: BusyPoll) -> None:
    assert not turns.turn()


def test_it_looks_for_as_long_as_it_was_told(turns: Turns, poll: BusyPoll) -> None:
    poll.answered()
    assert 5 <= turns.turns_until_asleep() <= 6
    assert not turns.turn()


def test_a_request_meanwhile_begins_the_time_anew(turns: Turns, poll: BusyPoll) -> None:
    poll.answered()
    for _ in range(20):
        for _ in range(3):
            assert turns.turn()
        poll.answered()
    assert 5 <= turns.turns_until_asleep() <= 7


def test_where_it_is_in_vain_it_becomes_rare(turns: Turns, poll: BusyPoll) -> None:
    polled = []
    for _ in range(3000):
        poll.answered()
        polled.append(turns.turns_until_asleep() > 0)
    assert all(polled[:PATIENCE])
    assert sum(polled[1000:]) == pytest.approx(2000 / (MAX_SKIPPED + 1), abs=1)


def test_where_it_pays_again_it_is_done_always(turns: Turns, poll: BusyPoll) -> None:
    for _ in range(3000):
        poll.answered()
        turns.turns_until_asleep()
    while not turns.due:
        poll.answered()
    poll.answered()  # while it looks
    turns.turns_until_asleep()
    poll.answered()
    assert turns.turn()


def test_not_where_it_cannot_pay(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    loop: Any = turns
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert busy_poll(loop, 50) is not None
    assert busy_poll(loop, 0) is None
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert busy_poll(loop, 50) is None


def test_times_have_bounds() -> None:
    assert ServerConfig(busy_poll_us=MAX_BUSY_POLL_US).busy_poll_us == MAX_BUSY_POLL_US
    for wrong in (-1.0, MAX_BUSY_POLL_US + 1, float("nan")):
        with pytest.raises(ConfigError, match="busy polling takes microseconds"):
            ServerConfig(busy_poll_us=wrong)
