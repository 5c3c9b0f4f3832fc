"""An item of a queue is with a client that is known to have it, or in the store, also if the daemon was killed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from engine_books import problems
from journal_kit import JournaledEngine, MemoryJournal

from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.journal import batch
from asyncdist_server.journal.batch import ROLLED_BACK
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.messages import CLIENT_LINGER_S


class World:
    """A journaled engine and its clients, each with one connection at a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.store = JournaledEngine(MemoryJournal(), self.now)

    @property
    def engine(self) -> StoreEngine:
        return self.store.engine

    def push(self, *items: bytes) -> None:
        client = self.engine.open("job", lambda reply: None)
        for item in items:
            self.engine.request(client, (1, m.QUEUE_PUSH, b"q", item), self.now)
        self.engine.close(client, self.now)

    def items(self) -> list[bytes]:
        found = self.engine.namespaces.get("job")
        return list(found.queues.get(b"q", ())) if found is not None else []

    def kill(self) -> None:
        """Lose what was not committed."""
        self.store = self.store.crash(self.now)
        assert problems(self.engine) == []

    def commit(self, flags: int = 0) -> None:
        self.store.commit(flags)

    def forget(self) -> None:
        self.now += CLIENT_LINGER_S
        self.engine.expire(self.now)
        assert problems(self.engine) == []


class Link:
    """A client whose requests are numbered through all its connections."""

    def __init__(self, world: World, name: bytes = b"link") -> None:
        self.world = world
        self.client_id = name.ljust(16, b"-")
        self.last_id = 0
        self.connect()

    def connect(self, *pending: int) -> None:
        self.late: list[Any] = []
        self.frames = 0
        self.client = self.world.engine.open(
            "job", self.late.append, client_id=self.client_id, pending=pending, now=self.world.now
        )

    def ask(self, *request: Any, number: int = 0) -> Any:
        self.last_id = number or self.last_id + 1
        return self.world.engine.request(self.client, (self.last_id, *request), self.world.now)

    def sent(self) -> None:
        self.frames += 1
        self.world.engine.frames_sent(self.client, 1)

    def confirm(self) -> None:
        self.world.engine.acknowledge(self.client, self.frames)


STEPS = ("pop", "commit", "send", "confirm", "commit")
"""The life of an item that is popped. Nothing is sent before it is committed."""


@pytest.mark.parametrize("done", range(len(STEPS) + 1), ids=lambda done: "-".join(STEPS[:done]) or "nothing")
@pytest.mark.parametrize("then", ["vanishes", "asks again", "has it"])
@pytest.mark.parametrize("kills", [1, 2])
def test_a_kill_at_every_step(done: int, then: str, kills: int) -> None:
    world = World()
    world.push(b"1", b"2")
    link = Link(world)
    world.commit()
    for step in STEPS[:done]:
        if step == "pop":
            assert link.ask(m.QUEUE_POP, b"q", 0) == (1, m.OK, b"1")
        elif step == "commit":
            world.commit()
        elif step == "send":
            link.sent()
        else:
            link.confirm()
    for _ in range(kills):
        world.kill()
    popped = done >= 2
    assert world.items() == ([b"2"] if popped else [b"1", b"2"])
    if then == "vanishes":
        world.forget()
        assert world.items() == ([b"2"] if done == len(STEPS) else [b"1", b"2"])
    elif then == "has it":
        if done < 3:
            return  # it cannot
        link.connect()
        world.commit()
        world.kill()
        world.forget()
        assert world.items() == [b"2"]
    else:
        if done > 3:
            return  # it does not
        link.connect(1)
        assert link.ask(m.QUEUE_POP, b"q", 0, number=1) == (1, m.OK, b"1")
        link.sent()
        world.commit()
        world.kill()
        link.connect(1)
        assert link.ask(m.QUEUE_POP, b"q", 0, number=1) == (1, m.OK, b"1")
        link.sent()
        link.confirm()
        world.commit()
        world.kill()
        world.forget()
        assert world.items() == [b"2"]
    world.commit()
    before = world.items()
    world.kill()
    world.forget()
    assert world.items() == before, "it comes back once"


def test_an_item_for_a_client_that_waited_comes_back() -> None:
    world = World()
    link = Link(world)
    assert link.ask(m.QUEUE_POP, b"q", None) is None
    world.push(b"1")
    assert link.late == [(1, m.OK, b"1")]
    world.commit()
    world.kill()
    world.forget()
    assert world.items() == [b"1"]


