"""The engine's operations one by one, with an explicit clock and no loop."""

from __future__ import annotations

from typing import Any

import pytest

from asyncdist_server.engine.clients import Client, Reply
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.messages import Limits, ProtocolError

INT64_MAX = 2**63 - 1


class Handle:
    """A client of an engine that numbers its requests and collects late replies."""

    def __init__(self, engine: StoreEngine, namespace: str = "job") -> None:
        self.engine = engine
        self.late: list[Reply] = []
        self.client: Client = engine.open(namespace, self.late.append)
        self.next_id = 1

    def ask(self, operation: int, *arguments: Any, now: float = 0.0) -> Reply | None:
        request_id = self.next_id
        self.next_id += 1
        return self.engine.request(self.client, (request_id, operation, *arguments), now)

    def run(self, operation: int, *arguments: Any, now: float = 0.0) -> Any:
        """Return the value of a request that must succeed at once."""
        reply = self.ask(operation, *arguments, now=now)
        assert reply is not None, "the request is blocked"
        assert reply[1] == m.OK, reply
        return reply[2]

    def refused(self, code: int, operation: int, *arguments: Any) -> str:
        reply = self.ask(operation, *arguments)
        assert reply is not None
        assert reply[1] == code, reply
        assert isinstance(reply[2], str)
        return reply[2]

    def taken(self) -> list[tuple[int, Any]]:
        """Return and clear the late replies, without their ids."""
        late = [(code, value) for _, code, value in self.late]
        self.late.clear()
        return late


@pytest.fixture
def engine() -> StoreEngine:
    return StoreEngine(b"i" * 16)


@pytest.fixture
def a(engine: StoreEngine) -> Handle:
    return Handle(engine)


@pytest.fixture
def b(engine: StoreEngine) -> Handle:
    return Handle(engine)


def test_set_get_overwrite_delete(a: Handle) -> None:
    assert a.run(m.SET, b"k", b"v") is None
    assert a.run(m.GET, b"k", None) == b"v"
    a.run(m.SET, b"k", b"")
    assert a.run(m.GET, b"k", 0) == b""
    assert a.run(m.DELETE, b"k") is True
    assert a.run(m.DELETE, b"k") is False
    assert a.ask(m.GET, b"k", 0) == (7, m.TIMEOUT, [b"k"])


def test_empty_keys_are_keys(a: Handle) -> None:
    a.run(m.SET, b"", b"x")
    assert a.run(m.CHECK, (b"",)) is True
    assert a.run(m.NUM_KEYS) == 1


@pytest.mark.parametrize(
    ("stored", "amount", "total"),
    [
        (None, 5, 5),
        (None, 0, 0),
        (b"5", -7, -2),
        (b"-2", 0, -2),
        (b" 12", 1, 13),
        (b"12abc", 1, 13),
        (b"+3", 0, 3),
        (b"0x10", 0, 0),
        (b"1.9", 0, 1),
        (b"1_0", 0, 1),
        (b"\t\n-8 ", 1, -7),
        (b"0" * 5000 + b"4", 1, 5),
        (b"9223372036854775807", 0, INT64_MAX),
        (b"-9223372036854775808", 0, -INT64_MAX - 1),
        (b"9223372036854775806", 1, INT64_MAX),
    ],
)
def test_add_reads_a_number_as_c_does(a: Handle, stored: bytes | None, amount: int, total: int) -> None:
    if stored is not None:
        a.run(m.SET, b"n", stored)
    assert a.run(m.ADD, b"n", amount) == total
    assert a.run(m.GET, b"n", 0) == b"%d" % total


@pytest.mark.parametrize("stored", [b"abc", b"", b"-", b"+-1", b"9223372036854775808", b"9" * 20, b"1" * 100_000])
def test_add_to_something_else_is_answered_and_changes_nothing(a: Handle, stored: bytes) -> None:
    a.run(m.SET, b"n", stored)
    assert "not a number" in a.refused(m.INVALID, m.ADD, b"n", 1)
    assert a.run(m.GET, b"n", 0) == stored


