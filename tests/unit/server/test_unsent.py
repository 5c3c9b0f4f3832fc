"""Large answers wait while clients have much to read; small ones do not, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncdist_server.unsent import POLL_S, POLLED, SMALL_REPLY_BYTES, Unsent

LARGE = SMALL_REPLY_BYTES + 1
LIMIT = 10 * LARGE


class Client:
    """What a connection says as soon as it may."""

    def __init__(self, world: World, size: int) -> None:
        self.world = world
        self.size = size
        self.looks = 0
        self.unread = 0
        self.hurried = 0
        self.asks()

    @property
    def unsent_bytes(self) -> int:
        self.looks += 1
        return self.unread

    @unsent_bytes.setter
    def unsent_bytes(self, size: int) -> None:
        self.unread = size

    def asks(self) -> None:
        if self.world.unsent.may_say(self, self.size):
            self.go_on()

    def hurry(self) -> None:
        self.hurried += 1

    def go_on(self) -> None:
        self.unsent_bytes += self.size
        self.world.unsent.wrote(self, self.size)


class World:
    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.timer: Callable[[], None] | None = None
        self.delay_s = 0.0
        self.unsent = Unsent(LIMIT, self.start)

    def start(self, delay_s: float, call: Callable[[], None]) -> Callable[[], None]:
        assert self.timer is None
        self.delay_s = delay_s
        self.timer = call
        return call

    def look(self) -> None:
        assert self.timer is not None
        call, self.timer = self.timer, None
        call()

    def client(self, size: int) -> Client:
        self.clients.append(Client(self, size))
        return self.clients[-1]

    @property
    def told(self) -> int:
        return sum(client.unsent_bytes > 0 for client in self.clients)


def test_at_the_limit_all_may_and_beyond_it_they_wait_in_order() -> None:
    world = World()
    clients = [world.client(LARGE) for _ in range(14)]
    assert world.told == 11  # ten are what there is room for, and one exceeds it
    world.look()
    assert world.told == 11
    clients[0].unsent_bytes = clients[1].unsent_bytes = 0
    world.look()
    assert [client.unsent_bytes > 0 for client in clients[2:]] == [True] * 11 + [False]
    clients[2].unsent_bytes = 0
    world.look()
    assert clients[13].unsent_bytes
    assert world.timer is None


def test_what_was_read_meanwhile_does_not_count() -> None:
    world = World()
    for _ in range(100):
        world.client(LARGE).unsent_bytes = 0
    assert not world.unsent.waiting


def test_small_answers_do_not_wait_unless_their_client_reads_none() -> None:
    world = World()
    for _ in range(12):
        world.client(LARGE)
    small = world.client(SMALL_REPLY_BYTES)
    assert small.unsent_bytes == SMALL_REPLY_BYTES
    small.asks()
    assert small.unsent_bytes == 2 * SMALL_REPLY_BYTES
    small.asks()
    assert small.unsent_bytes == 2 * SMALL_REPLY_BYTES
    assert small in world.unsent.waiting


def test_one_that_is_gone_is_not_told() -> None:
    world = World()
    clients = [world.client(LARGE) for _ in range(12)]
    for client in clients:
        world.unsent.forget(client)
    world.look()
    assert clients[11].unsent_bytes == 0
    assert world.timer is None


def test_small_answers_fill_the_room_to_the_limit_and_no_further() -> None:
    """A great many clients that read none of theirs may not exhaust the memory with them."""
    world = World()
    clients = [world.client(SMALL_REPLY_BYTES) for _ in range(4)]
    fitting = LIMIT // SMALL_REPLY_BYTES
    for number in range(len(clients), fitting + 1):  # the last of these exceeds it
        clients[number % len(clients)].asks()
        assert not world.unsent.waiting
    for client in clients:
        client.asks()
    assert world.unsent.count() == (fitting + 1) * SMALL_REPLY_BYTES
    assert list(world.unsent.waiting) == clients
    assert world.client(SMALL_REPLY_BYTES).unsent_bytes  # one that has read all but so much does not wait


def test_who_has_much_to_read_is_hurried_while_others_wait() -> None:
    world = World()
    clients = [world.client(LARGE) for _ in range(10)]
    small = world.client(SMALL_REPLY_BYTES)
    clients += [world.client(LARGE) for _ in range(2)]
    assert not any(client.hurried for client in clients)
    world.look()
    assert [client.hurried for client in clients] == [1] * 10 + [0] * 2
    assert not small.hurried


def test_who_has_read_all_is_not_looked_at() -> None:
    """Thousands of idle connections cost nothing while somebody waits."""
    world = World()
    idle = [world.client(1) for _ in range(100)]
    for client in idle:
        client.unsent_bytes = 0
    for _ in range(12):
        world.client(LARGE)
    world.look()
    looks = sum(client.looks for client in idle)
    for _ in range(10):
        world.look()
    assert sum(client.looks for client in idle) == looks


@pytest.mark.parametrize("clients", [POLLED, 3 * POLLED])
def test_where_many_have_something_to_read_they_are_looked_at_less_often(clients: int) -> None:
    world = World()
    for _ in range(clients):
        world.client(1)
        world.clients[-1].unsent_bytes = SMALL_REPLY_BYTES
    world.unsent.waiting[world.clients[0]] = None
    world.unsent.count()
    world.client(LARGE)
    assert world.delay_s == pytest.approx(POLL_S * clients / POLLED)
