"""An item of a queue is with a client that is known to have it, or in the store, whoever went away."""

from __future__ import annotations

from typing import Any

import pytest
from engine_books import problems

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.serving.config import limits_for
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.messages import CLIENT_LINGER_S


class Link:
    """A client on its connection. What it is told counts as read when it says so."""

    def __init__(self, engine: StoreEngine, name: bytes) -> None:
        self.engine = engine
        self.client_id = name.ljust(16, b"-")
        self.last_id = 0
        self.connect()

    def connect(self, *pending: int) -> None:
        self.late: list[Any] = []
        self.frames = 0
        self.client = self.engine.open("job", self.late.append, client_id=self.client_id, pending=pending, now=0.0)

    def ask(self, *request: Any) -> Any:
        self.last_id += 1
        reply = self.engine.request(self.client, (self.last_id, *request), 0.0)
        self.sent()
        return None if reply is None else reply[1:]

    def sent(self) -> None:
        self.frames += 1
        self.engine.frames_sent(self.client, 1)

    def confirm(self) -> None:
        self.engine.acknowledge(self.client, self.frames)

    def go(self, leaving: bool = False) -> None:
        self.client.leaving = leaving
        self.engine.close(self.client, 0.0)


@pytest.fixture
def engine() -> StoreEngine:
    return StoreEngine(b"i" * 16)


def items(engine: StoreEngine) -> list[bytes]:
    found = engine.namespaces.get("job")
    return list(found.queues.get(b"q", ())) if found is not None else []


def forget(engine: StoreEngine) -> None:
    assert problems(engine) == []
    engine.expire(CLIENT_LINGER_S)
    assert problems(engine) == []


@pytest.mark.parametrize("sent", [True, False], ids=["lost on its way", "never sent"])
def test_an_item_for_a_client_that_had_just_gone_stays(engine: StoreEngine, sent: bool) -> None:
    gone, other = Link(engine, b"gone"), Link(engine, b"other")
    assert gone.ask(m.QUEUE_POP, b"q", None) is None
    other.ask(m.QUEUE_PUSH, b"q", b"1")
    assert gone.late == [(1, m.OK, b"1")]
    if sent:
        gone.sent()
    other.ask(m.QUEUE_PUSH, b"q", b"2")
    gone.go()
    assert items(engine) == [b"2"]
    forget(engine)
    assert items(engine) == [b"1", b"2"]


def test_an_item_that_was_never_sent_is_charged_while_its_taker_may_come_back(engine: StoreEngine) -> None:
    """Else clients that pop and vanish would let a store hold any amount."""
    gone, other = Link(engine, b"gone"), Link(engine, b"other")
    gone.ask(m.QUEUE_POP, b"q", None)
    other.ask(m.QUEUE_PUSH, b"q", bytes(5000))
    gone.go()
    assert engine.memory_bytes > 5000
    assert problems(engine) == []
    forget(engine)
    assert [len(item) for item in items(engine)] == [5000]


def test_an_item_that_arrived_does_not_come_back(engine: StoreEngine) -> None:
    link, other = Link(engine, b"a"), Link(engine, b"b")
    other.ask(m.QUEUE_PUSH, b"q", b"1")
    assert link.ask(m.QUEUE_POP, b"q", 0) == (m.OK, b"1")
    link.confirm()
    link.go()
    forget(engine)
    assert items(engine) == []


def test_a_goodbye_gives_back_at_once_what_was_not_read(engine: StoreEngine) -> None:
    link, other = Link(engine, b"a"), Link(engine, b"b")
    for item in (b"1", b"2", b"3"):
        other.ask(m.QUEUE_PUSH, b"q", item)
    link.ask(m.QUEUE_POP, b"q", 0)
    link.confirm()
    link.ask(m.QUEUE_POP, b"q", 0)
    link.ask(m.QUEUE_POP, b"q", 0)
    link.go(leaving=True)
    assert items(engine) == [b"2", b"3"]
    assert problems(engine) == []