@pytest.mark.parametrize(
    ("stored", "amount"),
    [(b"9223372036854775807", 1), (b"-9223372036854775808", -1), (b"0", 2**63), (b"-1", 2**63)],
)
def test_add_beyond_int64_is_answered_and_changes_nothing(a: Handle, stored: bytes, amount: int) -> None:
    a.run(m.SET, b"n", stored)
    assert "int64" in a.refused(m.INVALID, m.ADD, b"n", amount)
    assert a.run(m.GET, b"n", 0) == stored


@pytest.mark.parametrize(
    ("stored", "expected", "desired", "answer", "after"),
    [
        (None, b"", b"d", b"d", b"d"),
        (None, b"e", b"d", b"e", None),
        (b"c", b"c", b"d", b"d", b"d"),
        (b"", b"", b"d", b"d", b"d"),
        (b"c", b"e", b"d", b"c", b"c"),
        (b"c", b"", b"d", b"c", b"c"),
        (b"", b"e", b"d", b"", b""),
    ],
)
def test_compare_set_follows_torchs_table(
    a: Handle, stored: bytes | None, expected: bytes, desired: bytes, answer: bytes, after: bytes | None
) -> None:
    if stored is not None:
        a.run(m.SET, b"k", stored)
    assert a.run(m.COMPARE_SET, b"k", expected, desired) == answer
    assert a.run(m.CHECK, (b"k",)) is (after is not None)
    if after is not None:
        assert a.run(m.GET, b"k", 0) == after


def test_append_multi_set_multi_get(a: Handle) -> None:
    a.run(m.APPEND, b"p", b"po")
    a.run(m.APPEND, b"p", b"tato")
    a.run(m.MULTI_SET, (b"x", b"y", b"x"), (b"1", b"2", b"3"))
    assert a.run(m.MULTI_GET, (b"p", b"x", b"y", b"x"), 0) == [b"potato", b"3", b"2", b"3"]
    assert a.run(m.MULTI_GET, (), 0) == []
    assert a.run(m.MULTI_SET, (), ()) is None
    assert a.run(m.NUM_KEYS) == 3


def test_list_keys_by_prefix(a: Handle) -> None:
    a.run(m.MULTI_SET, (b"a/1", b"a/2", b"b/1"), (b"", b"", b""))
    assert sorted(a.run(m.LIST_KEYS, b"a/", b"")[1]) == [b"a/1", b"a/2"]
    assert len(a.run(m.LIST_KEYS, b"", b"")[1]) == 3


def test_queues_are_fifo_and_apart_from_keys(a: Handle) -> None:
    a.run(m.QUEUE_PUSH, b"q", b"1")
    a.run(m.QUEUE_PUSH, b"q", b"2")
    a.run(m.QUEUE_RETURN, b"q", b"0")
    assert a.run(m.QUEUE_LEN, b"q") == 3
    assert a.run(m.NUM_KEYS) == 0
    assert a.run(m.DELETE, b"q") is False
    assert a.run(m.CHECK, (b"q",)) is True
    assert a.run(m.WAIT, (b"q",), 0) is None
    assert a.ask(m.GET, b"q", 0)[1] == m.TIMEOUT  # type: ignore[index]
    assert [a.run(m.QUEUE_POP, b"q", 0) for _ in range(3)] == [b"0", b"1", b"2"]
    assert a.run(m.QUEUE_LEN, b"q") == 0
    assert a.run(m.CHECK, (b"q",)) is False
    assert a.ask(m.QUEUE_POP, b"q", 0)[1:] == (m.TIMEOUT, [b"q"])  # type: ignore[index]


