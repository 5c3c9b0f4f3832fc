"""Listings of keys: what is found, in which order, and in which parts."""

from __future__ import annotations

import random

import pytest
from engine_books import problems
from engine_user import User, pass_time
from hypothesis import given
from hypothesis import strategies as st
from journal_kit import JournaledEngine, MemoryJournal

from asyncdist_server.engine.coordination import MAX_CLIENTS, MAX_NAMESPACES
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.namespace import INDEXED_KEYS, SortedKeys
from asyncdist_server.engine.operations import LISTED_BYTES, LISTED_KEYS
from asyncdist_server.wire import messages as m

KEYS = st.binary(max_size=3) | st.sampled_from([b"a" * 5, b"ab\xff", b"ab\xff\xff"])


@given(st.sets(KEYS), st.lists(st.tuples(st.booleans(), KEYS)), st.sets(KEYS), KEYS, KEYS, st.integers(0, 4))
def test_sorted_keys_are_a_set(
    begun: set[bytes], changes: list[tuple[bool, bytes]], gone: set[bytes], prefix: bytes, start: bytes, most: int
) -> None:
    keys, model = SortedKeys(begun, block_keys=2), set(begun)
    for add, key in changes:
        if add and key not in model:
            keys.add(key)
            model.add(key)
        elif not add and key in model:
            keys.discard(key)
            model.remove(key)
    keys.discard_all(list(gone & model))
    model -= gone
    assert keys.under(b"") == sorted(model)
    found = [key for key in sorted(model) if key.startswith(prefix) and key >= start]
    assert keys.under(prefix, start) == found
    assert keys.under(prefix, start, most) == found[:most]


def listed(user: User, prefix: bytes) -> list[list[bytes]]:
    """All parts of a listing."""
    parts, start = [], b""
    while start is not None:
        start, keys = user.ask(m.LIST_KEYS, prefix, start)
        parts.append(list(keys))
    return parts


def numbered(count: int) -> list[bytes]:
    keys = [b"job/%05d" % number for number in range(count)]
    random.Random(0).shuffle(keys)
    return keys


