"""What the engine and its sessions count: every request once, whatever became of it."""

from __future__ import annotations

import pytest
from server_kit import MemoryClient

from asyncdist_server.engine.counters import DISCONNECTED, REPLAYED, RESULT_NAMES, RESULTS, Counters, Histogram
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.messages import Limits


def results(engine: StoreEngine, operation: int) -> dict[str, int]:
    counts = engine.counters.results[operation]
    return {RESULT_NAMES[code]: count for code, count in enumerate(counts) if count}


def opened(engine: StoreEngine, client_id: bytes = b"client-0123456-x") -> MemoryClient:
    client = MemoryClient(engine, client_id=client_id)
    client.open()
    return client


def test_every_reply_counts_by_operation_and_result() -> None:
    engine = StoreEngine(b"i" * 16, Limits()._replace(value_bytes=4))
    client = opened(engine)
    client.ask((m.SET, b"k", b"v"), (m.SET, b"k", b"12345"), (m.GET, b"k", None), (m.GET, b"none", 0))
    client.ask((m.ADD, b"k", 1))
    assert results(engine, m.SET) == {"ok": 1, "limit": 1}
    assert results(engine, m.GET) == {"ok": 1, "timeout": 1}
    assert results(engine, m.ADD) == {"invalid": 1}


def test_a_blocked_request_counts_once_with_what_it_waited() -> None:
    engine = StoreEngine(b"i" * 16)
    client, other = opened(engine), opened(engine, b"other-0123456789"[:16])
    client.send(client.frame((m.GET, b"k", None), (m.WAIT, (b"k",), 500), (m.WAIT, (b"l",), 500)))
    assert results(engine, m.GET) == {}
    client.now = other.now = 0.25
    other.ask((m.SET, b"k", b"v"))
    engine.expire(0.5)
    assert results(engine, m.GET) == {"ok": 1}
    assert results(engine, m.WAIT) == {"ok": 1, "timeout": 1}
    assert engine.counters.blocked[m.GET].sum == 0.25
    assert engine.counters.blocked[m.WAIT].sum == 0.75
    assert sum(engine.counters.blocked[m.WAIT].counts) == 2


def test_a_client_that_went_leaves_its_waits_counted() -> None:
    engine = StoreEngine(b"i" * 16)
    client = opened(engine)
    client.send(client.frame((m.GET, b"k", None)))
    client.session.close(2.0)
    assert results(engine, m.GET) == {RESULT_NAMES[DISCONNECTED]: 1}
    assert engine.counters.blocked[m.GET].sum == 2.0


def test_a_retried_change_is_counted_as_replayed() -> None:
    engine = StoreEngine(b"i" * 16)
    client = opened(engine)
    client.ask((m.ADD, b"n", 1))
    again = MemoryClient(engine)
    again.open(pending=(1,))
    assert again.ask((m.ADD, b"n", 1)) == [(1, m.OK, 1)]
    assert results(engine, m.ADD) == {"ok": 1, RESULT_NAMES[REPLAYED]: 1}


def test_places_for_results_are_enough_and_distinct() -> None:
    codes = [m.OK, m.TIMEOUT, m.LIMIT, m.INVALID, m.CANCELLED, m.PROTOCOL, m.REFUSED, m.COMPACTED, m.LEASE_LOST]
    assert {*codes, REPLAYED, DISCONNECTED} == RESULT_NAMES.keys()
    assert max(codes) < REPLAYED < DISCONNECTED < RESULTS


def test_one_request_of_a_frame_stands_for_all_in_turn() -> None:
    """Frames that are all alike: a set and three gets. Each place is looked at, as often as any other."""
    engine = StoreEngine(b"i" * 16)
    client = opened(engine)
    seen: list[int] = []
    for _ in range(400):
        client.ask((m.SET, b"k", b"v"), *[(m.GET, b"k", None)] * 3)
        seen.append(client.session.operation)
    assert client.session.ran == 1600
    assert seen.count(m.SET) == pytest.approx(100, abs=10)


def test_nothing_of_a_frame_is_kept_once_it_has_run() -> None:
    engine = StoreEngine(b"i" * 16)
    client = opened(engine)
    client.ask((m.CHECK, (bytes(100_000),)))
    assert client.session._requests == ()
    assert not client.session.busy


@pytest.mark.parametrize(("value", "place"), [(0.0, 0), (1.0, 0), (1.5, 1), (2.0, 1), (2.5, 2)])
def test_a_bound_belongs_to_the_values_below_it(value: float, place: int) -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value, 3)
    assert histogram.counts == [3 * (place == position) for position in range(3)]
    assert histogram.sum == 3 * value


def test_counters_begin_at_nothing() -> None:
    counters = Counters([m.SET])
    assert counters.results == {m.SET: [0] * RESULTS}
    assert not counters.opened
    assert not counters.refused