@pytest.mark.parametrize(
    "arrival",
    [
        (m.SET, b"k", b"7"),
        (m.ADD, b"k", 7),
        (m.APPEND, b"k", b"7"),
        (m.COMPARE_SET, b"k", b"", b"7"),
        (m.MULTI_SET, (b"other", b"k"), (b"", b"7")),
    ],
)
def test_every_way_to_make_a_key_wakes_all_who_wait(a: Handle, b: Handle, arrival: tuple[Any, ...]) -> None:
    assert a.ask(m.GET, b"k", None) is None
    assert a.ask(m.WAIT, (b"k",), None) is None
    assert b.ask(m.MULTI_GET, (b"k", b"k"), None) is None
    b.ask(*arrival)
    assert a.taken() == [(m.OK, b"7"), (m.OK, None)]
    assert b.taken() == [(m.OK, [b"7", b"7"])]
    assert a.engine.waiter_count == 0


def test_a_failed_compare_set_wakes_nobody(a: Handle, b: Handle) -> None:
    assert a.ask(m.GET, b"k", None) is None
    b.run(m.COMPARE_SET, b"k", b"foo", b"bar")
    assert a.taken() == []


def test_a_waiter_needs_all_keys_at_one_moment(a: Handle, b: Handle) -> None:
    assert a.ask(m.MULTI_GET, (b"x", b"y"), None) is None
    b.run(m.SET, b"x", b"1")
    b.run(m.DELETE, b"x")
    b.run(m.SET, b"y", b"2")
    assert a.taken() == []
    b.run(m.SET, b"x", b"3")
    assert a.taken() == [(m.OK, [b"3", b"2"])]


def test_a_wait_on_a_queue_and_a_key_is_woken_by_either_last(a: Handle, b: Handle) -> None:
    b.run(m.QUEUE_PUSH, b"q", b"1")
    assert a.ask(m.WAIT, (b"q", b"k"), None) is None
    b.run(m.SET, b"k", b"")
    assert a.taken() == [(m.OK, None)]
    b.run(m.QUEUE_POP, b"q", 0)
    assert a.ask(m.WAIT, (b"k", b"q"), None) is None
    assert a.ask(m.GET, b"q", None) is None
    b.run(m.QUEUE_PUSH, b"q", b"1")
    assert a.taken() == [(m.OK, None)]  # the get still waits: a queue is no key


def test_a_push_wakes_one_pop_and_in_order_of_asking(engine: StoreEngine, a: Handle) -> None:
    handles = [Handle(engine) for _ in range(3)]
    for handle in handles:
        assert handle.ask(m.QUEUE_POP, b"q", None) is None
    for item in (b"1", b"2"):
        a.run(m.QUEUE_PUSH, b"q", item)
    assert [handle.taken() for handle in handles] == [[(m.OK, b"1")], [(m.OK, b"2")], []]
    assert a.run(m.QUEUE_LEN, b"q") == 0
    handles[0].run(m.SET, b"other", b"")
    a.run(m.QUEUE_PUSH, b"q", b"3")
    assert handles[0].taken() == []
    assert handles[2].taken() == [(m.OK, b"3")]


def test_time_outs_come_in_order_and_name_the_missing_keys(engine: StoreEngine, a: Handle, b: Handle) -> None:
    b.run(m.SET, b"x", b"")
    assert a.ask(m.WAIT, (b"x", b"y", b"z"), 2000) is None
    assert a.ask(m.GET, b"y", 1000) is None
    assert a.ask(m.QUEUE_POP, b"q", 3000) is None
    assert a.ask(m.GET, b"never", None) is None
    assert engine.next_deadline() == 1.0
    engine.expire(0.999)
    assert a.taken() == []
    engine.expire(1.0)
    assert a.taken() == [(m.TIMEOUT, [b"y"])]
    assert engine.next_deadline() == 2.0
    engine.expire(10.0)
    assert a.taken() == [(m.TIMEOUT, [b"y", b"z"]), (m.TIMEOUT, [b"q"])]
    assert engine.next_deadline() is None
    assert engine.waiter_count == 1


