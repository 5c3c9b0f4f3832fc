"""Exactly once: what the engine remembers of a client's mutations, for how long, and at what cost."""

from __future__ import annotations

from typing import Any

import pytest

from asyncdist_server.engine.clients import Client, Reply
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.messages import HelloRefused, Limits, ProtocolError

ID = b"c" * 16
OTHER = b"d" * 16


@pytest.fixture
def engine() -> StoreEngine:
    return StoreEngine(b"i" * 16)


class Link:
    """One connection of a retrying client: every reply goes into a frame of its own, unless `lose` is set."""

    def __init__(self, engine: StoreEngine, client_id: bytes = ID, pending: tuple[int, ...] = (), now: float = 0.0):
        self.engine = engine
        self.late: list[Reply] = []
        self.superseded = 0
        self.client: Client = engine.open(
            "job",
            self.late.append,
            client_id=client_id,
            pending=pending,
            on_superseded=self._on_superseded,
            now=now,
        )

    def _on_superseded(self) -> None:
        self.superseded += 1

    def ask(self, request_id: int, operation: int, *arguments: Any) -> Reply | None:
        reply = self.engine.request(self.client, (request_id, operation, *arguments), 0.0)
        if reply is not None:
            self.engine.frames_sent(self.client, 1)
        return reply

    def lose(self, now: float = 0.0) -> None:
        self.engine.close(self.client, now)


MUTATIONS = [
    (m.ADD, b"n", 1),
    (m.APPEND, b"a", b"x"),
    (m.QUEUE_PUSH, b"q", b"2"),
    (m.QUEUE_RETURN, b"q", b"0"),
    (m.QUEUE_POP, b"full", None),
    (m.COMPARE_SET, b"c", b"1", b"2"),
    (m.SET, b"s", b"1"),
    (m.DELETE, b"c"),
    (m.MULTI_SET, (b"s",), (b"1",)),
    (m.DELETE_NAMESPACE,),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: m.OPERATION_NAMES[mutation[0]])
def test_a_retried_mutation_is_applied_once_and_answered_alike(engine: StoreEngine, mutation: tuple[Any, ...]) -> None:
    observer = Link(engine, OTHER)
    observer.ask(1, m.SET, b"c", b"1")
    observer.ask(2, m.QUEUE_PUSH, b"full", b"1")
    observer.ask(3, m.QUEUE_PUSH, b"full", b"2")
    first = Link(engine)
    assert not first.client.resumed
    reply = first.ask(7, *mutation)
    state = contents(engine)
    first.lose()
    # What another client does in between must not be undone by the retry.
    again = Link(engine, pending=(7,))
    assert again.client.resumed
    assert again.ask(7, *mutation) == reply
    assert contents(engine) == state
    # And once more, as the answer may be lost again.
    again.lose()
    assert Link(engine, pending=(7,)).ask(7, *mutation) == reply
    assert contents(engine) == state


def contents(engine: StoreEngine) -> Any:
    home = engine._namespaces["job"]
    return dict(home.values), {key: list(queue) for key, queue in home.queues.items()}


def test_a_mutation_that_never_arrived_is_applied_by_the_retry(engine: StoreEngine) -> None:
    Link(engine).lose()
    link = Link(engine, pending=(1,))
    assert link.client.resumed
    assert link.ask(1, m.ADD, b"n", 1) == (1, m.OK, 1)


def test_an_item_popped_by_a_lost_connection_is_handed_out_by_the_retry(engine: StoreEngine) -> None:
    first = Link(engine)
    assert first.ask(1, m.QUEUE_POP, b"q", None) is None
    Link(engine, OTHER).ask(1, m.QUEUE_PUSH, b"q", b"item")
    assert first.late == [(1, m.OK, b"item")]
    first.lose()  # before the reply was put into a frame
    again = Link(engine, pending=(1,))
    assert again.ask(1, m.QUEUE_POP, b"q", None) == (1, m.OK, b"item")


