"""Log lines: one event each, whatever strangers put into its fields, and few of them whatever strangers do."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from asyncdist_server.logs import (
    LINES_PER_WINDOW,
    MAX_FIELD_CHARACTERS,
    WINDOW_S,
    EventLog,
    JSONFormatter,
    TextFormatter,
)


class Bench:
    """An event log on a clock and timers of its own, and what it wrote."""

    def __init__(self, formatter: logging.Formatter, with_timers: bool = True) -> None:
        self.stream = io.StringIO()
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(formatter)
        self.logger = logging.Logger("bench", logging.INFO)
        self.logger.addHandler(handler)
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.log = EventLog(self.logger, self._start if with_timers else None, lambda: self.now)

    def _start(self, delay_s: float, call: Callable[[], None]) -> Any:
        self.timers.append((self.now + delay_s, call))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def fire(self) -> None:
        due, self.timers = self.timers, []
        for at, call in due:
            self.now = at
            call()

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def text() -> Bench:
    return Bench(TextFormatter())


@pytest.fixture
def as_json() -> Bench:
    return Bench(JSONFormatter())


HOSTILE = 'a" rank=0\nerror ready x=\u2028y\x1b[2J'


def test_text_lines_have_time_level_name_and_fields(text: Bench) -> None:
    text.log.warning("connection_refused", peer="[::1]:29500", job=None, rank=3, reason="the tokens differ")
    (line,) = text.lines
    time, rest = line.split(" ", 1)
    assert time.endswith("Z")
    assert rest == 'warning connection_refused peer=[::1]:29500 rank=3 reason="the tokens differ"'


def test_json_lines_have_the_same(as_json: Bench) -> None:
    as_json.log.info("ready", address="127.0.0.1:1", pid=7)
    as_json.logger.error("not an %s", "event")
    event, message = map(json.loads, as_json.lines)
    assert event.pop("time").endswith("Z")
    assert event == {"level": "info", "event": "ready", "address": "127.0.0.1:1", "pid": 7}
    assert (message["event"], message["logger"], message["message"]) == ("message", "bench", "not an event")


def test_what_strangers_say_stays_within_its_field(text: Bench, as_json: Bench) -> None:
    for bench in (text, as_json):
        bench.log.warning("x", reason=HOSTILE, rank=1)
        assert len(bench.lines) == 1
        assert bench.stream.getvalue().isascii()
        assert "\x1b" not in bench.lines[0]
    assert text.lines[0].endswith(" rank=1")
    assert json.loads(as_json.lines[0])["reason"] == HOSTILE


@pytest.mark.parametrize("length", [MAX_FIELD_CHARACTERS, MAX_FIELD_CHARACTERS + 1])
def test_a_field_has_a_longest_text(text: Bench, length: int) -> None:
    text.log.info("x", reason="y" * length)
    assert len(text.lines[0].partition("reason=")[2]) == MAX_FIELD_CHARACTERS


def test_a_traceback_follows_in_text_and_lies_within_json(text: Bench, as_json: Bench) -> None:
    for bench in (text, as_json):
        try:
            raise ValueError("no")
        except ValueError:
            bench.logger.exception("failed")
    assert text.lines[-1] == "ValueError: no"
    assert json.loads(as_json.lines[0])["traceback"].endswith("ValueError: no")


@pytest.mark.parametrize("count", [LINES_PER_WINDOW, LINES_PER_WINDOW + 1, 100_000])
def test_a_flood_writes_so_many_lines_and_then_how_many_it_did_not(text: Bench, count: int) -> None:
    for _ in range(count):
        text.log.warning("connection_refused", reason="x")
    assert len(text.lines) == LINES_PER_WINDOW
    assert len(text.timers) == (count > LINES_PER_WINDOW)
    text.fire()
    missing = count - LINES_PER_WINDOW
    said = [line for line in text.lines if "lines_suppressed" in line]
    assert len(said) == (missing > 0)
    if missing:
        assert text.now == 100.0 + WINDOW_S
        assert said[0].endswith(f"warning lines_suppressed suppressed=connection_refused lines={missing}")


def test_a_flood_hides_no_other_event_and_ends(text: Bench) -> None:
    for _ in range(LINES_PER_WINDOW + 5):
        text.log.warning("connection_refused")
    text.log.info("draining")
    assert text.lines[-1].endswith("info draining")
    text.fire()
    text.now += WINDOW_S
    text.log.warning("connection_refused")
    assert text.lines[-1].endswith("warning connection_refused")


def test_the_rest_is_said_when_the_log_closes_or_when_the_next_line_comes() -> None:
    closed, later = Bench(TextFormatter()), Bench(TextFormatter(), with_timers=False)
    for bench in (closed, later):
        for _ in range(LINES_PER_WINDOW + 2):
            bench.log.warning("x")
    closed.log.close()
    assert closed.lines[-1].endswith("suppressed=x lines=2")
    assert not closed.timers
    later.now += WINDOW_S
    later.log.info("y")
    assert later.lines[-2].endswith("suppressed=x lines=2")
    assert later.lines[-1].endswith("info y")


def test_levels_below_the_loggers_cost_nothing(text: Bench) -> None:
    text.logger.setLevel(logging.ERROR)
    for _ in range(LINES_PER_WINDOW + 1):
        text.log.warning("x")
    text.log.error("y")
    assert [line.split()[-1] for line in text.lines] == ["y"]
    assert not text.timers