def test_who_comes_back_and_asks_again_gets_the_same_item_once(engine: StoreEngine) -> None:
    link, other = Link(engine, b"a"), Link(engine, b"b")
    other.ask(m.QUEUE_PUSH, b"q", b"1")
    link.ask(m.QUEUE_POP, b"q", 0)
    for _ in range(2):  # lost again before it is asked for
        link.go()
        link.connect(1)
        assert problems(engine) == []
    assert engine.request(link.client, (1, m.QUEUE_POP, b"q", 0), 0.0) == (1, m.OK, b"1")
    link.sent()
    assert problems(engine) == []
    link.confirm()
    link.go()
    forget(engine)
    assert items(engine) == []


@pytest.mark.parametrize("asked", [True, False])
def test_who_comes_back_and_is_lost_again_leaves_it(engine: StoreEngine, asked: bool) -> None:
    link, other = Link(engine, b"a"), Link(engine, b"b")
    other.ask(m.QUEUE_PUSH, b"q", b"1")
    link.ask(m.QUEUE_POP, b"q", 0)
    link.go()
    link.connect(1)
    if asked:
        assert engine.request(link.client, (1, m.QUEUE_POP, b"q", 0), 0.0) == (1, m.OK, b"1")
        link.sent()
    link.go()
    forget(engine)
    assert items(engine) == [b"1"]


def test_who_comes_back_and_does_not_ask_has_it(engine: StoreEngine) -> None:
    link, other = Link(engine, b"a"), Link(engine, b"b")
    other.ask(m.QUEUE_PUSH, b"q", b"1")
    link.ask(m.QUEUE_POP, b"q", 0)
    link.go()
    link.connect()
    link.go()
    forget(engine)
    assert items(engine) == []


def test_an_item_that_comes_back_goes_to_who_waits(engine: StoreEngine) -> None:
    gone, other = Link(engine, b"gone"), Link(engine, b"other")
    other.ask(m.QUEUE_PUSH, b"q", b"1")
    gone.ask(m.QUEUE_POP, b"q", 0)
    assert other.ask(m.QUEUE_POP, b"q", None) is None
    gone.go(leaving=True)
    assert other.late == [(2, m.OK, b"1")]
    other.sent()
    assert other.client.taken == {2: (b"q", True)}  # and now it is this one that must say so
    assert problems(engine) == []


def test_an_item_stays_where_nobody_else_was(engine: StoreEngine) -> None:
    link = Link(engine, b"a")
    link.ask(m.QUEUE_PUSH, b"q", b"1")
    link.ask(m.QUEUE_POP, b"q", 0)
    link.go()
    assert "job" not in engine.namespaces
    forget(engine)
    assert items(engine) == [b"1"]


@pytest.mark.parametrize("how", ["namespace", "hold"])
def test_nothing_comes_back_to_a_queue_that_was_deleted(engine: StoreEngine, how: str) -> None:
    gone, other = Link(engine, b"gone"), Link(engine, b"other")
    other.ask(m.GRANT, 1, 10**6, False)
    other.ask(m.HOLD, b"q", 1, 0)
    for item in (b"1", b"2"):
        other.ask(m.QUEUE_PUSH, b"q", item)
    gone.ask(m.QUEUE_POP, b"q", 0)
    gone.go()
    if how == "namespace":
        other.ask(m.DELETE_NAMESPACE)
    else:
        other.ask(m.REVOKE, 1)
        engine.expire(0.0)
    forget(engine)
    assert items(engine) == []


VALUE_BYTES = 2000
MEMORY_BYTES = 8000


@pytest.mark.parametrize("over", [0, 1])
def test_an_item_goes_back_into_a_full_store(over: int) -> None:
    """By as much as the longest value has, and not one byte more: a client could fill the store like that."""
    engine = StoreEngine(b"i" * 16, limits_for(VALUE_BYTES, memory_bytes=MEMORY_BYTES))
    link = Link(engine, b"a")
    number = 0
    while link.ask(m.SET, b"%d" % number, bytes(200))[0] == m.OK:
        number += 1
        link.confirm()
    link.confirm()
    room = MEMORY_BYTES + VALUE_BYTES - engine.memory_bytes
    item = bytes(room + over - link.client.namespace.growth_by_item(b"q", b""))
    assert link.ask(m.QUEUE_PUSH, b"q", item)[0] == m.LIMIT
    link.confirm()
    assert link.ask(m.QUEUE_RETURN, b"q", item)[0] == (m.LIMIT if over else m.OK)
