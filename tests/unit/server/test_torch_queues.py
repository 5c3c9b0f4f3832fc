"""Queues of torch's store: for whom an item is kept, and where it goes if its client ends without having read it."""

from __future__ import annotations

import pytest
from engine_books import problems
from torch_wire_kit import CANCELED, WAITED, World, blob, number, query

from asyncdist_server.engine.leases import STALL_S
from asyncdist_server.torch.namespaces import CLAIM_S
from asyncdist_server.torch.wire import Query


def test_an_item_wakes_one_client_and_is_kept_for_it() -> None:
    world = World()
    first, second, thief = world.client(), world.client(), world.client()
    for client in (first, second):
        assert client.ask(Query.WAIT, [b"/q"]) == b""
    thief.ask(Query.QUEUE_PUSH, b"/q", b"1")
    assert (first.heard(), second.heard()) == (WAITED, b"")
    assert thief.ask(Query.QUEUE_LEN, b"/q") == number(1)
    assert thief.ask(Query.QUEUE_POP, b"/q") == number(0)
    assert first.ask(Query.QUEUE_POP, b"/q") == number(1) + blob(b"1")
    thief.ask(Query.QUEUE_PUSH, b"/q", b"2")
    assert second.heard() == WAITED


def test_an_item_that_is_there_is_kept_too() -> None:
    world = World()
    first, second = world.client(), world.client()
    first.ask(Query.QUEUE_PUSH, b"/q", b"1")
    assert first.ask(Query.WAIT, [b"/q"]) == WAITED
    assert second.ask(Query.WAIT, [b"/q"]) == b""
    assert first.ask(Query.QUEUE_POP, b"/q") == number(1) + blob(b"1")
    first.ask(Query.QUEUE_PUSH, b"/q", b"2")
    assert second.heard() == WAITED


def test_items_that_were_popped_and_never_sent_go_back_in_their_order() -> None:
    """A client that reads too slowly is not given the output its pops made; it closes before it is."""
    world = World()
    first, second = world.client(), world.client()
    for item in (b"1", b"2", b"3"):
        first.ask(Query.QUEUE_PUSH, b"/q", item)
    assert first.ask(Query.QUEUE_POP, b"/q") == number(3) + blob(b"1")  # taken: it is on its way
    first.session.receive(query(Query.QUEUE_POP, b"/q") * 2, 0.0)
    assert second.ask(Query.WAIT, [b"/q"]) == b""
    first.session.close(0.0)
    assert second.heard() == WAITED
    assert second.ask(Query.QUEUE_POP, b"/q") == number(2) + blob(b"2")
    assert second.ask(Query.QUEUE_POP, b"/q") == number(1) + blob(b"3")


@pytest.mark.parametrize(
    ("meanwhile", "read"),
    [
        ("nothing", False),
        ("its output is looked for", False),
        ("it gets", True),
        ("it sets", True),
        ("it waits", True),
        ("it pops", True),
    ],
)
@pytest.mark.parametrize("unread", [False, True])
def test_an_item_goes_back_if_its_client_ends_without_having_read_it(meanwhile: str, read: bool, unread: bool) -> None:
    """It has read what it was sent before it asks for more, whether that has an answer or not."""
    world = World()
    first, second = world.client(), world.client()
    for item in (b"1", b"2", b"3"):
        second.ask(Query.QUEUE_PUSH, b"/q", item)
    before = world.engine.memory_bytes
    assert first.ask(Query.QUEUE_POP, b"/q") == number(3) + blob(b"1")
    assert problems(world.engine) == []
    assert world.engine.state.remembered_bytes == len(b"/q1")
    if meanwhile == "its output is looked for":  # as when the client has read what filled the daemon's buffer
        assert first.heard() == b""
    elif meanwhile == "it gets":
        first.ask(Query.GET, b"/k")
    elif meanwhile == "it sets":
        first.ask(Query.SET, b"/k", b"")
    elif meanwhile == "it waits":
        first.ask(Query.WAIT, [b"/k"])
    elif meanwhile == "it pops":
        assert first.ask(Query.QUEUE_POP, b"/q") == number(2) + blob(b"2")
    assert world.engine.state.remembered_bytes == (0 if read and meanwhile != "it pops" else len(b"/q1"))
    first.session.popped.unread = unread
    first.leave()
    assert problems(world.engine) == []
    assert world.engine.state.remembered_bytes == 0
    expected = [b"2", b"3"] if meanwhile != "it pops" else [b"2", b"3"] if unread else [b"3"]
    if unread and not read:
        expected = [b"1", b"2", b"3"]
        assert world.engine.memory_bytes == before
    for index, item in enumerate(expected):
        assert second.ask(Query.QUEUE_POP, b"/q") == number(len(expected) - index) + blob(item)
    assert second.ask(Query.QUEUE_LEN, b"/q") == number(0)


