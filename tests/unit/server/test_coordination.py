"""Leases, holds, watches, locks and jobs in the engine, with the time passed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from asyncdist_server import messages as m
from asyncdist_server.engine import StoreEngine
from asyncdist_server.history import HISTORY_BYTES, HISTORY_EVENTS, HISTORY_LINGER_S
from asyncdist_server.membership import JOB_LINGER_S, name_order


class User:
    """A client of the engine; `late` are the replies that did not come at once."""

    def __init__(self, engine: StoreEngine, name: bytes, namespace: str = "job") -> None:
        self.engine = engine
        self.client_id = name.ljust(16, b"-")
        self.namespace = namespace
        self.last_id = 0
        self.now = 0.0
        self.connect()

    def connect(self) -> None:
        self.late: list[Any] = []
        self.client = self.engine.open(self.namespace, self.late.append, client_id=self.client_id, now=self.now)

    def reply(self, operation: int, *arguments: Any) -> Any:
        self.last_id += 1
        return self.engine.request(self.client, (self.last_id, operation, *arguments), self.now)

    def ask(self, operation: int, *arguments: Any) -> Any:
        reply = self.reply(operation, *arguments)
        assert reply[:2] == (self.last_id, m.OK), reply
        return reply[2]

    def code(self, operation: int, *arguments: Any) -> int:
        reply = self.reply(operation, *arguments)
        assert reply is not None
        code: int = reply[1]
        return code

    def take(self) -> list[Any]:
        taken, self.late[:] = list(self.late), []
        return taken

    def lose(self) -> None:
        self.engine.close(self.client, self.now)

    def leave(self) -> None:
        self.ask(m.GOODBYE)
        self.lose()


@pytest.fixture
def engine() -> StoreEngine:
    return StoreEngine(b"i" * 16)


@pytest.fixture
def users(engine: StoreEngine) -> list[User]:
    return [User(engine, b"%d" % number) for number in range(4)]


def pass_time(users: list[User], seconds: float) -> None:
    for user in users:
        user.now += seconds
    users[0].engine.expire(users[0].now)


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


def test_limits_of_members(users: list[User]) -> None:
    a = users[0]
    a.ask(m.GRANT, 7, 1000, True)
    assert a.code(m.JOIN, b"j", b"a", 1, m.MAX_MEMBERS + 1, 0, 7, None) == m.INVALID
    assert a.reply(m.JOIN, b"j", b"a", m.MAX_MEMBERS, m.MAX_MEMBERS, 0, 7, None) is None


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
    assert b.ask(m.LIST_KEYS, b"") == [b"q"]
    assert b.ask(m.QUEUE_LEN, b"p/q") == 0


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


def join(user: User, name: bytes, least: int, most: int, settle_ms: int = 0) -> Any:
    if user.ask(m.KEEP_ALIVE, (user.client_id[0],)):
        user.ask(m.GRANT, user.client_id[0], 1000, True)
    return user.reply(m.JOIN, b"j", name, least, most, settle_ms, user.client_id[0], None)


def told(user: User) -> tuple[int, int, list[bytes]]:
    ((_, code, value),) = user.take()
    assert code == m.OK, value
    return value[:3]  # type: ignore[no-any-return]


def test_ranks_are_kept_and_new_members_follow_by_name(users: list[User]) -> None:
    a, b, c, d = users
    for user, name in ((a, b"n10"), (b, b"n9"), (c, b"n2")):
        assert join(user, name, 2, 4, 100) is None
    pass_time(users, 0.1)
    assert told(a) == (1, 2, [b"n2", b"n9", b"n10"])
    assert (told(b)[1], told(c)[1]) == (1, 0)
    assert join(d, b"n1", 2, 4, 100) is None
    pass_time(users, 10)
    assert d.take() == []  # the others are at work
    c.leave()
    join(a, b"n10", 2, 4, 100)
    pass_time(users, 10)
    assert a.take() == []  # n9 lives and has not come
    join(b, b"n9", 2, 4, 100)
    pass_time(users, 0.1)
    assert told(d) == (2, 2, [b"n9", b"n10", b"n1"])


def test_a_member_whose_connection_broke_is_not_counted_as_waiting(users: list[User]) -> None:
    a, b = users[:2]
    join(a, b"a", 2, 2)
    a.lose()
    join(b, b"b", 2, 2)
    assert b.take() == []
    a.connect()
    join(a, b"a", 2, 2)  # retried
    assert told(a) == (1, 0, [b"a", b"b"])
    assert told(b)[1] == 1


def test_a_round_does_not_settle_without_a_member_that_is_away(users: list[User]) -> None:
    a, b = users[:2]
    for _ in range(2):
        for user, name in ((a, b"a"), (b, b"b")):
            join(user, name, 1, 3, 100)
        if b.client.namespace.jobs[b"j"].epoch == 0:
            pass_time(users, 0.1)
            assert (told(a)[:2], told(b)[:2]) == ((1, 0), (1, 1))
    b.lose()
    pass_time(users, 0.9)
    assert a.take() == []  # it may come back yet
    pass_time(users, 0.1)  # it does not
    pass_time(users, 0.1)
    assert told(a) == (2, 0, [b"a"])


def test_more_members_than_there_is_room_for_wait(users: list[User]) -> None:
    a, b, c = users[:3]
    for user, name in ((a, b"z"), (b, b"y"), (c, b"x")):
        join(user, name, 1, 2, 1000)
    assert told(a) == (1, 1, [b"y", b"z"])
    told(b)
    assert c.take() == []
    a.leave()
    join(b, b"y", 1, 2, 1000)
    assert told(c) == (2, 1, [b"y", b"x"])


def test_contradictions_are_refused(users: list[User]) -> None:
    a, b = users[:2]
    join(a, b"a", 2, 2)
    assert join(b, b"b", 2, 3)[1] == m.INVALID
    assert join(b, b"a", 2, 2)[1] == m.INVALID
    assert join(a, b"a", 2, 2)[1] == m.INVALID
    assert join(a, b"other", 2, 2)[1] == m.INVALID
    assert b.code(m.JOIN, b"j", b"b", 2, 2, 0, 99, None) == m.LEASE_LOST


def test_a_job_ends_with_its_last_member(users: list[User], engine: StoreEngine) -> None:
    a, b = users[:2]
    join(a, b"a", 1, 1)
    told(a)
    a.ask(m.SET, b"job/j/k", b"")
    a.lose()
    pass_time(users, 1 + JOB_LINGER_S - 0.1)
    assert b.ask(m.CHECK, (b"job/j/k",)) is True
    join(b, b"b", 1, 1)
    assert told(b)[:2] == (2, 0)
    assert b.ask(m.LEAVE, b"j", b.client_id[0]) is True
    assert b.ask(m.LEAVE, b"j", b.client_id[0]) is False
    pass_time(users, JOB_LINGER_S)
    assert b.ask(m.LIST_KEYS, b"") == []
    join(b, b"b", 1, 1)
    assert told(b)[:2] == (1, 0)


def test_a_refused_join_leaves_no_job_behind(users: list[User], engine: StoreEngine) -> None:
    a = users[0]
    a.ask(m.GRANT, 7, 1000, True)
    before = engine.memory_bytes
    assert a.code(m.JOIN, b"j", bytes(m.MAX_KEY_BYTES), 1, 1, 0, 7, None) == m.LIMIT
    pass_time(users, HISTORY_LINGER_S + 1)
    assert engine.memory_bytes == before
    assert a.client.namespace.jobs == {}


def test_a_store_that_kept_its_keys_knows_its_jobs(users: list[User]) -> None:
    a, b = users[:2]
    join(a, b"a", 2, 2)
    join(b, b"b", 2, 2)
    a.take()
    b.take()
    a.client.namespace.jobs.clear()  # as after a restart with keys and leases
    for lease in a.client.namespace.leases.values():
        lease.jobs.clear()
    join(b, b"b", 2, 2)
    assert b.take() == []
    join(a, b"a", 2, 2)
    assert told(a)[:2] == (2, 0)


@pytest.mark.parametrize("end", [User.leave, User.lose], ids=["goodbye", "lost"])
def test_nothing_is_left_of_those_who_are_gone(
    users: list[User], engine: StoreEngine, end: Callable[[User], None]
) -> None:
    for number, user in enumerate(users):
        join(user, b"m%d" % number, 4, 4)
        user.ask(m.SET_LEASED, b"k%d" % number, b"v", user.client_id[0])
        user.ask(m.HOLD, b"p", user.client_id[0], 10)
        user.reply(m.LOCK, b"l", user.client_id[0], None)
        user.reply(m.WATCH, b"", user.ask(m.WATCH, b"", None, None)[0], None)
    for user in users:
        end(user)
    for _ in range(100):  # one thing after the other becomes due
        if (deadline := engine.next_deadline()) is not None:
            pass_time(users, max(0.0, deadline - users[0].now))
    assert engine.memory_bytes == 0
    assert engine.statistics()["leases"] == engine.waiter_count == engine.statistics()["namespaces"] == 0
    assert engine.next_deadline() is None


def test_numbers_in_names_count_as_numbers() -> None:
    names = [b"b", b"a10", b"a9", b"a", b"10", b"9", b"a9b", b"a%d" % 10**30, b""]
    assert sorted(names, key=name_order) == [b"", b"9", b"10", b"a", b"a9", b"a9b", b"a10", b"a%d" % 10**30, b"b"]


def test_waits_are_those_of_the_namespace_longest_first(users: list[User], engine: StoreEngine) -> None:
    a, b = users[:2]
    elsewhere = User(engine, b"x", "other")
    a.reply(m.GET, b"later", None)
    pass_time(users, 2)
    b.reply(m.WAIT, (b"x", b"y"), None)
    elsewhere.reply(m.QUEUE_POP, b"q", None)
    count, first, second = a.ask(m.WAITS, False)
    assert (count, first[:4], second[:4]) == (
        2,
        ["get", [b"later"], 2000, "job"],
        ["wait", [b"x", b"y"], 0, "job"],
    )
    assert a.ask(m.WAITS, True)[0] == 3


def test_a_refused_join_leaves_no_job_behind_where_somebody_holds_its_prefix(
    users: list[User], engine: StoreEngine
) -> None:
    a = users[0]
    a.ask(m.GRANT, 7, 1000, True)
    a.ask(m.HOLD, b"job/j/", 7, 0)
    assert a.code(m.JOIN, b"j", bytes(m.MAX_KEY_BYTES), 1, 1, 0, 7, None) == m.LIMIT
    assert a.client.namespace.jobs == {}
    a.leave()
    pass_time(users, HISTORY_LINGER_S + 1)
    for user in users[1:]:
        user.leave()
    assert engine.memory_bytes == 0


def test_a_job_that_is_known_again_by_its_keys_ends_with_its_hold(users: list[User], engine: StoreEngine) -> None:
    """As after a restart for which the store had no room to make it at once."""
    a, b = users[:2]
    join(a, b"a", 1, 1)
    told(a)
    namespace = a.client.namespace
    namespace.jobs[b"j"].end()
    namespace.holds[b"job/j/"].job = None
    for lease in namespace.leases.values():
        lease.jobs.clear()
    a.take()
    a.reply(m.JOIN, b"j", b"a", 1, 1, 0, a.client_id[0], None)
    assert told(a)[:2] == (2, 0)
    a.leave()
    pass_time(users, JOB_LINGER_S)
    assert namespace.jobs == {}
    join(b, b"b", 1, 1)
    assert told(b)[:2] == (1, 0)


@pytest.mark.parametrize(
    "epoch",
    [
        msgpack.packb([1, [b"a", b"x"]]),
        msgpack.packb([2**64 - 1, [b"a"]]),
        msgpack.packb([2**63 - 1, [b"a"]]),
        msgpack.packb([-5, [[], {}, None]]),
        msgpack.packb([1, 2, 3]),
        msgpack.packb({b"epoch": 1}),
        b"\xc1",
        b"",
    ],
)
@pytest.mark.parametrize("name", [b"a", b"b"])
@pytest.mark.parametrize("ending", ["leave", "revoke", "expire", "hold"])
def test_keys_that_look_like_a_job_break_nothing(
    users: list[User], engine: StoreEngine, epoch: bytes, name: bytes, ending: str
) -> None:
    """Anybody may write there: whoever does may confuse the job, and nobody else."""
    a = users[0]
    for lease_id in (7, 8):
        a.ask(m.GRANT, lease_id, 1000, False)
    a.ask(m.SET, b"job/j/epoch", epoch)
    a.ask(m.SET_LEASED, b"job/j/members/a", b"", 7)
    a.ask(m.SET_LEASED, b"job/j/members/x", b"", 8)
    a.reply(m.JOIN, b"j", name, 1, 1, 0, 7, 0)
    a.reply(m.JOIN, b"j", name, 1, 1, 0, 7, 100)
    a.reply(m.JOIN, b"j", b"x", 2, 1, 0, 8, None)
    if ending == "leave":
        a.reply(m.LEAVE, b"j", 7)
        a.reply(m.LEAVE, b"j", 8)
    elif ending == "hold":
        a.reply(m.HOLD, b"job/j/", 7, 0)
    elif ending == "revoke":
        a.ask(m.REVOKE, 7)
        a.ask(m.REVOKE, 8)
    pass_time(users, 1.5)
    pass_time(users, JOB_LINGER_S)
    pass_time(users, HISTORY_LINGER_S)
    a.ask(m.DELETE_NAMESPACE)
    for user in users:
        user.leave()
    assert engine.memory_bytes == 0
    assert engine.next_deadline() is None
