"""When a store's client looks for a reply, for how long, and when it leaves that to the loop; on a clock of its own."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import pytest

from asyncdist.concurrency.spin import CATCH, MAX_SKIPPED, PATIENCE, TURN_S
from asyncdist.store import reply as replies
from asyncdist.store.reply import ALONE, Lookout, same_host
from asyncdist_server.serving.sockets import served_here
from asyncdist_server.serving.threaded import serve_in_thread

LIMIT_US = 20.0
POLL_S = 1e-6


class Daemon:
    """A connection whose every look takes a microsecond, and that answers after so many of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_us: float = LIMIT_US) -> None:
        self.now_s = 100.0
        self.polls = self.sends = 0
        self.alone = self.here = True
        self.in_this_process = False
        self.answers_after = 5.0
        self.reply: Any = None
        monkeypatch.setattr(replies, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(replies, "same_host", lambda sock: self.here)
        monkeypatch.setattr(replies, "served_here", lambda port: self.in_this_process)
        monkeypatch.setattr(os, "cpu_count", lambda: 2)
        self.lookout = Lookout(asyncio.get_running_loop(), limit_us, lambda: self.alone)
        self.connect()

    def connect(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            self.lookout.connected(self, client)

    def send(self) -> None:
        self.sends += 1

    def poll(self) -> bool:
        self.now_s += POLL_S
        self.polls += 1
        if self.polls >= self.answers_after and not self.reply.done():
            self.reply.set_result(None)
        return True

    def ask(self) -> int:
        """Await a reply; how often it was looked for."""
        self.polls = 0
        self.reply = asyncio.get_running_loop().create_future()
        self.turn_due = self.lookout.seek(self.reply)
        return self.polls

    def get_used(self) -> None:
        for _ in range(ALONE + 1):
            assert self.ask() == 0


@pytest.fixture
async def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    return Daemon(monkeypatch)


async def test_a_task_that_asks_alone_looks_from_the_fifth_time_on(daemon: Daemon) -> None:
    daemon.get_used()
    assert daemon.ask() == 5
    assert daemon.reply.done()
    assert daemon.sends == 1, "what was asked is sent at once"


async def test_it_looks_as_long_as_it_may(daemon: Daemon) -> None:
    daemon.get_used()
    daemon.answers_after = float("inf")
    assert daemon.ask() == pytest.approx(CATCH * LIMIT_US, abs=1)
    assert not daemon.reply.done()


async def test_several_requests_in_a_turn_are_gathered(daemon: Daemon) -> None:
    daemon.get_used()
    daemon.alone = False
    assert daemon.ask() == 0
    daemon.alone = True
    for _ in range(ALONE):
        assert daemon.ask() == 0
    assert daemon.ask() == 5


async def test_requests_of_several_tasks_are_gathered(daemon: Daemon) -> None:
    daemon.get_used()

    async def other() -> int:
        return daemon.ask()

    assert await asyncio.create_task(other()) == 0
    assert daemon.ask() == 0, "this task is another one again"


async def test_who_looks_in_vain_looks_less_often_until_it_pays(daemon: Daemon) -> None:
    daemon.get_used()
    daemon.answers_after = float("inf")
    looked = [daemon.ask() > 0 for _ in range(400)]
    assert all(looked[:PATIENCE])
    gaps = [len(gap) for gap in "".join("x" if one else "." for one in looked[PATIENCE:]).split("x")]
    assert gaps[0] == 1
    assert max(gaps) == MAX_SKIPPED
    assert sorted(gaps[:-1]) == gaps[:-1]
    daemon.answers_after = 1
    while not daemon.ask():
        pass
    assert daemon.ask() == 1
    assert daemon.ask() == 1


async def test_the_loop_has_its_turns(daemon: Daemon) -> None:
    daemon.get_used()
    assert daemon.ask()
    assert daemon.turn_due
    turns = 0
    for _ in range(round(10 * TURN_S / (5 * POLL_S))):
        assert daemon.ask() == 5
        turns += daemon.turn_due
    assert turns == pytest.approx(10, abs=1)


async def test_a_daemon_elsewhere_is_not_looked_for(daemon: Daemon) -> None:
    daemon.here = False
    daemon.connect()
    for _ in range(3 * ALONE):
        assert daemon.ask() == 0


async def test_a_daemon_in_this_process_is_left_alone(daemon: Daemon) -> None:
    daemon.in_this_process = True
    daemon.connect()
    for _ in range(3 * ALONE):
        assert daemon.ask() == 0


async def test_nothing_is_looked_for_where_that_was_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(monkeypatch, limit_us=0)
    for _ in range(3 * ALONE):
        assert daemon.ask() == 0


async def test_one_core_is_for_the_daemon(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    daemon.connect()
    for _ in range(3 * ALONE):
        assert daemon.ask() == 0


async def test_a_connection_that_breaks_ends_the_look(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.get_used()
    monkeypatch.setattr(daemon, "poll", lambda: False)
    daemon.ask()
    assert not daemon.reply.done()
    daemon.lookout.lost()
    monkeypatch.undo()
    assert daemon.ask() == 0


def test_which_hosts_are_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert same_host(client)
    with socket.socket() as unconnected:
        assert not same_host(unconnected)
    assert not same_host(object())


def test_which_daemons_are_in_this_process() -> None:
    with serve_in_thread() as server:
        assert served_here(server.port)
    assert not served_here(server.port)