def test_items_come_back_in_their_order_however_often_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "SLACK_BYTES", -10_000)
    monkeypatch.setattr(batch, "CLEAN_AT_ONCE_BYTES", 50)
    world = World()
    world.push(*(b"%d" % number for number in range(6)))
    link, other = Link(world), Link(world, b"other")
    for number in range(5):
        link.ask(m.QUEUE_POP, b"q", 0)
        link.sent()
        world.commit()
        if number == 1:
            link.confirm()
    for number in range(40):
        other.ask(m.SET, b"k", b"%d" % number)
        other.sent()
        other.confirm()
        world.commit()
    assert min(world.store.journal.rows) > 20
    world.kill()
    world.forget()
    assert world.items() == [b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize("how", ["namespace", "hold"])
@pytest.mark.parametrize("when", ["before the kill", "after the kill"])
def test_nothing_comes_back_to_a_queue_that_was_deleted(how: str, when: str) -> None:
    world = World()
    link, other = Link(world), Link(world, b"other")
    other.ask(m.GRANT, 1, 10**6, False)
    other.ask(m.HOLD, b"q", 1, 0)
    world.push(b"1", b"2")
    link.ask(m.QUEUE_POP, b"q", 0)
    world.commit()
    if when == "after the kill":
        world.kill()
        other.connect()
    if how == "namespace":
        other.ask(m.DELETE_NAMESPACE)
    else:
        other.ask(m.REVOKE, 1)
        world.engine.expire(world.now)
    world.push(b"3")
    world.commit()
    world.kill()
    world.forget()
    assert world.items() == [b"3"]


def test_a_client_that_is_forgotten_and_comes_at_once_does_not_give_its_item_back_twice() -> None:
    world = World()
    world.push(b"1")
    link = Link(world)
    link.ask(m.QUEUE_POP, b"q", 0)
    world.commit()
    world.engine.close(link.client, world.now)
    world.forget()
    link.connect()
    assert not link.client.resumed
    assert world.items() == [b"1"]
    world.commit()
    world.kill()
    world.forget()
    assert world.items() == [b"1"]


def test_a_goodbye_gives_back_what_was_not_read_whatever_comes_then() -> None:
    world = World()
    world.push(b"1", b"2")
    link = Link(world)
    link.ask(m.QUEUE_POP, b"q", 0)
    link.ask(m.QUEUE_POP, b"q", 0)
    link.client.leaving = True
    world.engine.close(link.client, world.now)
    assert world.items() == [b"1", b"2"]
    world.commit()
    for _ in range(2):
        world.kill()
        assert world.items() == [b"1", b"2"]
        world.forget()
        assert world.items() == [b"1", b"2"]


def test_in_a_backup_nobody_has_items_on_their_way() -> None:
    """Whoever had them is of another store, and does not come back to this one."""
    world = World()
    world.push(b"1", b"2", b"3")
    link, other = Link(world), Link(world, b"other")
    link.ask(m.QUEUE_POP, b"q", 0)
    link.sent()
    link.confirm()
    link.ask(m.QUEUE_POP, b"q", 0)
    other.ask(m.SET, b"k", b"")
    world.commit()
    world.commit(ROLLED_BACK)
    for attempt in range(3):
        world.kill()  # the first time before it is in the journal that it was put back
        assert world.items() == [b"2", b"3"]
        link.connect(2)
        assert link.client.resumed == (attempt == 2), "of this store it is known"
        if attempt:
            world.commit()
            world.engine.close(link.client, world.now)
    world.forget()
    assert world.items() == [b"2", b"3"]


def test_every_history_ends_as_without_a_kill() -> None:
    """All short programs of what may happen to two items, with a restart after each prefix, and without any."""
    names = ("pop", "confirm", "lose", "come", "clear", "push")
    for rest in itertools.product(names, repeat=3):
        program = "pop", *rest
        expected = play(program, kill_at=-1)
        for kill_at in range(len(program) + 1):
            assert play(program, kill_at) == expected, (program, kill_at)


def play(program: tuple[str, ...], kill_at: int) -> list[bytes]:
    """Return what is in the queue when all clients are forgotten. A kill also cuts a connection, which comes back."""
    world = World()
    world.push(b"1", b"2")
    link = Link(world)
    connected = True
    for position, step in enumerate((*program, "end")):
        if position == kill_at:
            world.commit()
            world.kill()
            if connected:
                link.connect(*range(1, link.last_id + 1))
                for number in sorted(link.client.replay):  # it asks again for what it has not confirmed
                    link.ask(m.QUEUE_POP, b"q", 0, number=number)
                link.sent()
        if step == "pop" and connected:
            link.ask(m.QUEUE_POP, b"q", 0)
            link.sent()
        elif step == "confirm" and connected:
            link.confirm()
        elif step == "lose" and connected:
            world.engine.close(link.client, world.now)
            connected = False
        elif step == "come" and not connected:
            link.connect()
            connected = True
        elif step == "clear":
            world.engine.clear("job")
        elif step == "push":
            world.push(b"3")
    if connected:
        world.engine.close(link.client, world.now)
    world.forget()
    return world.items()
