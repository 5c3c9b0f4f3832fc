"""Torch's store as its clients see it, and none of the faults of torch's own servers."""

from __future__ import annotations

import pytest
from torch_wire_kit import CANCELED, VALIDATE, WAITED, MemoryTorchClient, World, blob, number, query

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.replies import PIECE_BYTES
from asyncdist_server.engine.session import TURN_BYTES, TURN_REQUESTS
from asyncdist_server.torch.namespaces import MAX_JOBS
from asyncdist_server.torch.wire import MAX_VECTOR_KEYS, Query
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.messages import Limits

MISSING = blob(b"")


def test_compare_set_answers_what_torch_answers() -> None:
    client = World().client()
    for expected, desired, answer in (
        (b"x", b"a", b"x"),  # missing: nothing is stored, and the answer is what was expected
        (b"", b"a", b"a"),
        (b"", b"b", b"a"),
        (b"a", b"b", b"b"),
        (b"a", b"c", b"b"),
        (b"b", b"", b""),
        (b"", b"z", b"z"),  # present and empty
    ):
        assert client.ask(Query.COMPARE_SET, b"/k", expected, desired) == blob(answer)


@pytest.mark.parametrize(
    ("stored", "amount", "total"),
    [
        (b" 12", 1, 13),
        (b"12abc", 1, 13),
        (b"+3", 0, 3),
        (b"0x10", 0, 0),
        (b"1.9", 1, 2),
        (b"-5", 5, 0),
        (b"9223372036854775807", 1, -(2**63)),
        (b"-9223372036854775808", -1, 2**63 - 1),
        (b"9223372036854775807", 2**63 - 1, -2),
    ],
)
def test_add_reads_numbers_as_c_does_and_wraps(stored: bytes, amount: int, total: int) -> None:
    client = World().client()
    client.ask(Query.SET, b"/n", stored)
    assert client.ask(Query.ADD, b"/n", amount) == number(total)
    assert client.ask(Query.GET, b"/n") == blob(b"%d" % total)


@pytest.mark.parametrize("stored", [b"abc", b"", b"9223372036854775808"])
@pytest.mark.parametrize("kind", [Query.ADD, Query.BARRIER])
def test_what_is_no_number_closes_the_connection(stored: bytes, kind: Query) -> None:
    client = World().client()
    client.ask(Query.SET, b"/n", stored)
    assert client.ask(kind, b"/n", 2) == b""
    assert client.session.closing
    assert "number" in client.session.error


def test_missing_keys_are_empty_texts() -> None:
    client = World().client()
    client.ask(Query.SET, b"/a", b"1")
    assert client.ask(Query.GET, b"/nope") == MISSING
    assert client.ask(Query.MULTI_GET, [b"/a", b"/nope", b"/a"]) == blob(b"1") + MISSING + blob(b"1")
    assert client.ask(Query.MULTI_GET, []) == b""


def test_a_large_value_is_referred_to_and_said_in_pieces() -> None:
    client = World().client()
    value = bytes(range(256)) * 400
    client.ask(Query.SET, b"/k", value)
    stored = client.session.stored.values[b"/k"]
    client.session.receive(query(Query.GET, b"/k") + query(Query.CHECK, [b"/k"]), 0.0)
    assert client.session.reply_bytes == 8 + len(value) + 1
    said = b""
    while client.session.has_output:
        assert client.session.waiting_values()[-2] is stored or len(said) > len(value)
        piece = b"".join(client.session.take_output())
        assert 0 < len(piece) <= PIECE_BYTES
        said += piece
    assert said == blob(value) + b"\0"
    assert client.session.reply_bytes == 0


def test_multi_set_is_all_or_nothing() -> None:
    world = World(StoreEngine(b"i" * 16, Limits(memory_bytes=5000)))
    client, witness = world.client(), world.client()
    pairs = blob(b"/a") + blob(b"1") + blob(b"/b") + blob(bytes(6000))
    client.send(bytes([Query.MULTI_SET]) + number(2) + pairs)
    assert client.session.closing
    assert witness.ask(Query.GETNUMKEYS) == number(0)


# ---- faults of torch's servers