@pytest.mark.parametrize("how", ["asks for something else", "leaves", "does nothing", "waits again"])
def test_an_item_that_is_not_fetched_goes_to_the_next(how: str) -> None:
    world = World()
    first, second = world.client(), world.client()
    for client in (first, second):
        client.ask(Query.WAIT, [b"/q"])
    pusher = world.client()
    pusher.ask(Query.QUEUE_PUSH, b"/q", b"1")
    assert first.heard() == WAITED
    if how == "asks for something else":
        first.ask(Query.GET, b"/k")
    elif how == "leaves":
        first.leave()
    elif how == "waits again":
        assert first.ask(Query.WAIT, [b"/q"]) == b""
    else:
        world.advance(CLAIM_S / 2)
        assert second.heard() == b""
        assert world.namespaces.next_deadline() == CLAIM_S
        world.advance(CLAIM_S / 2)
    assert second.heard() == WAITED
    assert second.ask(Query.QUEUE_POP, b"/q") == number(1) + blob(b"1")
    assert world.namespaces.next_deadline() is None


def test_a_daemon_that_was_stopped_hears_first_who_fetches_its_item() -> None:
    """Else a blocking pop ends with an error, for a queue that has the item."""
    world = World()
    first, second, pusher = (world.client() for _ in range(3))
    for client in (first, second):
        client.ask(Query.WAIT, [b"/q"])
    pusher.ask(Query.QUEUE_PUSH, b"/q", b"1")
    assert first.heard() == WAITED
    world.now = 30.0
    world.namespaces.expire(world.now, world.now - CLAIM_S)
    assert second.heard() == b""
    assert first.ask(Query.QUEUE_POP, b"/q") == number(1) + blob(b"1")
    pusher.ask(Query.QUEUE_PUSH, b"/q", b"2")
    assert second.heard() == WAITED
    world.namespaces.expire(60.0, STALL_S + 0.1)
    world.namespaces.expire(60.0 + STALL_S + 0.1)
    assert first.ask(Query.QUEUE_POP, b"/q") == number(1) + blob(b"2"), "its time was over"


def test_two_items_wake_two_clients() -> None:
    world = World()
    clients = [world.client() for _ in range(3)]
    for client in clients:
        client.ask(Query.WAIT, [b"/q"])
    pusher = world.client()
    pusher.send(query(Query.QUEUE_PUSH, b"/q", b"1") + query(Query.QUEUE_PUSH, b"/q", b"2"))
    assert [client.heard() for client in clients] == [WAITED, WAITED, b""]


def test_a_value_ends_the_wait_for_a_queue_of_that_name() -> None:
    world = World()
    waiting, other = world.client(), world.client()
    waiting.ask(Query.WAIT, [b"/q"])
    other.ask(Query.SET, b"/q", b"v")
    assert waiting.heard() == WAITED
    other.ask(Query.QUEUE_PUSH, b"/q", b"1")
    assert waiting.heard() == b""
    assert other.ask(Query.QUEUE_POP, b"/q") == number(1) + blob(b"1")


def test_a_wait_that_was_cancelled_takes_no_item() -> None:
    world = World()
    first, second, other = world.client(), world.client(), world.client()
    first.ask(Query.WAIT, [b"/q"])
    second.ask(Query.WAIT, [b"/q"])
    assert first.ask(Query.CANCEL_WAIT) == CANCELED
    other.ask(Query.QUEUE_PUSH, b"/q", b"1")
    assert (first.heard(), second.heard()) == (b"", WAITED)


def test_who_waits_for_many_queues_at_once_keeps_one_item() -> None:
    """A chain of clients, each with an item of one queue and waiting for another, is no chain of calls."""
    world = World()
    clients = [world.client() for _ in range(600)]
    for i, client in enumerate(clients):
        own = b"/q%d" % (i + 1)
        assert client.ask(Query.WAIT, [b"/q%d" % i]) == b""
        assert client.send(query(Query.QUEUE_PUSH, own, b"1") + query(Query.WAIT, [own])) == WAITED
    world.client().ask(Query.QUEUE_PUSH, b"/q0", b"1")
    assert clients[0].heard() == WAITED
    for client in clients:
        client.leave()
