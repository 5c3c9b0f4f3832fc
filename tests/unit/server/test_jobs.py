"""Jobs and their members in the engine, with the time passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from engine_user import User, calls_during, pass_time
from journal_kit import JournaledEngine, MemoryJournal

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.history import HISTORY_LINGER_S
from asyncdist_server.engine.membership import (
    AWAY_S,
    JOB_LINGER_S,
    MAX_NAMES_BYTES,
    NAME_OVERHEAD_BYTES,
    name_order,
)
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.messages import Names


def join(user: User, name: bytes, least: int, most: int, settle_ms: int = 0) -> Any:
    if user.ask(m.KEEP_ALIVE, (user.client_id[0],)):
        user.ask(m.GRANT, user.client_id[0], 1000, True)
    return user.reply(m.JOIN, b"j", name, least, most, settle_ms, user.client_id[0], None)


def told(user: User) -> tuple[int, int, list[bytes]]:
    ((_, code, value),) = user.take()
    assert code == m.OK, value
    return value[:3]  # type: ignore[no-any-return]


def test_limits_of_members(users: list[User]) -> None:
    a = users[0]
    a.ask(m.GRANT, 7, 1000, True)
    assert a.code(m.JOIN, b"j", b"a", 1, m.MAX_MEMBERS + 1, 0, 7, None) == m.INVALID
    assert a.reply(m.JOIN, b"j", b"a", m.MAX_MEMBERS, m.MAX_MEMBERS, 0, 7, None) is None


@pytest.mark.parametrize("past", [0, 1])
def test_the_names_of_a_jobs_members_have_so_many_bytes(past: int) -> None:
    engine = StoreEngine(b"i" * 16, m.Limits(key_bytes=2**20))
    users = [User(engine, b"%d" % number) for number in range(9)]
    length = MAX_NAMES_BYTES // 8 - NAME_OVERHEAD_BYTES
    for number, user in enumerate(users[:7]):
        assert join(user, b"%d" % number + bytes(length - 1), 8, 9) is None
    last = join(users[7], b"7" + bytes(length - 1 + past), 8, 9)
    if past:
        assert last[1] == m.LIMIT
        assert last[2] == f"the names of its members have {MAX_NAMES_BYTES + 1} bytes, allowed are {MAX_NAMES_BYTES}"
        assert join(users[7], b"7" + bytes(length - 1), 8, 9) is None
    else:
        assert last is None
    assert told(users[0])[:2] == (1, 0)
    assert join(users[8], b"", 8, 9)[1] == m.LIMIT
    users[7].leave()
    assert join(users[8], b"", 8, 9) is None


def test_what_is_called_to_complete_a_round_grows_with_its_members_and_no_faster() -> None:
    def calls(count: int) -> int:
        store = JournaledEngine(MemoryJournal(), 0.0)
        encoder = m.Encoder()
        users = [User(store.engine, b"%d" % number, "job") for number in range(count)]
        for number, user in enumerate(users):
            user.ask(m.GRANT, number + 1, 1000, True)
            if number < count - 1:
                assert user.reply(m.JOIN, b"j", b"%d" % number, count, count, 0, number + 1, None) is None
        store.commit()

        def complete() -> None:
            users[-1].reply(m.JOIN, b"j", b"%d" % (count - 1), count, count, 0, count, None)
            for user in users:
                encoder.replies(user.late)
                store.engine.frames_sent(user.client, 1)
            store.maker.take()

        return calls_during(complete)

    assert calls(400) < 5 * calls(100)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 70_000])
def test_names_that_are_encoded_already_are_sent_as_all_lists_are(count: int) -> None:
    names = [b"node-%d" % number for number in range(count)]
    for number in (1, 200, 2**62):
        reply = number, m.OK, (number, 0, names, number)
        shared = number, m.OK, (number, 0, Names(names), number)
        assert m.Encoder().replies([shared]) == m.Encoder().replies([reply])
        assert m.Encoder().replies([shared, shared]) == m.Encoder().replies([reply, reply])


def test_a_round_fits_into_a_reply_of_a_daemon_with_small_ones() -> None:
    engine = StoreEngine(b"i" * 16, m.Limits(frame_bytes=m.FRAME_SLACK_BYTES))
    user, count = User(engine, b"one"), m.FRAME_SLACK_BYTES // m.MAX_KEY_BYTES
    joined = []
    for lease in range(1, 1 + count):
        user.ask(m.GRANT, lease, 1000, True)
        name = b"%d" % lease + bytes(m.MAX_KEY_BYTES - 100)
        joined.append(user.reply(m.JOIN, b"j", name, count, count, 0, lease, None))
    assert joined[-1][1] == m.LIMIT
    assert 0 < joined.count(None) * m.MAX_KEY_BYTES < m.FRAME_SLACK_BYTES


def test_names_that_are_found_among_the_keys_count() -> None:
    engine = StoreEngine(b"i" * 16, m.Limits(key_bytes=2 * MAX_NAMES_BYTES))
    a, b = User(engine, b"a"), User(engine, b"b")
    assert join(a, bytes(MAX_NAMES_BYTES - 2 * NAME_OVERHEAD_BYTES), 1, 2) is None
    del a.client.namespace.jobs[b"j"]  # as after a restart
    assert join(b, b"b", 1, 2)[1] == m.LIMIT
    assert join(b, b"", 1, 2) is None


def test_a_long_name_is_not_told_in_full(users: list[User]) -> None:
    a, b = users[:2]
    name = b"\x1b[2J" + bytes(8000)
    assert join(a, name, 2, 2) is None
    assert join(b, b"b", 3, 3)[1] == m.INVALID
    b.ask(m.GRANT, 99, 1000, True)
    _, code, why = b.reply(m.JOIN, b"j", name, 2, 2, 0, 99, 0)
    assert code == m.TIMEOUT
    assert why.isprintable()
    assert len(why) < 1000


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
    pass_time(users, AWAY_S - 0.01)
    assert a.take() == []  # it may come back yet
    pass_time(users, 0.02)  # it does not
    assert a.take() == []
    pass_time(users, 0.1)
    assert told(a) == (2, 0, [b"a"])


def two_at_work(a: User, b: User) -> None:
    join(a, b"a", 1, 2)
    join(b, b"b", 1, 2)
    told(a)
    join(a, b"a", 1, 2)
    assert (told(a)[:2], told(b)[:2]) == ((2, 0), (2, 1))


def test_a_round_that_waits_for_lost_connections_only_does_not_wait_for_their_leases(users: list[User]) -> None:
    a, b = users[:2]
    two_at_work(a, b)
    b.lose()
    pass_time(users, AWAY_S - 0.1)
    join(a, b"a", 1, 2)
    pass_time(users, 0.09)
    assert a.take() == []
    pass_time(users, 0.02)
    assert told(a) == (3, 0, [b"a"])


def test_a_member_that_is_back_within_that_time_is_waited_for(users: list[User]) -> None:
    a, b = users[:2]
    two_at_work(a, b)
    join(a, b"a", 1, 2)
    b.lose()
    pass_time(users, AWAY_S - 0.01)
    b.connect()
    pass_time(users, 5)
    assert a.take() == []
    b.lose()
    pass_time(users, AWAY_S - 0.01)
    assert a.take() == []
    pass_time(users, 0.02)
    assert told(a) == (3, 0, [b"a"])


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


def test_a_join_looks_at_no_other_member(users: list[User]) -> None:
    """Else ten thousand that begin anew would look fifty million times, and the daemon do nothing else for seconds."""

    class Unlisted(dict[bytes, int]):
        def __iter__(self) -> Iterator[bytes]:
            pytest.fail("it looks at every member of the last round")

    for number, user in enumerate(users):
        join(user, b"%d" % number, 1, 4, settle_ms=1000)
    assert [told(user)[1] for user in users] == [0, 1, 2, 3]
    job = users[0].client.namespace.jobs[b"j"]
    job.ranks = Unlisted(job.ranks)
    for number in (0, 1, 2):
        assert join(users[number], b"%d" % number, 1, 4, settle_ms=1000) is None
    pass_time(users, 2)
    assert not users[0].late, "the last one has not come"
    users[1].lose()
    users[3].leave()
    pass_time(users, 0.5)
    assert not users[0].late, "one may come back"
    pass_time(users, 0.5)
    assert not users[0].late, "others may come"
    pass_time(users, 1)
    assert [told(users[number])[:2] for number in (0, 2)] == [(2, 0), (2, 1)]


def test_contradictions_are_refused(users: list[User]) -> None:
    a, b = users[:2]
    join(a, b"a", 2, 2)
    assert join(b, b"b", 2, 3)[1] == m.INVALID
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
    assert b.ask(m.LIST_KEYS, b"", b"")[1] == []
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


def test_a_time_out_that_ends_another_wait_of_the_same_moment_leaves_the_rest_as_it_is(users: list[User]) -> None:
    """A join that timed out is a member that left, which is what a watch waits for, in time just so."""
    a, b = users[:2]
    a.ask(m.GRANT, 7, 60_000, True)
    a.ask(m.WATCH, b"job/j/members/", None, None)
    assert a.reply(m.JOIN, b"j", b"a", 2, 2, 0, 7, 1000) is None
    ((_, _, (revision, _)),) = [b.reply(m.WATCH, b"job/j/members/", None, None)]
    assert b.reply(m.WATCH, b"job/j/members/", revision, 1000) is None
    assert b.reply(m.GET, b"nothing", 1000) is None
    pass_time(users, 1)
    assert [reply[1] for reply in a.take()] == [m.TIMEOUT]
    watched, waited = b.take()
    assert (watched[1], [event[1:3] for event in watched[2][1]]) == (m.OK, [(m.EVENT_DELETE, b"job/j/members/a")])
    assert waited[1] == m.TIMEOUT
    assert a.engine.waiter_count == 0
    assert not a.engine.state.deadlines.heap
    assert a.engine.state.deadlines._dead == 0