def test_compare_set_that_stores_nothing_wakes_nobody() -> None:
    world = World()
    waiting, other = world.client(), world.client()
    assert waiting.ask(Query.WAIT, [b"/k"]) == b""
    other.ask(Query.COMPARE_SET, b"/k", b"foo", b"bar")
    assert waiting.notices == 0
    assert waiting.heard() == b""
    other.ask(Query.COMPARE_SET, b"/k", b"", b"bar")
    assert waiting.notices == 1
    assert waiting.heard() == WAITED


def test_a_wait_ends_only_while_all_keys_are_there() -> None:
    world = World()
    waiting, other = world.client(), world.client()
    assert waiting.ask(Query.WAIT, [b"/a", b"/b"]) == b""
    other.ask(Query.SET, b"/a", b"1")
    other.ask(Query.DELETE_KEY, b"/a")
    other.ask(Query.SET, b"/b", b"1")
    assert waiting.heard() == b""
    other.ask(Query.SET, b"/a", b"2")
    assert waiting.heard() == WAITED


def test_a_client_that_popped_is_not_woken_by_later_pushes() -> None:
    world = World()
    popper, other = world.client(), world.client()
    assert popper.ask(Query.WAIT, [b"/q"]) == b""
    other.ask(Query.QUEUE_PUSH, b"/q", b"1")
    assert popper.heard() == WAITED
    assert popper.ask(Query.QUEUE_POP, b"/q") == number(1) + blob(b"1")
    assert popper.ask(Query.WAIT, [b"/other"]) == b""
    other.ask(Query.QUEUE_PUSH, b"/q", b"2")
    assert popper.heard() == b""


def test_a_wait_for_a_full_queue_and_a_missing_key_ends_with_the_key() -> None:
    world = World()
    waiting, other = world.client(), world.client()
    other.ask(Query.QUEUE_PUSH, b"/q", b"1")
    assert waiting.ask(Query.WAIT, [b"/q", b"/k"]) == b""
    other.ask(Query.SET, b"/k", b"1")
    assert waiting.heard() == WAITED
    assert waiting.ask(Query.WAIT, [b"/k", b"/q2"]) == b""
    other.ask(Query.QUEUE_PUSH, b"/q2", b"1")
    assert waiting.heard() == WAITED


# ---- barriers


def test_a_barrier_may_be_used_again() -> None:
    world = World()
    first, second = world.client(), world.client()
    for arrivals in (2, 4, 6):
        assert first.ask(Query.BARRIER, b"/b", 2) == b""
        assert second.ask(Query.BARRIER, b"/b", 2) == WAITED
        assert first.heard() == WAITED
        assert first.ask(Query.GET, b"/b") == blob(b"%d" % arrivals)


def test_a_set_of_its_key_does_not_open_a_barrier() -> None:
    world = World()
    first, second = world.client(), world.client()
    assert first.ask(Query.BARRIER, b"/b", 2) == b""
    second.ask(Query.SET, b"/b", b"7")
    second.ask(Query.SET, b"barrier /b", b"7")  # what the engine shows of those who wait in it
    assert first.heard() == b""
    assert second.ask(Query.BARRIER, b"/b", 2) == WAITED
    assert first.heard() == WAITED
    assert second.ask(Query.GET, b"/b") == blob(b"9")


def test_a_wait_for_its_key_ends_with_the_barrier() -> None:
    world = World()
    first, second, watcher = world.client(), world.client(), world.client()
    assert watcher.ask(Query.WAIT, [b"/b"]) == b""
    first.ask(Query.BARRIER, b"/b", 2)
    assert watcher.heard() == b""
    second.ask(Query.BARRIER, b"/b", 2)
    assert watcher.heard() == WAITED


@pytest.mark.parametrize("leaves", [False, True])
def test_who_gave_up_is_not_counted(leaves: bool) -> None:
    world = World()
    first, second, third = world.client(), world.client(), world.client()
    first.ask(Query.BARRIER, b"/b", 2)
    if leaves:
        first.leave()
    else:
        assert first.ask(Query.CANCEL_WAIT) == CANCELED
    assert second.ask(Query.BARRIER, b"/b", 2) == b""
    assert third.ask(Query.BARRIER, b"/b", 2) == WAITED
    assert second.heard() == WAITED
    assert third.ask(Query.GET, b"/b") == blob(b"3")