def test_an_expired_or_cancelled_pop_takes_no_item(engine: StoreEngine, a: Handle, b: Handle) -> None:
    a.ask(m.QUEUE_POP, b"q", 1000)
    a.ask(m.QUEUE_POP, b"q", None)
    engine.expire(1.0)
    assert a.run(m.CANCEL, 2) is True
    b.run(m.QUEUE_PUSH, b"q", b"1")
    assert b.run(m.QUEUE_LEN, b"q") == 1


def test_cancel_answers_the_withdrawn_request_first(a: Handle, b: Handle) -> None:
    a.ask(m.GET, b"k", None)
    assert b.run(m.CANCEL, 1) is False  # ids belong to their client
    assert a.ask(m.CANCEL, 1) == (2, m.OK, True)
    assert a.late[0][:2] == (1, m.CANCELLED)
    a.taken()
    assert a.run(m.CANCEL, 1) is False
    b.run(m.SET, b"k", b"")
    assert a.taken() == []


def test_a_reported_time_out_names_at_most_a_hundred_keys(a: Handle) -> None:
    keys = tuple(b"%d" % i for i in range(m.MAX_MISSING_REPORTED + 1))
    assert len(a.ask(m.WAIT, keys[:-1], 0)[2]) == m.MAX_MISSING_REPORTED  # type: ignore[index]
    assert len(a.ask(m.WAIT, keys, 0)[2]) == m.MAX_MISSING_REPORTED  # type: ignore[index]


def test_namespaces_never_meet(engine: StoreEngine, a: Handle) -> None:
    other = Handle(engine, "other")
    a.run(m.SET, b"k", b"a")
    assert other.ask(m.GET, b"k", None) is None
    other.run(m.SET, b"k", b"o")
    assert a.run(m.GET, b"k", 0) == b"a"
    a.run(m.QUEUE_PUSH, b"q", b"")
    assert a.run(m.DELETE_NAMESPACE) == 2
    assert a.run(m.NUM_KEYS) == 0
    assert other.run(m.NUM_KEYS) == 1


def test_waiters_survive_the_deletion_of_their_namespace(a: Handle, b: Handle) -> None:
    a.ask(m.GET, b"k", None)
    b.run(m.DELETE_NAMESPACE)
    b.run(m.SET, b"k", b"v")
    assert a.taken() == [(m.OK, b"v")]


def test_all_memory_is_given_back(engine: StoreEngine, a: Handle) -> None:
    a.run(m.SET, b"k", b"v" * 100)
    a.run(m.SET, b"k", b"v" * 10)
    a.run(m.ADD, b"n", 1)
    a.run(m.APPEND, b"k", b"more")
    for item in (b"1", b"2", b"3"):
        a.run(m.QUEUE_PUSH, b"q", item)
    a.run(m.QUEUE_POP, b"q", 0)
    a.ask(m.WAIT, (b"never", b"k"), 5000)
    a.ask(m.QUEUE_POP, b"never", None)
    assert engine.memory_bytes > 0
    a.run(m.DELETE, b"n")
    a.run(m.DELETE_NAMESPACE)
    engine.close(a.client, 0.0)
    engine.close(a.client, 0.0)
    assert engine.memory_bytes == 0
    assert engine.next_deadline() is None
    assert engine.statistics() == dict.fromkeys(engine.statistics(), 0)


def test_a_namespace_outlives_its_clients_while_it_holds_keys(engine: StoreEngine, a: Handle) -> None:
    a.run(m.SET, b"k", b"v")
    engine.close(a.client, 0.0)
    assert Handle(engine).run(m.GET, b"k", 0) == b"v"


def limited(**limits: int) -> Handle:
    return Handle(StoreEngine(b"i" * 16, Limits()._replace(**limits)))


