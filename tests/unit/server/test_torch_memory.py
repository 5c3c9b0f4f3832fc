"""What torch's clients, who prove no token, may take of the store's memory."""

from __future__ import annotations

import pytest
from engine_books import problems
from engine_user import User
from torch_wire_kit import PORT, MemoryTorchClient, World, query

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.namespace import ITEM_OVERHEAD_BYTES, KEY_OVERHEAD_BYTES, QUEUE_OVERHEAD_BYTES
from asyncdist_server.engine.waiters import WAITER_BYTES
from asyncdist_server.torch.wire import Query
from asyncdist_server.wire import messages as m

MEMORY_BYTES = 1_000_000
PERCENT = 40
SHARE_BYTES = MEMORY_BYTES * PERCENT // 100


@pytest.fixture
def world() -> World:
    return World(StoreEngine(b"i" * 16, m.Limits(memory_bytes=MEMORY_BYTES)), memory_percent=PERCENT)


def fill(client: MemoryTorchClient, leave_bytes: int) -> None:
    """Leave so many bytes of torch's share."""
    taken = client.world.namespaces.share.bytes
    client.ask(Query.SET, b"fill", bytes(SHARE_BYTES - taken - leave_bytes - KEY_OVERHEAD_BYTES - len(b"fill")))
    assert not client.session.closing
    assert client.world.namespaces.share.bytes == SHARE_BYTES - leave_bytes


CHANGES = [
    (KEY_OVERHEAD_BYTES + 2, query(Query.SET, b"k", b"v")),
    (KEY_OVERHEAD_BYTES + 2, query(Query.ADD, b"k", 1)),
    (KEY_OVERHEAD_BYTES + 2, query(Query.MULTI_SET, 1, b"k", b"v")),
    (ITEM_OVERHEAD_BYTES + QUEUE_OVERHEAD_BYTES + 2, query(Query.QUEUE_PUSH, b"k", b"v")),
    (WAITER_BYTES + 48 + 1, query(Query.WAIT, [b"k"])),
]


@pytest.mark.parametrize(("needed_bytes", "change"), CHANGES, ids=["set", "add", "multi_set", "queue", "wait"])
def test_at_the_share_and_one_past_it(world: World, needed_bytes: int, change: bytes) -> None:
    native = User(world.engine, b"native")
    client = world.client()
    fill(client, needed_bytes)
    client.send(change)
    assert not client.session.closing
    assert world.namespaces.share.bytes == SHARE_BYTES
    assert problems(world.engine) == []
    other = world.client(PORT + 1)  # a port of its own takes of the same share
    other.send(query(Query.SET, b"x", b""))
    assert "--torch-memory-percent" in other.session.error
    client.leave()
    assert world.namespaces.share.bytes == 0
    client = world.client()
    fill(client, needed_bytes - 1)
    client.send(change)
    assert f"of at most {SHARE_BYTES} bytes (a daemon's --torch-memory-percent)" in client.session.error
    assert problems(world.engine) == []
    rest = MEMORY_BYTES - world.engine.memory_bytes - KEY_OVERHEAD_BYTES - 1
    native.ask(m.SET, b"k", bytes(rest))  # the members of native jobs have the rest, to the last byte
    native.ask(m.DELETE, b"k")
    client.leave()
    native.ask(m.SET, b"k", bytes(rest))  # and all of it


def test_an_item_that_was_popped_and_not_read_counts(world: World) -> None:
    client = world.client()
    client.ask(Query.QUEUE_PUSH, b"q", bytes(1000))
    client.ask(Query.QUEUE_POP, b"q")
    assert world.namespaces.share.bytes == 1001
    assert problems(world.engine) == []
    client.leave()
    assert world.namespaces.share.bytes == 0


def test_unfinished_input(world: World) -> None:
    """It is bounded apart from what is stored; who sends on beyond the bound is cut off."""
    begun = query(Query.SET, b"k", bytes(SHARE_BYTES // 2))[:-1]
    clients = [world.client() for _ in range(3)]
    clients[0].send(begun)
    rest = SHARE_BYTES - clients[0].session.buffered
    clients[1].send(query(Query.SET, b"k", bytes(SHARE_BYTES))[: rest + 1])
    assert world.namespaces.input_bytes == SHARE_BYTES  # the first byte of a request is read at once
    assert not any(client.session.closing for client in clients)
    clients[2].send(query(Query.SET, b"k", b"v")[:-1])  # a small one is no part of the trouble
    assert not clients[2].session.closing
    clients[1].send(b"x")
    assert "unfinished input" in clients[1].session.error
    assert clients[1].session.cause == "memory"
    clients[0].send(b"x")
    assert not clients[0].session.closing
    for client in clients:
        client.leave()
    assert world.namespaces.input_bytes == 0
