"""Requests that take long end a turn early: others do not wait for a thousand of them."""

from __future__ import annotations

import pytest
from server_kit import MemoryClient, everything
from torch_wire_kit import World, query

from asyncdist_server.engine.clients import KEY_WORK_BYTES, TURN_WORK_BYTES
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.torch.wire import Query
from asyncdist_server.wire import messages as m

COUNT = 50


@pytest.fixture
def client() -> MemoryClient:
    made = MemoryClient(StoreEngine(b"i" * 16))
    made.open()
    return made


def ran_in_a_turn(client: MemoryClient, *request: object) -> int:
    """Ask `COUNT` times in one frame; return how many were answered in the first turn."""
    client.session.receive(client.frame(*[request] * COUNT), 0.0)
    first = len(client.replies(everything(client.session)))
    rest = len(client.replies(client.send(b"")))
    assert first + rest == COUNT
    return first


@pytest.mark.parametrize("request_", [(m.APPEND, b"k", b""), (m.ADD, b"k", 1)])
def test_copies_of_a_large_value(client: MemoryClient, request_: tuple[object, ...]) -> None:
    client.ask((m.SET, b"k", b"x" * -(-TURN_WORK_BYTES // 10)))
    assert ran_in_a_turn(client, *request_) == 10


@pytest.mark.parametrize(
    "request_",
    [
        (m.LIST_KEYS, b"", b""),
        (m.CHECK, [b"k"] * 4096),
        (m.WAIT, [b"k"] * 4096, None),
        (m.MULTI_GET, [b"k"] * 4096, None),
        (m.MULTI_SET, [b"k"] * 4096, [b""] * 4096),
    ],
)
def test_a_look_at_many_keys(client: MemoryClient, request_: tuple[object, ...]) -> None:
    client.ask(*[(m.SET, b"%d" % number, b"") for number in range(4095)], (m.SET, b"k", b""))
    assert ran_in_a_turn(client, *request_) == -(-TURN_WORK_BYTES // (KEY_WORK_BYTES * 4096))


def test_a_listing_of_few_among_many_keys(client: MemoryClient) -> None:
    """What it takes depends on what it finds, not on what else there is."""
    few = [b"k%d" % number for number in range(10)]
    client.ask(*[(m.SET, key, b"") for key in few], *[(m.SET, b"%d" % number, b"") for number in range(8192)])
    assert client.ask((m.LIST_KEYS, b"k", b""))[0][2] == (None, tuple(few))
    assert ran_in_a_turn(client, m.LIST_KEYS, b"k", b"") == COUNT


def test_small_ones_share_a_turn(client: MemoryClient) -> None:
    client.ask((m.SET, b"k", b"1"))
    for request in ((m.APPEND, b"k", b"2"), (m.CHECK, [b"k"]), (m.LIST_KEYS, b"", b""), (m.WAIT, [b"k"] * 10, None)):
        assert ran_in_a_turn(client, *request) == COUNT


LARGE = -(-TURN_WORK_BYTES // 10)
MANY = [b"k"] * 4096


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("value", "request_", "each_turn"),
    [
        (b"x" * LARGE, query(Query.APPEND, b"k", b""), 10),
        (b"1" + b" " * LARGE, query(Query.BARRIER, b"k", COUNT + 1), 10),
        (b"", query(Query.CHECK, MANY), 8),
        (b"", query(Query.WAIT, MANY), 8),
        (b"", query(Query.MULTI_GET, MANY), 8),
    ],
    ids=["append", "barrier", "check", "wait", "multi_get"],
)
def test_those_of_torch(value: bytes, request_: bytes, each_turn: int, whole: bool) -> None:
    """Whether they come as a whole, or the first of them begins in what was received before."""
    client = World().client()
    client.ask(Query.SET, b"k", value)
    session, data = client.session, request_ * COUNT
    if not whole:
        session.receive(data[:1], 0.0)
        data = data[1:]
    session.receive(data, 0.0)
    turns = 1
    while session.busy:
        everything(session)
        session.resume(0.0)
        turns += 1
    assert not session.closing
    assert turns == -(-COUNT // each_turn)
