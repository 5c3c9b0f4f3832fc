"""Busy polling: how long, how often, and never when nothing is asked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from asyncdist_server.serving.busy_poll import (
    CAUGHT,
    MAX_BUSY_POLL_US,
    MAX_SKIPPED,
    PATIENCE,
    SHARED_SKIPPED,
    BusyPoll,
    _times_taken,
    busy_poll,
)
from asyncdist_server.serving.config import ConfigError, ServerConfig


class Turns:
    """A loop whose turns take 10 us each; counts those in which it did not sleep."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.taken = 0
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
    return BusyPoll(loop, 50, lambda: turns.taken, lambda: turns.now_s)


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


@pytest.mark.parametrize(("taken", "shared"), [(CAUGHT // 2 - 1, False), (CAUGHT // 2, True)])
def test_where_clients_share_its_core_it_looks_no_more(turns: Turns, poll: BusyPoll, taken: int, shared: bool) -> None:
    for number in range(CAUGHT + 1):
        poll.answered()
        assert turns.turn() or not number
        turns.taken += 0 < number <= taken
    poll.answered()
    assert turns.turn()
    assert turns.turn() is not shared
    polled = 0
    for _ in range(SHARED_SKIPPED):
        poll.answered()
        polled += turns.turn()
    assert polled == (0 if shared else SHARED_SKIPPED)


def test_where_they_have_another_core_again_it_looks_again(turns: Turns, poll: BusyPoll) -> None:
    for number in range(10 * SHARED_SKIPPED):
        turns.taken += number < SHARED_SKIPPED
        poll.answered()
        turns.turn()
    assert all(turns.turn() for _ in range(4))


def test_how_often_the_core_was_taken_is_known_here() -> None:
    before = _times_taken()
    deadline_s = time.monotonic() + 20
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if sys.platform != "linux":
        pytest.skip("only Linux tells it of a thread")
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            while _times_taken() == before:
                assert time.monotonic() < deadline_s
            other.kill()
    finally:
        os.sched_setaffinity(0, cores)


def test_not_where_it_cannot_pay(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    loop: Any = turns
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert busy_poll(loop, 50) is not None
    assert busy_poll(loop, 0) is None
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert busy_poll(loop, 50) is None


@pytest.mark.parametrize(("cores", "heeds"), [({0}, True), ({0, 1}, False)])
def test_only_who_is_bound_to_a_core_heeds_whose_it_is_too(
    turns: Turns, monkeypatch: pytest.MonkeyPatch, cores: set[int], heeds: bool
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
    loop: Any = turns
    made = busy_poll(loop, 50)
    assert made is not None
    assert (made._times_taken is _times_taken) is heeds


def test_times_have_bounds() -> None:
    assert ServerConfig(busy_poll_us=MAX_BUSY_POLL_US).busy_poll_us == MAX_BUSY_POLL_US
    for wrong in (-1.0, MAX_BUSY_POLL_US + 1, float("nan")):
        with pytest.raises(ConfigError, match="busy polling takes microseconds"):
            ServerConfig(busy_poll_us=wrong)