def test_who_gave_up_beside_others_is_not_counted() -> None:
    world = World()
    clients = [world.client() for _ in range(4)]
    for client in clients[:2]:
        client.ask(Query.BARRIER, b"/b", 3)
    clients[0].leave()
    assert clients[2].ask(Query.BARRIER, b"/b", 3) == b""
    assert clients[3].ask(Query.BARRIER, b"/b", 3) == WAITED
    assert clients[1].heard() + clients[2].heard() == 2 * WAITED
    assert clients[3].ask(Query.GET, b"/b") == blob(b"4")


@pytest.mark.parametrize("leaves", [False, True])
def test_who_gives_up_a_barrier_and_waits_for_its_key_at_once(leaves: bool) -> None:
    client = World().client()
    assert client.send(query(Query.BARRIER, b"/b", 2) + query(Query.WAIT, [b"/b"])) == b""
    if leaves:
        client.leave()
    else:
        assert client.ask(Query.CANCEL_WAIT) == WAITED + CANCELED


@pytest.mark.parametrize("world_size", [1, 0, -1])
def test_a_barrier_of_one_passes(world_size: int) -> None:
    assert World().client().ask(Query.BARRIER, b"/b", world_size) == WAITED


def test_barriers_count_as_blocked_requests() -> None:
    world = World(StoreEngine(b"i" * 16, Limits(waiters=1)))
    first, second = world.client(), world.client()
    first.ask(Query.BARRIER, b"/b", 9)
    assert world.engine.waiter_count == 1
    second.ask(Query.BARRIER, b"/b", 9)
    assert second.session.closing
    second.leave()
    assert not first.session.closing
    first.leave()
    assert set(world.engine.statistics().values()) == {0}


# ---- connections


def test_cancellation_is_always_answered_and_nothing_comes_late() -> None:
    world = World()
    client, other = world.client(), world.client()
    assert client.ask(Query.CANCEL_WAIT) == CANCELED
    assert client.ask(Query.WAIT, [b"/k"]) == b""
    assert client.ask(Query.CANCEL_WAIT) == CANCELED
    other.ask(Query.SET, b"/k", b"1")
    assert client.heard() == b""
    assert client.ask(Query.WAIT, [b"/k"]) == WAITED
    assert client.ask(Query.CANCEL_WAIT) == CANCELED


def test_a_connection_that_goes_takes_its_waits_along() -> None:
    world = World()
    client, other = world.client(), world.client()
    client.ask(Query.WAIT, [b"/k", b"/l"])
    client.ask(Query.BARRIER, b"/b", 3)
    assert world.engine.waiter_count == 2
    client.leave()
    client.leave()
    assert world.engine.waiter_count == 0
    other.leave()
    assert set(world.engine.statistics().values()) == {0}


def test_requests_behind_a_wait_are_run() -> None:
    client = World().client()
    ping = bytes([Query.PING]) + b"abcd"
    assert client.send(query(Query.WAIT, [b"/k"]) + ping + query(Query.SET, b"/k", b"1") + ping) == b"abcd\0abcd"


@pytest.mark.parametrize(
    "first",
    [
        b"\x00\xce\xf7\x85\x3d",
        b"\x01",
        bytes([Query.PING]) + b"abcd",
        query(Query.GETNUMKEYS),
        b"\xff",
        VALIDATE + VALIDATE,
        VALIDATE + b"\x13",
    ],
)
def test_what_no_client_says_closes_the_connection(first: bytes) -> None:
    world = World()
    client = MemoryTorchClient(world)
    for byte in first:
        client.send(bytes([byte]))
    assert client.session.closing
    assert client.session.error
    client.leave()
    assert set(world.engine.statistics().values()) == {0}


def test_a_wait_on_as_many_keys_as_torch_takes() -> None:
    world = World()
    client, other = world.client(), world.client()
    keys = [b"/%d" % i for i in range(MAX_VECTOR_KEYS)]
    assert client.ask(Query.CHECK, keys) == b"\x01"
    assert client.ask(Query.WAIT, keys) == b""
    pairs = b"".join(blob(key) + blob(b"1") for key in keys)
    other.send(bytes([Query.MULTI_SET]) + number(len(keys)) + pairs)
    assert client.heard() == WAITED
    assert client.ask(Query.MULTI_GET, keys) == blob(b"1") * len(keys)
    assert client.ask(Query.LIST_KEYS)[:8] == number(len(keys))


