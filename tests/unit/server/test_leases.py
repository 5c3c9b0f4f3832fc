"""Leases, what is held by them, and locks in the engine, with the time passed in."""

from __future__ import annotations

from typing import Any

import pytest
from engine_user import User, pass_time

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.leases import RETURN_S
from asyncdist_server.wire import messages as m


def test_a_lease_by_time_ends_unless_kept_alive(users: list[User]) -> None:
    a, b = users[:2]
    a.ask(m.GRANT, 7, 1000, False)
    a.ask(m.SET_LEASED, b"k", b"v", 7)
    a.lose()  # it does not need its connection
    for _ in range(3):
        pass_time(users, 0.9)
        assert b.ask(m.KEEP_ALIVE, (7, 8)) == [8]
    pass_time(users, 0.99)
    assert b.ask(m.CHECK, (b"k",)) is True
    pass_time(users, 0.01)
    assert b.ask(m.CHECK, (b"k",)) is False
    assert b.ask(m.KEEP_ALIVE, (7,)) == [7]
    assert b.code(m.SET_LEASED, b"k", b"v", 7) == m.LEASE_LOST
    assert b.ask(m.REVOKE, 7) is False


def test_a_bound_lease_survives_a_reconnect_within_its_grace(users: list[User]) -> None:
    a, b = users[:2]
    a.ask(m.GRANT, 7, 1000, True)
    a.ask(m.SET_LEASED, b"k", b"v", 7)
    pass_time(users, 100)
    for _ in range(3):
        a.lose()
        pass_time(users, 0.9)
        a.connect()
        pass_time(users, 5)
        assert b.ask(m.CHECK, (b"k",)) is True
    a.lose()
    pass_time(users, 1)
    assert b.ask(m.CHECK, (b"k",)) is False
    a.connect()
    assert a.ask(m.KEEP_ALIVE, (7,)) == [7]


def test_a_goodbye_ends_a_bound_lease_at_once(users: list[User]) -> None:
    a, b = users[:2]
    a.ask(m.GRANT, 7, 100_000, True)
    a.ask(m.SET_LEASED, b"k", b"v", 7)
    a.leave()
    assert b.ask(m.CHECK, (b"k",)) is False


@pytest.mark.parametrize(("after_s", "there"), [(RETURN_S - 0.1, True), (RETURN_S, False)])
def test_short_bound_leases_wait_for_their_clients_when_the_store_was_away(
    users: list[User], engine: StoreEngine, after_s: float, there: bool
) -> None:
    a = users[0]
    a.ask(m.GRANT, 7, 1000, True)
    a.lose()
    engine.renew_leases(a.now)
    pass_time(users, after_s)
    a.connect()
    assert a.ask(m.KEEP_ALIVE, (7,)) == ([] if there else [7])
    a.lose()
    pass_time(users, 1)  # its own time counts again
    a.connect()
    assert a.ask(m.KEEP_ALIVE, (7,)) == [7]


def test_a_store_that_was_away_renews_leases_in_full(users: list[User], engine: StoreEngine) -> None:
    a = users[0]
    a.ask(m.GRANT, 7, 1000, False)
    pass_time(users, 0.9)
    engine.renew_leases(a.now)
    pass_time(users, 0.9)
    assert a.ask(m.KEEP_ALIVE, (7,)) == []


@pytest.mark.parametrize(
    ("write", "stays"),
    [
        ((m.SET, b"k", b"1"), True),
        ((m.MULTI_SET, (b"k",), (b"1",)), True),
        ((m.COMPARE_SET, b"k", b"5", b"6"), True),
        ((m.COMPARE_SET, b"k", b"no", b"6"), False),
        ((m.ADD, b"k", 1), False),
        ((m.APPEND, b"k", b"1"), False),
        ((m.SET_LEASED, b"k", b"1", 8), True),
    ],
)
def test_which_writes_free_a_key_of_its_lease(users: list[User], write: tuple[Any, ...], stays: bool) -> None:
    a = users[0]
    for lease_id in (7, 8):
        a.ask(m.GRANT, lease_id, 1000, True)
    a.ask(m.SET_LEASED, b"k", b"5", 7)
    a.ask(*write)
    a.ask(m.REVOKE, 7)
    assert a.ask(m.CHECK, (b"k",)) is stays
    a.ask(m.DELETE, b"k")
    a.ask(m.REVOKE, 8)


