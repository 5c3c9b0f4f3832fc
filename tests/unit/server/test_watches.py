"""Watches and the history they need in the engine, with the time passed in."""

from __future__ import annotations

import pytest
from engine_user import User, pass_time

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.history import HISTORY_BYTES, HISTORY_EVENTS, HISTORY_LINGER_S
from asyncdist_server.wire import messages as m


def test_a_watch_is_answered_by_the_next_event(users: list[User]) -> None:
    a, b = users[:2]
    a.ask(m.SET, b"p", b"")
    start, events = a.ask(m.WATCH, b"p", None, None)
    assert events == []
    assert a.reply(m.WATCH, b"p", start, None) is None
    assert a.code(m.WATCH, b"p", start, 0) == m.TIMEOUT
    b.ask(m.SET, b"other", b"")
    assert a.take() == []
    b.ask(m.SET, b"px", b"1")
    assert a.take() == [(3, m.OK, (start + 2, [(start + 1, m.EVENT_SET, b"px", b"1")]))]
    b.ask(m.DELETE, b"px")
    assert a.ask(m.WATCH, b"p", start, None)[1] == [
        (start + 1, m.EVENT_SET, b"px", b"1"),
        (start + 2, m.EVENT_DELETE, b"px", b""),
    ]


def test_a_watch_that_is_too_far_behind_is_told(users: list[User], engine: StoreEngine) -> None:
    a = users[0]
    start, _ = a.ask(m.WATCH, b"k", None, None)
    for _ in range(HISTORY_EVENTS):
        a.ask(m.SET, b"k", b"")
    assert a.code(m.WATCH, b"k", start, None) == m.OK  # at the bound
    a.ask(m.SET, b"k", b"")
    assert a.code(m.WATCH, b"k", start, None) == m.COMPACTED  # one past it
    assert a.code(m.WATCH, b"k", start + 1, None) == m.OK
    assert a.code(m.WATCH, b"k", start + HISTORY_EVENTS + 2, None) == m.COMPACTED  # not yet happened


def test_the_bytes_of_a_history_are_bounded(users: list[User], engine: StoreEngine) -> None:
    a = users[0]
    start, _ = a.ask(m.WATCH, b"k", None, None)
    for _ in range(4):
        a.ask(m.SET, b"k", bytes(HISTORY_BYTES // 3))
    assert engine.memory_bytes < 1.5 * HISTORY_BYTES
    assert a.code(m.WATCH, b"k", start, None) == m.COMPACTED
    a.ask(m.SET, b"k", bytes(2 * HISTORY_BYTES))
    assert len(a.ask(m.WATCH, b"k", start + 4, None)[1]) == 1  # the newest stays whatever its size


def test_history_gives_way_to_what_is_stored() -> None:
    engine = StoreEngine(b"i" * 16, m.Limits()._replace(memory_bytes=100_000))
    a = User(engine, b"a")
    start, _ = a.ask(m.WATCH, b"k", None, None)
    for _ in range(20):
        a.ask(m.SET, b"k", bytes(4000))
    a.ask(m.SET, b"large", bytes(60_000))
    assert engine.memory_bytes <= 100_000
    assert a.code(m.WATCH, b"k", start, None) == m.COMPACTED


def test_a_prefix_nobody_watches_is_forgotten(users: list[User], engine: StoreEngine) -> None:
    a, b = users[:2]
    empty = engine.memory_bytes
    start, _ = a.ask(m.WATCH, b"k", None, None)
    assert a.reply(m.WATCH, b"k", start, None) is None
    pass_time(users, 2 * HISTORY_LINGER_S)
    a.ask(m.CANCEL, a.last_id)
    a.take()
    pass_time(users, HISTORY_LINGER_S - 1)
    b.ask(m.SET, b"k", b"")
    assert a.ask(m.WATCH, b"k", start, None)[1] != []
    pass_time(users, HISTORY_LINGER_S)
    b.ask(m.DELETE, b"k")
    for user in users:
        user.leave()
    assert engine.memory_bytes == 0 <= empty
    assert engine.next_deadline() is None


@pytest.mark.parametrize("how", ["told", "cancelled", "lost"])
def test_a_prefix_is_recorded_for_two_minutes_after_it_was_watched_last(users: list[User], how: str) -> None:
    """Not after the watch was asked for: that may have been long ago."""
    a, b = users[:2]
    start, _ = a.ask(m.WATCH, b"k", None, None)
    assert a.reply(m.WATCH, b"k", start, None) is None
    pass_time(users, HISTORY_LINGER_S)
    pass_time(users, 0.9 * HISTORY_LINGER_S)
    if how == "told":
        b.ask(m.SET, b"k", b"1")
        ((_, _, (start, _)),) = a.take()
    elif how == "cancelled":
        a.ask(m.CANCEL, a.last_id)
    else:
        a.lose()
    pass_time(users, 0.9 * HISTORY_LINGER_S)
    b.ask(m.SET, b"k", b"2")
    b.ask(m.SET, b"other", b"")
    if how == "lost":
        a.connect()
    _, events = a.ask(m.WATCH, b"k", start, None)
    assert [event[3] for event in events] == [b"2"]
    pass_time(users, 1.1 * HISTORY_LINGER_S)
    assert b"k" not in a.client.namespace.histories
