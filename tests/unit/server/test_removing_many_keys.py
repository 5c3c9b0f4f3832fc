"""Many keys that go at once, with a namespace, a prefix or a lease: what is done for each, and how much that takes."""

from __future__ import annotations

import pytest
from engine_user import User, calls_during, pass_time
from journal_kit import JournaledEngine, MemoryJournal, charged, contents

from asyncdist_server.engine.history import HISTORY_EVENTS
from asyncdist_server.wire import messages as m

KEYS = 2 * HISTORY_EVENTS
LEASE = 7


def fill(user: User, leased: bool) -> None:
    user.ask(m.GRANT, LEASE, 1000, False)
    for number in range(KEYS):
        key = b"job/%d" % number
        if leased:
            user.ask(m.SET_LEASED, key, b"value", LEASE)
        else:
            user.ask(m.SET, key, b"value")


@pytest.mark.parametrize("leased", [False, True])
def test_no_function_is_called_for_each(leased: bool) -> None:
    engine = JournaledEngine(MemoryJournal(), 0.0).engine
    user = User(engine, b"user")
    fill(user, leased)
    assert calls_during(lambda: user.ask(m.DELETE_NAMESPACE)) < 100
    fill(User(engine, b"other", "other"), leased=True)
    assert calls_during(lambda: pass_time([user], 1)) < 100
    assert not any(namespace.values for namespace in engine.namespaces.values())


def test_a_history_takes_no_more_events_than_it_keeps() -> None:
    engine = JournaledEngine(MemoryJournal(), 0.0).engine
    user = User(engine, b"user")
    fill(user, leased=False)
    start, _ = user.ask(m.WATCH, b"", None, None)
    assert calls_during(lambda: user.ask(m.DELETE_NAMESPACE)) < 4 * HISTORY_EVENTS
    assert user.code(m.WATCH, b"", start, 0) == m.COMPACTED
    oldest = start + KEYS - HISTORY_EVENTS
    assert user.code(m.WATCH, b"", oldest - 1, 0) == m.COMPACTED
    _, events = user.ask(m.WATCH, b"", oldest, 0)
    assert events[0] == (oldest, m.EVENT_DELETE, b"job/%d" % (KEYS - HISTORY_EVENTS), b"")
    assert user.ask(m.WATCH, b"", start + KEYS - 1, 0)[0] == start + KEYS


def test_watchers_of_every_prefix_are_told_and_locks_passed_on() -> None:
    engine = JournaledEngine(MemoryJournal(), 0.0).engine
    owner, other = User(engine, b"owner"), User(engine, b"other")
    other.ask(m.GRANT, 8, 60_000, False)
    owner.ask(m.GRANT, LEASE, 1000, False)
    for key in (b"a/1", b"a/2", b"b/1"):
        owner.ask(m.SET_LEASED, key, b"x", LEASE)
    owner.ask(m.LOCK, b"a/lock", LEASE, 0)
    assert other.reply(m.LOCK, b"a/lock", 8, None) is None
    watches = {prefix: other.ask(m.WATCH, prefix, None, None)[0] for prefix in (b"", b"a/", b"b/", b"a/1", b"a/12345")}
    for prefix, start in watches.items():
        assert other.reply(m.WATCH, prefix, start, None) is None
    pass_time([owner, other], 1)
    told = {reply[2][1][0][2]: reply[2][1][0][1] for reply in other.take() if isinstance(reply[2], tuple)}
    assert told == {b"a/1": m.EVENT_EXPIRE, b"b/1": m.EVENT_EXPIRE}
    _, events = other.ask(m.WATCH, b"", watches[b""], 0)
    assert [event[1:3] for event in events] == [
        (m.EVENT_EXPIRE, b"a/1"),
        (m.EVENT_EXPIRE, b"a/2"),
        (m.EVENT_EXPIRE, b"b/1"),
        (m.EVENT_EXPIRE, b"a/lock"),
        (m.EVENT_SET, b"a/lock"),
    ]
    assert len(other.client.blocked) == 1  # the watch of a prefix that no key had
    namespace = engine.namespaces["job"]
    assert list(namespace.values) == list(namespace.leased) == [b"a/lock"]


@pytest.mark.parametrize("watched", [False, True])
def test_the_journal_and_the_books_agree(watched: bool) -> None:
    store = JournaledEngine(MemoryJournal(), 0.0)
    user = User(store.engine, b"user")
    fill(user, leased=True)
    if watched:
        user.ask(m.WATCH, b"job/", None, None)
    user.ask(m.SET, b"stays", b"")
    store.commit()
    user.ask(m.REVOKE, LEASE)
    store.commit()
    user.lose()
    assert charged(store.engine) == store.engine.memory_bytes
    assert list(store.engine.namespaces["job"].values) == [b"stays"]
    again = store.crash(0.0)
    assert contents(again.engine) == contents(store.engine)
    assert charged(again.engine) == again.engine.memory_bytes