def test_limits_of_leases(users: list[User], engine: StoreEngine) -> None:
    a = users[0]
    engine._state.leases.count = m.MAX_LEASES - 1
    assert a.code(m.GRANT, 7, 1000, True) == m.OK
    assert a.code(m.GRANT, 8, 1000, True) == m.LIMIT
    assert a.code(m.GRANT, 7, 1000, True) == m.INVALID  # there already


@pytest.mark.parametrize(
    "request_",
    [
        (m.GRANT, 0, 1000, True),
        (m.GRANT, m.MAX_LEASE_ID + 1, 1000, True),
        (m.GRANT, 1, 0, True),
        (m.GRANT, 1, m.MAX_TIMEOUT_MS + 1, True),
        (m.GRANT, 1, 1000, 1),
        (m.GRANT, b"1", 1000, True),
        (m.KEEP_ALIVE, 1),
        (m.KEEP_ALIVE, (b"1",)),
        (m.REVOKE, b"1"),
        (m.SET_LEASED, b"k", b"v", b"1"),
        (m.SET_LEASED, 1, b"v", 1),
        (m.HOLD, 1, 1, 1),
        (m.HOLD, b"p", 1, -1),
        (m.WATCH, 1, None, None),
        (m.WATCH, b"p", b"1", None),
        (m.WATCH, b"p", 1, -1),
        (m.LOCK, 1, 1, None),
        (m.LOCK, b"k", b"1", None),
        (m.LOCK, b"k", 1, 1.5),
        (m.UNLOCK, b"k", b"1"),
        (m.JOIN, b"j", b"a", 1, 1, -1, 1, None),
        (m.JOIN, b"j", 1, 1, 1, 0, 1, None),
        (m.JOIN, b"j", b"a", b"1", 1, 0, 1, None),
        (m.LEAVE, 1, 1),
        (m.WAITS, 1),
        (m.CLIENTS, 1),
        (m.STATUS, 1),
    ],
)
def test_malformed_requests_change_nothing(users: list[User], engine: StoreEngine, request_: tuple[Any, ...]) -> None:
    before = engine.memory_bytes
    with pytest.raises(m.ProtocolError):
        users[0].reply(*request_)
    assert engine.memory_bytes == before


def test_held_prefixes_go_after_their_linger(users: list[User]) -> None:
    a, b, c = users[:3]
    for user, lease_id in ((a, 7), (b, 8)):
        user.ask(m.GRANT, lease_id, 1000, True)
        user.ask(m.HOLD, b"p/", lease_id, 5000)
    a.ask(m.MULTI_SET, (b"p/k", b"q"), (b"", b""))
    a.ask(m.QUEUE_PUSH, b"p/q", b"")
    a.leave()
    b.lose()
    pass_time(users, 1 + 4.9)
    b.connect()
    c.ask(m.GRANT, 9, 1000, True)
    c.ask(m.HOLD, b"p/", 9, 0)  # in time; the longest linger counts
    pass_time(users, 60)
    assert c.ask(m.CHECK, (b"p/k", b"p/q")) is True
    c.leave()
    pass_time(users, 4.9)
    assert b.ask(m.CHECK, (b"p/k", b"p/q")) is True
    pass_time(users, 0.1)
    assert b.ask(m.LIST_KEYS, b"", b"")[1] == [b"q"]
    assert b.ask(m.QUEUE_LEN, b"p/q") == 0


def test_locks_go_to_who_waited_longest(users: list[User]) -> None:
    a, b, c, d = users
    for lease_id, user in enumerate(users, 1):
        user.ask(m.GRANT, lease_id, 1000, True)
    first = a.ask(m.LOCK, b"l", 1, None)
    assert b.reply(m.LOCK, b"l", 2, 500) is None
    assert c.reply(m.LOCK, b"l", 3, None) is None
    assert d.reply(m.LOCK, b"l", 4, None) is None
    pass_time(users, 0.5)
    assert b.take() == [(b.last_id, m.TIMEOUT, [b"l"])]
    assert b.ask(m.UNLOCK, b"l", first + 1) is False
    c.ask(m.REVOKE, 3)  # who waits with a lease that has ended gets nothing
    assert a.ask(m.UNLOCK, b"l", first) is True
    assert c.take() == [(c.last_id - 1, m.LEASE_LOST, "there is no such lease (any more)")]
    ((_, code, second),) = d.take()
    assert (code, second > first) == (m.OK, True)
    assert a.ask(m.GET, b"l", 0) == b"%d" % second
    d.lose()
    assert b.reply(m.LOCK, b"l", 2, None) is None
    pass_time(users, 1)
    assert b.take()[0][1] == m.OK
