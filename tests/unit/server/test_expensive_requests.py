"""Requests that take long end a turn early: others do not wait for a thousand of them."""

from __future__ import annotations

import pytest
from server_kit import MemoryClient

from asyncdist_server import messages as m
from asyncdist_server.clients import KEY_WORK_BYTES, TURN_WORK_BYTES
from asyncdist_server.engine import StoreEngine

COUNT = 50


@pytest.fixture
def client() -> MemoryClient:
    made = MemoryClient(StoreEngine(b"i" * 16))
    made.open()
    return made


def ran_in_a_turn(client: MemoryClient, *request: object) -> int:
    """Ask `COUNT` times in one frame; return how many were answered in the first turn."""
    client.session.receive(client.frame(*[request] * COUNT), 0.0)
    first = len(client.replies(b"".join(client.session.take_output())))
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
        (m.LIST_KEYS, b"none"),
        (m.CHECK, [b"k"] * 4096),
        (m.WAIT, [b"k"] * 4096, None),
        (m.MULTI_GET, [b"k"] * 4096, None),
        (m.MULTI_SET, [b"k"] * 4096, [b""] * 4096),
    ],
)
def test_a_look_at_many_keys(client: MemoryClient, request_: tuple[object, ...]) -> None:
    client.ask(*[(m.SET, b"%d" % number, b"") for number in range(4095)], (m.SET, b"k", b""))
    assert ran_in_a_turn(client, *request_) == -(-TURN_WORK_BYTES // (KEY_WORK_BYTES * 4096))


def test_small_ones_share_a_turn(client: MemoryClient) -> None:
    client.ask((m.SET, b"k", b"1"))
    for request in ((m.APPEND, b"k", b"2"), (m.CHECK, [b"k"]), (m.LIST_KEYS, b""), (m.WAIT, [b"k"] * 10, None)):
        assert ran_in_a_turn(client, *request) == COUNT