def test_a_blocked_pop_of_a_lost_connection_takes_nothing(engine: StoreEngine) -> None:
    first = Link(engine)
    first.ask(1, m.QUEUE_POP, b"q", None)
    first.lose()
    other = Link(engine, OTHER)
    other.ask(1, m.QUEUE_PUSH, b"q", b"item")
    assert other.ask(2, m.QUEUE_LEN, b"q") == (2, m.OK, 1)
    assert Link(engine, pending=(1,)).ask(1, m.QUEUE_POP, b"q", None) == (1, m.OK, b"item")


def test_acknowledged_replies_are_forgotten_and_their_memory_returned(engine: StoreEngine) -> None:
    link = Link(engine)
    before = engine.memory_bytes
    link.ask(1, m.QUEUE_PUSH, b"q", bytes(1000))
    link.ask(2, m.QUEUE_POP, b"q", 0)
    assert engine.memory_bytes > before + 1000
    engine.acknowledge(link.client, 1)
    engine.acknowledge(link.client, 1)
    assert engine.memory_bytes > before + 1000
    engine.acknowledge(link.client, 2)
    assert engine.memory_bytes == before
    assert link.client.remembered == 0


def test_acknowledgements_of_what_was_not_sent_break_the_protocol(engine: StoreEngine) -> None:
    link = Link(engine)
    link.ask(1, m.ADD, b"n", 1)
    link.ask(2, m.ADD, b"n", 1)
    with pytest.raises(ProtocolError, match="3 reply frames"):
        engine.acknowledge(link.client, 3)
    engine.acknowledge(link.client, 2)
    with pytest.raises(ProtocolError, match="1 reply frames"):
        engine.acknowledge(link.client, 1)


def test_replies_of_one_turn_in_several_frames_are_kept_until_the_last(engine: StoreEngine) -> None:
    link = Link(engine)
    for request_id in (1, 2):
        engine.request(link.client, (request_id, m.ADD, b"n", 1), 0.0)
    engine.frames_sent(link.client, 2)
    engine.acknowledge(link.client, 1)
    link.lose()
    assert Link(engine, pending=(2,)).ask(2, m.ADD, b"n", 1) == (2, m.OK, 2)


def test_a_hello_drops_what_it_will_not_retry(engine: StoreEngine) -> None:
    link = Link(engine)
    link.ask(1, m.ADD, b"n", 1)
    link.ask(2, m.ADD, b"n", 1)
    link.lose()
    with_two = engine.memory_bytes
    again = Link(engine, pending=(2,))
    assert engine.memory_bytes < with_two
    assert again.client.remembered == 1
    again.lose()
    Link(engine)
    assert engine.memory_bytes == len(b"n") + 1 + 180


def test_replies_at_the_bound_in_flight_and_one_past_it() -> None:
    engine = StoreEngine(b"i" * 16, Limits(in_flight=2))
    link = Link(engine)
    for request_id in (1, 2, 3):
        reply = link.ask(request_id, m.ADD, b"n", 1)
        assert reply is not None
        assert reply[1] == m.OK
    reply = link.ask(4, m.ADD, b"n", 1)
    assert reply is not None
    assert reply[1] == m.LIMIT
    assert link.ask(5, m.GET, b"n", 0) == (5, m.OK, b"3")  # reads need no memory
    engine.acknowledge(link.client, 1)
    assert link.ask(4, m.ADD, b"n", 1) == (4, m.OK, 4)


def test_blocked_requests_of_one_client_at_the_bound_and_one_past_it() -> None:
    engine = StoreEngine(b"i" * 16, Limits(in_flight=2))
    link = Link(engine)
    assert link.ask(1, m.GET, b"k", None) is None
    assert link.ask(2, m.GET, b"k", None) is None
    reply = link.ask(3, m.GET, b"k", None)
    assert reply is not None
    assert reply[1] == m.LIMIT


