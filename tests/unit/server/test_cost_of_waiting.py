"""What waiting costs: memory that is charged as it is needed, and nothing to whoever looks at it from outside."""

from __future__ import annotations

import gc
import time
import tracemalloc

import msgpack
import pytest

from asyncdist_server.engine.coordination import MAX_WAITS
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.waiters import Waiter, WaitList
from asyncdist_server.ops.metrics import collect
from asyncdist_server.serving.config import ServerConfig
from asyncdist_server.serving.daemon import StoreServer
from asyncdist_server.wire import messages as m

WAITERS = 4000


@pytest.mark.parametrize("keys", [1, 4])
def test_a_waiter_is_charged_what_it_costs(keys: int) -> None:
    """The dearest one: nobody else waits for its keys, and it has a time-out."""
    engine = StoreEngine(b"i" * 16)
    client = engine.open("job", lambda reply: None)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, WAITERS + 1):
            names = [b"rank/%d/%d" % (number, index) for index in range(keys)]
            request = msgpack.unpackb(msgpack.packb((10**6 + number, m.WAIT, names, 300_000)), use_list=False)
            assert engine.request(client, request, number / 1000) is None
        del names, request
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1 <= engine.memory_bytes / (after - before) <= 1.15  # the allocator adds a twentieth


@pytest.mark.parametrize("everywhere", [True, False])
def test_those_that_wait_longest_are_shown_in_order_whatever_they_wait_for(everywhere: bool) -> None:
    engine = StoreEngine(b"i" * 16)
    here, there = engine.open("job", lambda reply: None), engine.open("other", lambda reply: None)
    kinds = [(m.GET, b"k", None), (m.QUEUE_POP, b"q", None), (m.WAIT, (b"k",), None)]
    count = MAX_WAITS + 10
    for number in range(1, count + 1):
        for client in (here, there):
            assert engine.request(client, (number, *kinds[number % 3]), float(number)) is None
    total, *rows = engine.request(here, (10**6, m.WAITS, everywhere), float(count))[2]  # type: ignore[index]
    assert total == (2 * count if everywhere else count)
    assert len(rows) == MAX_WAITS
    waited_ms = [row[2] for row in rows]
    each = 2 if everywhere else 1
    assert waited_ms == [1000 * (count - 1 - index // each) for index in range(MAX_WAITS)]
    assert {row[3] for row in rows} == ({"job", "other"} if everywhere else {"job"})


def test_each_of_many_waiters_of_a_queue_is_found_at_once() -> None:
    """A look past all that have gone before takes half a minute of the daemon's time."""
    waiting, count = WaitList(), 200_000
    client = StoreEngine(b"i" * 16).open("job", lambda reply: None)
    for number in range(count):
        waiting.add(Waiter(client, number, m.QUEUE_POP, (b"q",), None))
    began_s = time.process_time()
    for number in range(count):
        first = waiting.take_first(b"q")
        assert first is not None
        assert first.request_id == number
    assert time.process_time() - began_s < 3
    assert b"q" not in waiting


async def test_metrics_look_at_no_single_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 of them would wait meanwhile."""
    server = StoreServer(ServerConfig(port=0))
    engine = server.engine
    client = engine.open("job", lambda reply: None, client_id=b"c" * 16)
    assert engine.request(client, (1, m.QUEUE_POP, b"q", None), 0.0) is None
    for number, request in enumerate([(m.WATCH, b"k", None, None), (m.SET, b"k", b"value"), (m.ADD, b"n", 1)], 2):
        assert engine.request(client, (number, *request), 0.0) is not None
        engine.frames_sent(client, 1)
    expected = {
        "data": 2 * 180 + 7 + 1,
        "waiters": engine.state.waiter_bytes,
        "replies": client.remembered_bytes,
        "events": sum(history.bytes for history in client.namespace.histories.values()),
        "input": 0,
    }
    assert all(expected[kind] > 0 for kind in ("waiters", "replies", "events"))
    monkeypatch.setattr(StoreEngine, "all_clients", lambda self: pytest.fail("it looks at every client"))
    monkeypatch.setattr(engine.state, "clients", None)
    found = {metric.name: dict(samples) for metric, samples in collect(server, 1.0)}
    assert found["memory_bytes"] == {(kind,): size for kind, size in expected.items()}
    assert found["waiters"] == {(): 1}
