"""A key that a great many wait for: what they are answered is decided at once, and said to a few at a time."""

from __future__ import annotations

import pytest
from engine_user import User

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.waiters import WOKEN_AT_ONCE
from asyncdist_server.wire import messages as m

PAST = 3


@pytest.fixture
def engine() -> StoreEngine:
    return StoreEngine(b"i" * 16)


@pytest.fixture
def setter(engine: StoreEngine) -> User:
    return User(engine, b"setter")


def waiting(engine: StoreEngine, count: int, *request: object) -> User:
    """One more client that asks so often for what is not there."""
    user = User(engine, b"waiter")
    for _ in range(count):
        assert user.reply(*(request or (m.GET, b"k", None))) is None  # type: ignore[arg-type]
    return user


@pytest.mark.parametrize("past", [0, 1])
def test_at_the_limit_all_are_answered_at_once_and_one_past_it_is_due_then(
    engine: StoreEngine, setter: User, past: int
) -> None:
    user = waiting(engine, WOKEN_AT_ONCE + past)
    setter.now = 5.0
    setter.ask(m.SET, b"k", b"v")
    assert user.late == [(number, m.OK, b"v") for number in range(1, WOKEN_AT_ONCE + 1)]
    assert engine.next_deadline() == (5.0 if past else None)
    engine.expire(5.0)
    assert len(user.late) == WOKEN_AT_ONCE + past
    assert engine.next_deadline() is None
    assert engine.waiter_count == 0


def test_all_get_what_the_key_was_in_their_order_whatever_becomes_of_it(engine: StoreEngine, setter: User) -> None:
    count = 5 * WOKEN_AT_ONCE
    user = waiting(engine, count)
    setter.ask(m.SET, b"k", b"first")
    setter.ask(m.SET, b"k", b"second")
    setter.ask(m.DELETE, b"k")
    again = User(engine, b"again")
    assert again.reply(m.GET, b"k", None) is None
    setter.ask(m.SET, b"k", b"third")
    assert again.late == [(1, m.OK, b"third")]
    for part in range(1, 6):
        assert len(user.late) == part * WOKEN_AT_ONCE
        engine.expire(0.0)
    assert user.late == [(number, m.OK, b"first") for number in range(1, count + 1)]


def test_one_that_is_withdrawn_or_over_meanwhile_has_been_answered(engine: StoreEngine, setter: User) -> None:
    user = waiting(engine, WOKEN_AT_ONCE + PAST, m.GET, b"k", 1000)
    setter.ask(m.SET, b"k", b"v")
    withdrawn = WOKEN_AT_ONCE + 2
    assert user.ask(m.CANCEL, withdrawn) is False
    assert user.late[-1] == (withdrawn, m.OK, b"v")
    engine.expire(2.0)
    assert sorted(user.late) == [(number, m.OK, b"v") for number in range(1, WOKEN_AT_ONCE + PAST + 1)]
    assert user.ask(m.CANCEL, withdrawn) is False


def test_one_that_is_gone_is_passed_over(engine: StoreEngine, setter: User) -> None:
    first, second = waiting(engine, WOKEN_AT_ONCE + PAST), User(engine, b"second")
    assert second.reply(m.WAIT, (b"k",), None) is None
    setter.ask(m.SET, b"k", b"v")
    first.lose()
    assert engine.waiter_count == 1
    engine.expire(0.0)
    assert len(first.late) == WOKEN_AT_ONCE
    assert second.late == [(1, m.OK, None)]
    assert engine.waiter_count == 0
    assert engine.next_deadline() is not None  # for the client that is away
    assert not engine.state.woken


def test_who_needs_other_keys_is_looked_at_at_once(engine: StoreEngine, setter: User) -> None:
    """Later they might not be there together any more."""
    user = waiting(engine, WOKEN_AT_ONCE)
    both = User(engine, b"both")
    setter.ask(m.SET, b"l", b"w")
    assert both.reply(m.WAIT, (b"k", b"l"), None) is None
    assert both.reply(m.MULTI_GET, (b"l", b"k"), None) is None
    assert both.reply(m.WAIT, (b"k", b"missing"), None) is None
    setter.ask(m.SET, b"k", b"v")
    setter.ask(m.DELETE, b"l")
    assert both.late == [(1, m.OK, None), (2, m.OK, [b"w", b"v"])]
    engine.expire(0.0)
    assert len(user.late) == WOKEN_AT_ONCE
    setter.ask(m.SET, b"missing", b"")
    assert both.late[-1] == (3, m.OK, None)


def test_an_item_of_a_queue_ends_waits_and_no_gets(engine: StoreEngine, setter: User) -> None:
    user = waiting(engine, WOKEN_AT_ONCE)
    for _ in range(WOKEN_AT_ONCE + PAST):
        assert user.reply(m.WAIT, (b"k",), None) is None
    setter.ask(m.QUEUE_PUSH, b"k", b"item")
    engine.expire(0.0)
    assert [reply[0] for reply in user.late] == list(range(WOKEN_AT_ONCE + 1, 2 * WOKEN_AT_ONCE + PAST + 1))
    setter.ask(m.SET, b"k", b"v")
    assert len(user.late) == 2 * WOKEN_AT_ONCE + PAST