def test_a_client_is_forgotten_after_its_linger_and_not_before(engine: StoreEngine) -> None:
    link = Link(engine)
    link.ask(1, m.ADD, b"n", 1)
    link.lose(now=100.0)
    forget_at = 100.0 + m.CLIENT_LINGER_S
    assert engine.next_deadline() == forget_at
    engine.expire(forget_at - 0.001)
    assert Link(engine, pending=(1,)).client.resumed
    engine.close(engine._connected[ID], 100.0)
    engine.expire(forget_at)
    assert engine.next_deadline() is None
    again = Link(engine, pending=(1,))
    assert not again.client.resumed
    assert engine.memory_bytes == len(b"n") + 1 + 180


def test_a_goodbye_forgets_at_once(engine: StoreEngine) -> None:
    link = Link(engine)
    link.ask(1, m.ADD, b"n", 1)
    link.ask(2, m.GOODBYE)
    link.lose()
    assert engine.statistics()["clients_away"] == 0
    assert not Link(engine).client.resumed


def test_clients_away_are_bounded_like_connections() -> None:
    engine = StoreEngine(b"i" * 16, Limits(connections=2))
    for number in range(3):
        Link(engine, bytes([number]) * 16).lose()
    assert engine.statistics()["clients_away"] == 2
    assert not Link(engine, bytes([0]) * 16).client.resumed
    assert Link(engine, bytes([2]) * 16).client.resumed


def test_a_new_connection_of_a_client_ends_its_old_one(engine: StoreEngine) -> None:
    old = Link(engine)
    old.ask(1, m.ADD, b"n", 1)
    old.ask(2, m.GET, b"k", None)
    engine.request(old.client, (3, m.ADD, b"n", 1), 0.0)  # answered, and not in a frame yet
    new = Link(engine, pending=(1,))
    before = engine.memory_bytes
    assert old.superseded == 1
    assert old.client.closed
    assert engine.waiter_count == 0
    engine.frames_sent(old.client, 1)
    old.lose()
    assert engine.memory_bytes == before
    assert new.ask(1, m.ADD, b"n", 1) == (1, m.OK, 1)
    assert engine.statistics()["clients"] == 1


def test_a_client_id_belongs_to_one_namespace(engine: StoreEngine) -> None:
    link = Link(engine)
    with pytest.raises(HelloRefused, match="another namespace"):
        engine.open("other", print, client_id=ID)
    link.lose()
    with pytest.raises(HelloRefused, match="another namespace"):
        engine.open("other", print, client_id=ID)
    assert engine.statistics()["clients"] == 0


def test_a_watch_begins_where_it_did_when_it_is_asked_again(engine: StoreEngine) -> None:
    """Else what its client had asked behind it, and what was answered from memory, would be missed."""
    link = Link(engine)
    start = link.ask(1, m.WATCH, b"k", None, None)
    assert start is not None
    link.ask(2, m.SET, b"k", b"v")
    link.lose()
    again = Link(engine, pending=(1, 2))
    assert again.ask(1, m.WATCH, b"k", None, None) == start
    assert again.ask(2, m.SET, b"k", b"v") == (2, m.OK, None)
    events = again.ask(3, m.WATCH, b"k", start[2][0], None)
    assert events is not None
    assert [event[1:] for event in events[2][1]] == [(m.EVENT_SET, b"k", b"v")]
    assert again.ask(4, m.WATCH, b"k", None, None) == (4, m.OK, (events[2][0], []))


def test_starts_of_watches_at_the_bound_in_flight_and_one_past_it() -> None:
    engine = StoreEngine(b"i" * 16, Limits(in_flight=2))
    link = Link(engine)
    answers = [link.ask(number, m.WATCH, b"k", None, None) for number in range(1, 5)]
    assert [answer and answer[1] for answer in answers] == [m.OK, m.OK, m.OK, m.LIMIT]
    engine.acknowledge(link.client, 3)
    again = link.ask(5, m.WATCH, b"k", None, None)
    assert again is not None
    assert again[1] == m.OK