@pytest.mark.parametrize("count", [INDEXED_KEYS, INDEXED_KEYS + 1, 3 * INDEXED_KEYS])
def test_many_keys_that_come_and_go(count: int) -> None:
    store = JournaledEngine(MemoryJournal(), 0.0)
    user = User(store.engine, b"user")
    user.ask(m.GRANT, 7, 1000, False)
    keys = numbered(count)
    user.ask(m.SET, b"other", b"")
    user.ask(m.MULTI_SET, tuple(keys[: count // 3]), (b"",) * (count // 3))
    for key in keys[count // 3 : -9]:
        user.ask(m.SET, key, b"")
    for key in keys[-9:]:
        user.ask(m.SET_LEASED, key, b"", 7)
    assert problems(store.engine) == []
    assert listed(user, b"job/") == [sorted(keys)]
    for key in keys[:9]:
        user.ask(m.DELETE, key)
    pass_time([user], 1)  # the leased ones go together
    assert listed(user, b"job/") == [sorted(keys[9:-9])]
    assert listed(user, b"o") == [[b"other"]]
    user.ask(m.ADD, keys[0], 1)
    user.ask(m.APPEND, keys[1], b"")
    assert problems(store.engine) == []
    store.commit()
    user.lose()
    again = User(store.crash(0.0).engine, b"again")
    assert problems(again.engine) == []
    assert listed(again, b"job/") == [sorted([*keys[:2], *keys[9:-9]])]
    again.ask(m.DELETE_NAMESPACE)
    assert listed(again, b"") == [[]]
    again.ask(m.SET, b"k", b"")
    assert listed(again, b"") == [[b"k"]]


@pytest.mark.parametrize("others", [0, 2 * INDEXED_KEYS])
def test_a_prefix_that_ends_takes_its_keys_only(others: int) -> None:
    user = User(StoreEngine(b"i" * 16), b"user")
    for key in (b"a/1", b"a/2", b"a/b/1", b"ab", *numbered(others)):
        user.ask(m.SET, key, b"")
    user.ask(m.GRANT, 7, 1000, False)
    for prefix in (b"a/", b"a/b/", b"none"):
        user.ask(m.HOLD, prefix, 7, 0)
    user.ask(m.REVOKE, 7)
    pass_time([user], 1)
    assert user.ask(m.LIST_KEYS, b"a", b"") == (None, [b"ab"])
    assert user.ask(m.NUM_KEYS) == others + 1
    assert problems(user.engine) == []


@pytest.mark.parametrize("count", [LISTED_KEYS, LISTED_KEYS + 1])
def test_an_answer_has_no_more_keys_than_a_turn_should_pack(count: int) -> None:
    user = User(StoreEngine(b"i" * 16), b"user")
    keys = numbered(count)
    for key in keys:
        user.ask(m.SET, key, b"")
    assert listed(user, b"job/") == [part for part in (sorted(keys)[:LISTED_KEYS], sorted(keys)[LISTED_KEYS:]) if part]


def test_an_answer_has_no_more_bytes_than_a_turn_should_pack() -> None:
    user = User(StoreEngine(b"i" * 16), b"user")
    count = LISTED_BYTES // m.MAX_KEY_BYTES + 1
    keys = [b"%08d" % number + b"x" * (m.MAX_KEY_BYTES - 13) for number in range(count)]
    for key in keys:
        user.ask(m.SET, key, b"")
    assert list(map(len, listed(user, b""))) == [count - 1, 1]
    user.ask(m.DELETE, keys[-1])
    assert list(map(len, listed(user, b""))) == [count - 1]


@pytest.mark.parametrize("past", [0, 1])
def test_namespaces_that_hold_most_come_first(past: int) -> None:
    engine = StoreEngine(b"i" * 16)
    users = [User(engine, b"%d" % number, f"job-{number}") for number in range(MAX_NAMESPACES + past)]
    users[7].ask(m.SET, b"k", b"")
    users[7].ask(m.QUEUE_PUSH, b"q", b"")
    User(engine, b"more", "job-3")
    count, first, second, *rest = users[0].ask(m.NAMESPACES)
    assert count == MAX_NAMESPACES + past
    assert (first, second) == (["job-7", 1, 1, 1], ["job-3", 0, 0, 2])
    assert len(rest) == MAX_NAMESPACES - 2


def test_clients_are_told_of_the_others_and_of_those_that_may_come_back() -> None:
    engine = StoreEngine(b"i" * 16)
    asks, waits, away = (User(engine, name) for name in (b"a", b"b", b"c"))
    elsewhere = User(engine, b"d", "other")
    waits.client.name, waits.client.rank, waits.client.address = "host pid 7", 3, "10.0.0.1:5"
    waits.reply(m.GET, b"never", None)
    away.ask(m.SET, b"k", b"")
    engine.close(away.client, 0.0)
    others = [["job", "host pid 7", 3, "10.0.0.1:5", 1, False], ["job", "", None, "", 0, True]]
    assert asks.ask(m.CLIENTS, False) == [2, *others]
    assert asks.ask(m.CLIENTS, True) == [3, others[0], ["other", "", None, "", 0, False], others[1]]
    assert elsewhere.ask(m.CLIENTS, False) == [0]


@pytest.mark.parametrize("past", [0, 1])
def test_an_answer_has_no_more_clients_than_a_turn_should_pack(past: int) -> None:
    engine = StoreEngine(b"i" * 16)
    first, *_ = [User(engine, b"%d" % number, "job") for number in range(MAX_CLIENTS + past + 1)]
    count, *rows = first.ask(m.CLIENTS, False)
    assert (count, len(rows)) == (MAX_CLIENTS + past, MAX_CLIENTS)


def test_what_changes_between_two_parts() -> None:
    user = User(StoreEngine(b"i" * 16), b"user")
    keys = sorted(numbered(LISTED_KEYS + 2))
    for key in keys:
        user.ask(m.SET, key, b"")
    start, first = user.ask(m.LIST_KEYS, b"job/", b"")
    for key in (keys[0], keys[-2]):
        user.ask(m.DELETE, key)
    assert start == keys[-2]
    assert user.ask(m.LIST_KEYS, b"job/", start) == (None, keys[-1:])
    assert first == keys[:-2]
