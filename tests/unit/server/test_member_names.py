"""Two processes of one name: the place of a dead member is taken at once, that of a living one is waited for."""

from __future__ import annotations

from typing import Any

import pytest
from engine_books import problems
from engine_user import User, pass_time
from journal_kit import JournaledEngine, MemoryJournal, contents

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.leases import RETURN_S
from asyncdist_server.wire import messages as m

GRACE_MS = 10_000


def join(
    user: User, name: bytes, least: int = 1, most: int = 2, timeout_ms: int | None = 30_000, bound: bool = True
) -> Any:
    if user.ask(m.KEEP_ALIVE, (user.client_id[0],)):
        user.ask(m.GRANT, user.client_id[0], GRACE_MS, bound)
    return user.reply(m.JOIN, b"j", name, least, most, 0, user.client_id[0], timeout_ms)


def told(user: User) -> Any:
    """Epoch, rank and names that a member was told."""
    ((_, code, value),) = user.take()
    assert code == m.OK, value
    return value[:3]


def watch(user: User) -> Any:
    return user.ask(m.WATCH, b"job/j/members/", None, None)[0]


def seen(user: User, since: int) -> list[tuple[int, bytes]]:
    _, events = user.ask(m.WATCH, b"job/j/members/", since, 0)
    return [(event[1], event[2].removeprefix(b"job/j/members/")) for event in events]


def test_the_place_of_a_dead_member_is_taken_at_once(users: list[User]) -> None:
    old, new, other = users[:3]
    assert join(old, b"trainer", 2, 2) is None
    assert join(other, b"server", 2, 2) is None
    assert told(old)[:2] == (1, 1)
    assert told(other)[:2] == (1, 0)
    old.ask(m.SET_LEASED, b"address", b"old", old.client_id[0])
    since = watch(other)
    assert join(other, b"server", 2, 2) is None  # waits for the trainer, who does not come
    old.lose()
    assert join(new, b"trainer", 2, 2) is None
    assert told(new) == (2, 1, [b"server", b"trainer"])
    assert told(other) == (2, 0, [b"server", b"trainer"])
    assert seen(other, since) == [(m.EVENT_EXPIRE, b"trainer"), (m.EVENT_SET, b"trainer")]
    assert other.ask(m.CHECK, (b"address",)) is False
    assert problems(new.engine) == []
    old.connect()
    assert old.ask(m.KEEP_ALIVE, (old.client_id[0],)) == [old.client_id[0]]
    assert old.code(m.JOIN, b"j", b"trainer", 2, 2, 0, old.client_id[0], None) == m.LEASE_LOST
    pass_time(users, 60)
    assert seen(other, since) == [(m.EVENT_EXPIRE, b"trainer"), (m.EVENT_SET, b"trainer")]


def test_a_round_is_not_completed_between_the_two(users: list[User]) -> None:
    """One of a single member would begin with the loss of the other, and another with the newcomer."""
    old, new, other = users[:3]
    assert join(old, b"a", 1, 2) is None
    assert join(other, b"b", 1, 2) is None
    told(old)
    assert join(old, b"a", 1, 2) is None
    assert (told(old)[0], told(other)[0]) == (2, 2)
    assert join(other, b"b", 1, 2) is None
    old.lose()
    assert join(new, b"a", 1, 2) is None
    assert told(other) == (3, 0, [b"b", b"a"])
    assert told(new) == (3, 1, [b"b", b"a"])


@pytest.mark.parametrize("how", ["leaves", "dies", "is expelled", "is silent"])
def test_the_place_of_a_living_member_is_waited_for(users: list[User], how: str) -> None:
    old, new, third = users[:3]
    join(old, b"a", bound=how != "is silent")
    told(old)
    assert join(new, b"a", timeout_ms=None) is None
    assert join(third, b"a", timeout_ms=None) is None
    assert not new.late
    assert problems(old.engine) == []
    if how == "leaves":
        old.leave()
    elif how == "dies":
        old.lose()
    elif how == "is expelled":
        new.ask(m.REVOKE, old.client_id[0])
    else:
        old.lose()
        assert not new.late, "its connection is no part of a membership by time"
        pass_time(users, GRACE_MS / 1000)
    assert told(new)[1:] == (0, [b"a"])
    assert not third.late, "first come, first served"
    new.lose()
    assert told(third)[1:] == (0, [b"a"])
    assert problems(old.engine) == []