def test_a_reply_beyond_a_frame_closes_the_connection() -> None:
    limits = Limits(frame_bytes=2 << 20, value_bytes=1 << 20)
    world = World(StoreEngine(b"i" * 16, limits))
    client = world.client()
    client.ask(Query.SET, b"/k", bytes(1 << 19))
    client.ask(Query.SET, b"/one", b"1")
    assert len(client.ask(Query.MULTI_GET, [b"/k"] * 4 + [b"/nope"])) == 4 * ((1 << 19) + 8) + 8
    assert client.ask(Query.MULTI_GET, [b"/k"] * 4 + [b"/one"]) == b""
    assert client.session.closing


def test_a_segment_that_looks_like_a_request_may_be_the_middle_of_another() -> None:
    client = World().client()
    inner = query(Query.SET, b"/other", b"1")
    outer = query(Query.SET, b"/k", inner)
    assert client.send(outer[: -len(inner)]) == b""
    assert client.send(inner) == b""
    assert client.ask(Query.GET, b"/k") == blob(inner)
    assert client.ask(Query.GETNUMKEYS) == number(1)


@pytest.mark.parametrize("request_", [query(Query.GETNUMKEYS), query(Query.ADD, b"/n", 1)])
def test_a_long_turn_is_cut(request_: bytes) -> None:
    """Those that are read step by step, and those that are read at once."""
    client = World().client()
    client.session.receive(request_ * TURN_REQUESTS, 0.0)
    assert not client.session.busy
    assert len(client.heard()) == 8 * TURN_REQUESTS
    client.session.receive(request_ * (TURN_REQUESTS + 476), 0.0)
    assert client.session.busy
    assert len(client.heard()) == 8 * TURN_REQUESTS
    client.session.resume(0.0)
    assert not client.session.busy
    assert len(client.heard()) == 8 * 476


def test_a_turn_ends_when_it_has_said_enough() -> None:
    client = World().client()
    client.ask(Query.SET, b"/k", bytes(TURN_BYTES // 2))
    client.session.receive(query(Query.GET, b"/k") * 3, 0.0)
    assert client.session.busy
    assert len(client.heard()) == 2 * (8 + TURN_BYTES // 2)
    client.session.resume(0.0)
    assert len(client.heard()) == 8 + TURN_BYTES // 2


def test_several_requests_at_once_up_to_one_that_is_wrong() -> None:
    client = World().client()
    set_and_check = query(Query.SET, b"/k", b"1") + query(Query.CHECK, [b"/k"])
    assert client.send(set_and_check + query(Query.GET, b"/k")[:-1]) == b"\0"
    assert client.send(b"k" + set_and_check + query(Query.APPEND, b"/n", b"x")) == blob(b"1") + b"\0"
    assert client.send(set_and_check + query(Query.ADD, b"/n", 1) + set_and_check) == b"\0"
    assert client.session.closing
    assert "number" in client.session.error


def test_native_requests_of_a_reader_change_nothing() -> None:
    world = World()
    torch = world.client()
    torch.ask(Query.SET, b"/k", b"1")
    reader = world.engine.open("torch/29500", lambda reply: None)
    reader.read_only = True
    assert world.engine.request(reader, (1, m.GET, b"/k", 0), 0.0) == (1, m.OK, b"1")
    reply = world.engine.request(reader, (2, m.SET, b"/k", b"2"), 0.0)
    assert reply is not None
    assert reply[1] == m.INVALID
    assert torch.ask(Query.GET, b"/k") == blob(b"1")


def test_a_connection_may_name_so_many_jobs() -> None:
    client = World().client()
    jobs = [b"/torch.rendezvous.%d" % i for i in range(MAX_JOBS)]
    assert client.ask(Query.CHECK, jobs) == b"\x01"
    client.ask(Query.SET, jobs[0] + b".0/x", b"1")
    assert not client.session.closing
    client.ask(Query.SET, b"/asyncdist.job.x/y", b"1")
    assert client.session.closing
    client.leave()
