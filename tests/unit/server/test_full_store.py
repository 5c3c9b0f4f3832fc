"""A store that is full: what it told members is kept all the same, and who waited for a lock gets it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_model import StoreModel

from asyncdist_server.engine.clients import Reply
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.history import History
from asyncdist_server.serving.config import limits_for
from asyncdist_server.wire import messages as m

MEMORY_BYTES = 9_000


def epoch_with(filler_bytes: int) -> tuple[bool, int]:
    """Join a job alone in a store that holds so much already; returns whether that worked, and the memory then."""
    late: list[Reply] = []
    engine = StoreEngine(b"i" * 16, limits_for(4_000, memory_bytes=MEMORY_BYTES))
    client = engine.open("job", late.append)
    for number, size in enumerate((2_000, filler_bytes), 1):
        assert engine.request(client, (number, m.SET, b"%d" % number, b"x" * size), 0.0) == (number, m.OK, None)
    engine.request(client, (3, m.GRANT, 1, 60_000, False), 0.0)
    reply = engine.request(client, (4, m.JOIN, b"j", b"me", 1, 1, 0, 1, None), 0.0)
    if reply is not None:
        assert reply[1] in (m.LIMIT, m.LEASE_LOST)
        return False, engine.memory_bytes
    assert late[0][:2] == (4, m.OK)
    assert StoreModel.PREFIX + b"epoch" in engine.namespaces["job"].values, "it would be given again after a restart"
    return True, engine.memory_bytes


def test_an_epoch_is_among_the_keys_even_if_the_store_is_full() -> None:
    outcomes = [epoch_with(filler_bytes) for filler_bytes in range(0, 3_500, 20)]
    assert {joined for joined, _ in outcomes} == {True, False}
    assert all(memory_bytes <= MEMORY_BYTES + 500 for _, memory_bytes in outcomes)


def test_a_lock_is_passed_on_even_if_the_store_is_full() -> None:
    late: list[Reply] = []
    engine = StoreEngine(b"i" * 16, limits_for(4_000, memory_bytes=MEMORY_BYTES))
    client = engine.open("job", late.append)
    engine.request(client, (1, m.GRANT, 1, 60_000, False), 0.0)
    assert engine.request(client, (2, m.SET, b"lock", b""), 0.0) == (2, m.OK, None)
    assert engine.request(client, (3, m.LOCK, b"lock", 1, None), 0.0) is None
    assert engine.request(client, (4, m.SET, b"a", bytes(4_000)), 0.0) == (4, m.OK, None)
    room = MEMORY_BYTES - engine.memory_bytes - client.namespace.growth_by_value(b"b", b"")
    assert engine.request(client, (5, m.SET, b"b", bytes(room)), 0.0) == (5, m.OK, None)
    assert engine.request(client, (6, m.DELETE, b"lock"), 0.0) == (6, m.OK, True)
    assert [reply[:2] for reply in late] == [(3, m.OK)]
    assert engine.memory_bytes < MEMORY_BYTES


def test_a_request_that_is_refused_looks_at_no_history_without_events() -> None:
    """Where twenty thousand prefixes are watched, a thousand of them would take a second."""

    class Unlisted(dict[History, None]):
        def __iter__(self) -> Iterator[History]:
            pytest.fail("it looks at every history")

    engine = StoreEngine(b"i" * 16, limits_for(4_000, memory_bytes=3 * MEMORY_BYTES))
    client, recorder = engine.open("job", lambda reply: None), engine.state.recorder
    for number in range(1, 6):
        assert engine.request(client, (number, m.WATCH, b"%d/" % number, None, 0), 0.0) is not None
    for number in (6, 7):
        set_one = (number, m.SET, b"%d/k" % (number - 5), bytes(2_000))
        assert engine.request(client, set_one, 0.0) == (number, m.OK, None)
    histories = client.namespace.histories
    assert [len(histories[b"%d/" % number].events) for number in range(1, 6)] == [1, 1, 0, 0, 0]
    recorder._histories = Unlisted(recorder._histories)
    for number in range(8, 30):
        reply = engine.request(client, (number, m.SET, b"filler %d" % number, bytes(4_000)), 0.0)
    assert reply is not None
    assert reply[1] == m.LIMIT
    assert not any(history.events for history in histories.values()), "events are the first to go"
    assert engine.request(client, (30, m.DELETE, b"1/k"), 0.0) == (30, m.OK, True)
    assert [history.prefix for history in recorder.filled] == [b"1/"]
    for now in (100.0, 1000.0):
        engine.expire(now)
    assert not histories
    assert not recorder.filled