def test_who_waits_in_vain_is_told_whose_the_name_is(users: list[User]) -> None:
    old, new = users[:2]
    old.client.name, old.client.address = "host pid 7", "10.0.0.1:4"
    join(old, b"a")
    told(old)
    pass_time(users, 100)
    whose = (
        "another process (host pid 7, 10.0.0.1:4) is the member a, for {} s by now; take another name, or take that "
        "member out with `expel`"
    )
    reply = join(new, b"a", timeout_ms=0)
    assert reply[1:] == (m.TIMEOUT, whose.format(100))
    assert join(new, b"a", timeout_ms=30_000) is None
    assert new.ask(m.WAITS, False)[1][:2] == ["join", [b"a"]]
    pass_time(users, 30)
    assert new.take() == [(new.last_id - 1, m.TIMEOUT, whose.format(130))]
    assert old.ask(m.NUM_KEYS) == 2
    assert problems(old.engine) == []


def test_who_waits_may_go(users: list[User]) -> None:
    old, new, third = users[:3]
    join(old, b"a")
    told(old)
    assert join(new, b"a") is None
    assert join(third, b"a") is None
    assert new.ask(m.CANCEL, new.last_id) is True
    assert [reply[1] for reply in new.take()] == [m.CANCELLED]
    third.lose()
    assert not old.engine.namespaces["job"].jobs[b"j"].namesakes
    old.lose()
    pass_time(users, GRACE_MS / 1000)
    assert problems(old.engine) == []
    assert not new.late


def test_who_waits_and_may_not_come_in_any_more(users: list[User]) -> None:
    old, new, third = users[:3]
    join(old, b"a")
    told(old)
    assert join(new, b"a") is None
    assert join(third, b"a") is None
    new.ask(m.REVOKE, new.client_id[0])
    old.leave()
    assert [reply[1] for reply in new.take()] == [m.LEASE_LOST]
    assert told(third)[1:] == (0, [b"a"])


def test_what_is_wrong_with_a_request_is_said_before_anybody_is_taken_out(users: list[User]) -> None:
    old, new, other = users[:3]
    join(old, b"a")
    join(other, b"b")
    old.lose()
    assert join(new, b"a", 3, 3)[1] == m.INVALID
    assert join(other, b"a")[1] == m.INVALID  # with the lease of the member b
    assert b"a" in old.engine.namespaces["job"].jobs[b"j"].leases
    other.leave()
    assert join(new, b"a", 1, 1) is None, "the last of a job leaves its bounds to the newcomer"
    assert told(new)[1:] == (0, [b"a"])


def test_after_a_restart_all_members_have_time_to_come_back() -> None:
    store = JournaledEngine(MemoryJournal(), 0.0)
    old, new = User(store.engine, b"old"), User(store.engine, b"new")
    join(old, b"a")
    told(old)
    store.commit()
    store = store.crash(1.0)
    new = User(store.engine, b"new")
    new.now = 1.0
    assert join(new, b"a") is None
    assert not new.late, "the daemon was away, not the member"
    returned = User(store.engine, b"old")
    returned.now = 1.0
    assert not new.late
    returned.lose()
    assert told(new)[1:] == (0, [b"a"])
    store.commit()
    again = store.crash(2.0)
    assert contents(again.engine)["job"]["values"] == contents(store.engine)["job"]["values"]


def test_after_a_restart_the_place_of_one_that_does_not_come_back_is_free_in_time() -> None:
    store = JournaledEngine(MemoryJournal(), 0.0)
    old = User(store.engine, b"old")
    join(old, b"a")
    store.commit()
    store = store.crash(1.0)
    new = User(store.engine, b"new")
    new.now = 1.0
    assert join(new, b"a", timeout_ms=None) is None
    pass_time([new], max(RETURN_S, GRACE_MS / 1000))
    assert told(new)[1:] == (0, [b"a"])


def test_a_join_that_is_asked_again_is_done_once(users: list[User]) -> None:
    """Its answer was lost with the connection: the name is the client's own."""
    old, new = users[:2]
    join(old, b"a")
    told(old)
    old.lose()
    assert join(new, b"a") is None
    request_id, answer = new.last_id, new.late[0]
    new.lose()
    new.late = []
    new.client = new.engine.open("job", new.late.append, client_id=new.client_id, pending=(request_id,), now=new.now)
    lease = new.client_id[0]
    again = new.engine.request(new.client, (request_id, m.JOIN, b"j", b"a", 1, 2, 0, lease, 30_000), new.now)
    assert again == answer
    assert new.ask(m.KEEP_ALIVE, (lease,)) == []


def test_a_full_store_lets_in_whom_it_let_wait() -> None:
    """Replies that are remembered take room that no request is refused for."""
    engine = StoreEngine(b"i" * 16, m.Limits(memory_bytes=100_000))
    old, new = User(engine, b"old"), User(engine, b"new")
    join(old, b"a")
    told(old)
    assert join(new, b"a") is None
    engine.state.remember(100_000)
    assert old.ask(m.LEAVE, b"j", old.client_id[0]) is True
    assert told(new)[1:] == (0, [b"a"])
    engine.state.remember(-100_000)
    assert problems(engine) == []