def test_keys_at_the_limit_and_one_past_it() -> None:
    a = limited(key_bytes=4)
    a.run(m.MULTI_SET, (b"1234",), (b"",))
    a.run(m.QUEUE_PUSH, b"1234", b"")
    assert a.run(m.CHECK, (b"1234",)) is True
    for request in (
        (m.SET, b"12345", b""),
        (m.ADD, b"12345", 1),
        (m.APPEND, b"12345", b""),
        (m.COMPARE_SET, b"12345", b"", b""),
        (m.MULTI_SET, (b"1", b"12345"), (b"", b"")),
        (m.QUEUE_PUSH, b"12345", b""),
        (m.GET, b"12345", None),
        (m.WAIT, (b"1234", b"12345"), None),
        (m.CHECK, (b"12345",)),
        (m.MULTI_GET, (b"12345",), None),
        (m.QUEUE_POP, b"12345", None),
    ):
        assert "5 bytes, allowed are 4" in a.refused(m.LIMIT, *request)
    assert a.run(m.NUM_KEYS) == 1


def test_values_at_the_limit_and_one_past_it() -> None:
    a = limited(value_bytes=4)
    a.run(m.SET, b"k", b"1234")
    a.run(m.QUEUE_PUSH, b"q", b"1234")
    a.run(m.SET, b"p", b"123")
    a.run(m.APPEND, b"p", b"4")
    for request in (
        (m.SET, b"k", b"12345"),
        (m.COMPARE_SET, b"k", b"1234", b"12345"),
        (m.MULTI_SET, (b"1", b"2"), (b"", b"12345")),
        (m.QUEUE_PUSH, b"q", b"12345"),
        (m.APPEND, b"p", b"5"),
    ):
        assert "5 bytes" in a.refused(m.LIMIT, *request)
    assert a.run(m.GET, b"k", 0) == a.run(m.GET, b"p", 0) == b"1234"
    assert a.run(m.NUM_KEYS) == 2


def test_keys_in_one_request_at_the_limit_and_one_past_it() -> None:
    a = limited(items=2)
    assert a.run(m.CHECK, (b"1", b"2")) is False
    a.run(m.MULTI_SET, (b"1", b"2"), (b"", b""))
    a.run(m.WAIT, (b"1", b"2"), 0)
    assert "3 keys" in a.refused(m.LIMIT, m.CHECK, (b"1", b"2", b"3"))
    assert "3 keys" in a.refused(m.LIMIT, m.WAIT, (b"1", b"2", b"3"), None)
    assert "3 keys" in a.refused(m.LIMIT, m.MULTI_SET, (b"1", b"2", b"3"), (b"", b"", b""))


def test_blocked_requests_at_the_limit_and_one_past_it() -> None:
    a = limited(waiters=2)
    b = Handle(a.engine)
    a.ask(m.GET, b"k", None)
    b.ask(m.GET, b"k", None)
    assert "2 requests are blocked" in a.refused(m.LIMIT, m.GET, b"k", None)
    a.run(m.CANCEL, 1)
    assert a.ask(m.GET, b"k", None) is None


def test_memory_at_the_limit_and_one_past_it() -> None:
    a = limited()
    a.run(m.SET, b"k", b"123")
    used = a.engine.memory_bytes
    for room, refused in ((0, False), (-1, True)):
        a = limited(memory_bytes=used + room)
        if refused:
            assert "more are needed" in a.refused(m.LIMIT, m.SET, b"k", b"123")
            assert a.engine.memory_bytes == 0
        else:
            a.run(m.SET, b"k", b"123")
            a.run(m.SET, b"k", b"12")  # what shrinks is never refused
            a.refused(m.LIMIT, m.MULTI_SET, (b"k", b"l"), (b"", b""))
            a.refused(m.LIMIT, m.QUEUE_PUSH, b"q", b"")
            a.refused(m.LIMIT, m.GET, b"x", None)
            assert a.run(m.GET, b"k", 0) == b"12"
            a.run(m.DELETE_NAMESPACE)
            assert a.engine.memory_bytes == 0


def test_replies_must_fit_into_a_frame() -> None:
    a = limited(frame_bytes=m.FRAME_SLACK_BYTES // 2 + 10)
    a.run(m.SET, b"k", b"12345")
    assert a.run(m.MULTI_GET, (b"k", b"k"), 0) == [b"12345"] * 2
    assert "15 bytes" in a.refused(m.LIMIT, m.MULTI_GET, (b"k", b"k", b"k"), 0)
    assert a.run(m.LIST_KEYS, b"", b"")[1] == [b"k"]
    a.run(m.SET, b"l", b"")
    assert a.run(m.LIST_KEYS, b"", b"") == (b"l", [b"k"])
    assert a.run(m.LIST_KEYS, b"", b"l") == (None, [b"l"])
    a.run(m.SET, b"m" * 100, b"")
    assert a.run(m.LIST_KEYS, b"", b"m") == (None, [b"m" * 100])  # a single one is never too long


@pytest.mark.parametrize(
    "request_",
    [
        (),
        (1,),
        [1, m.PING],
        None,
        (0, m.PING),
        (-1, m.PING),
        (2**63, m.PING),
        ("1", m.PING),
        (True, m.PING),
        (1, 0),
        (1, 99),
        (1, "set"),
        (1, True),
        (1, m.PING, 1),
        (1, m.SET, b"k"),
        (1, m.SET, "k", b"v"),
        (1, m.SET, b"k", "v"),
        (1, m.GET, b"k", -1),
        (1, m.GET, b"k", 1.5),
        (1, m.GET, b"k", True),
        (1, m.GET, b"k", m.MAX_TIMEOUT_MS + 1),
        (1, m.GET, 5, None),
        (1, m.ADD, b"k", b"1"),
        (1, m.ADD, b"k", True),
        (1, m.ADD, "k", 1),
        (1, m.CHECK, b"k"),
        (1, m.CHECK, (b"k", "l")),
        (1, m.WAIT, [b"k"], None),
        (1, m.WAIT, (b"k",), "1"),
        (1, m.COMPARE_SET, b"k", b"", None),
        (1, m.DELETE, None),
        (1, m.APPEND, b"k", 1),
        (1, m.MULTI_GET, (1,), None),
        (1, m.MULTI_SET, (b"k",), ()),
        (1, m.MULTI_SET, (b"k",), ("v",)),
        (1, m.MULTI_SET, (b"k",), b"v"),
        (1, m.LIST_KEYS, "", b""),
        (1, m.QUEUE_PUSH, b"q", None),
        (1, m.QUEUE_POP, "q", None),
        (1, m.QUEUE_LEN, "q"),
        (1, m.CANCEL, b"1"),
    ],
)
def test_malformed_requests_break_the_protocol_and_change_nothing(a: Handle, request_: Any) -> None:
    with pytest.raises(ProtocolError):
        a.engine.request(a.client, request_, 0.0)
    assert a.engine.memory_bytes == a.engine.waiter_count == 0


def test_the_id_of_a_blocked_request_cannot_be_used_again(a: Handle) -> None:
    a.ask(m.GET, b"k", None)
    with pytest.raises(ProtocolError, match="in use"):
        a.engine.request(a.client, (1, m.GET, b"k", None), 0.0)
    assert a.ask(m.GET, b"k", m.MAX_TIMEOUT_MS) is None


def test_expired_deadlines_are_not_counted_as_dead_ones(a: Handle) -> None:
    for number in range(3):
        a.ask(m.GET, b"k", 1000 + number)
    a.engine.expire(10.0)
    assert a.engine._state.deadlines._dead == 0


def test_many_cancelled_deadlines_do_not_pile_up(a: Handle) -> None:
    for _ in range(5000):
        a.ask(m.GET, b"k", 1000)
        a.run(m.CANCEL, a.next_id - 1)
    assert len(a.engine._state.deadlines.heap) < 2500
    assert a.engine.next_deadline() is None
