"""No lease ends early, whatever the clock of the loop does; none ends because the daemon was stopped."""

from __future__ import annotations

import asyncio
import time

import pytest

from asyncdist.testing.loop import VirtualTimeLoop
from asyncdist_server.clock import exact_clock
from asyncdist_server.engine.engine import Client, StoreEngine
from asyncdist_server.engine.leases import STALL_S
from asyncdist_server.engine.timers import in_whole_ms
from asyncdist_server.wire import messages as m


class Clock:
    """A loop's time, and what it really is."""

    def __init__(self) -> None:
        self.engine = StoreEngine(b"i" * 16)
        self.client = self.open()
        self.last_id = 0
        self.now = 100.0
        self.real = 100.0
        self.engine.tell_time(lambda: self.real)

    def open(self) -> Client:
        return self.engine.open("job", lambda reply: None, client_id=b"client-012345678", now=100.0)

    def ask(self, *request: object) -> object:
        self.last_id += 1
        reply = self.engine.request(self.client, (self.last_id, *request), self.now)
        assert reply is not None
        assert reply[1] == m.OK
        return reply[2]

    def ends_at(self) -> float:
        """When the timer of a loop fires that counts in whole milliseconds."""
        deadline = self.engine.next_deadline()
        assert deadline is not None
        return round(deadline * 1000) / 1000


def test_a_lease_begins_when_it_is_granted_and_not_when_the_turn_began() -> None:
    clock = Clock()
    clock.real = 100.0304
    clock.ask(m.GRANT, 1, 1000, False)
    assert clock.real + 1 <= clock.ends_at() <= clock.real + 1.001
    clock.real += 0.5
    clock.now += 0.5
    clock.ask(m.KEEP_ALIVE, (1,))
    clock.engine.expire(101.2)
    assert clock.real + 1 <= clock.ends_at() <= clock.real + 1.001


def test_a_bound_lease_runs_from_when_the_loss_was_noticed() -> None:
    clock = Clock()
    clock.ask(m.GRANT, 1, 1000, True)
    clock.real = 100.0306
    clock.engine.close(clock.client, clock.now)
    assert clock.real + 1 <= clock.ends_at() <= clock.real + 1.001


@pytest.mark.parametrize("ttl_ms", [1, 3, 7, 1000, 10**9])
def test_whole_milliseconds_are_not_rounded_up(ttl_ms: int) -> None:
    clock = Clock()
    for number in range(1, 200):
        clock.now = clock.real = round(4e6 + number * 0.001, 3)
        clock.ask(m.GRANT, number, ttl_ms, False)
        assert clock.engine.next_deadline() == pytest.approx(clock.real + ttl_ms / 1000, rel=0, abs=1e-6)
        clock.ask(m.REVOKE, number)


@pytest.mark.parametrize("deadline", [45.001, 45.0010000005, 45.0010000000001, 45.0004, 45.0006, 4e6 + 0.1, 0.0])
def test_whole_milliseconds_are_never_before_what_is_due(deadline: float) -> None:
    assert deadline <= in_whole_ms(deadline) <= deadline + 0.001


def test_a_daemon_that_was_stopped_hears_first_who_kept_a_lease_alive() -> None:
    clock = Clock()
    clock.ask(m.GRANT, 1, 1000, False)
    clock.ask(m.GRANT, 2, 100_000, False)
    clock.now = clock.real = 131.0
    clock.engine.expire(clock.now, 30.0)
    assert clock.ask(m.KEEP_ALIVE, (1, 2)) == []
    assert clock.ends_at() == 132.0
    clock.now = clock.real = 132.0
    clock.engine.expire(clock.now, 0.01)
    assert clock.ask(m.KEEP_ALIVE, (1, 2)) == [1]
    assert clock.engine.namespaces["job"].leases[2].deadline == 232.0  # nobody's time becomes longer than it was


def test_a_lease_that_nobody_kept_alive_ends_after_a_stop() -> None:
    clock = Clock()
    clock.ask(m.GRANT, 1, 1000, False)
    clock.now = 101.0 + STALL_S + 0.1
    clock.engine.expire(clock.now, STALL_S + 0.1)
    clock.engine.expire(clock.now + STALL_S + 0.1)
    assert clock.ask(m.KEEP_ALIVE, (1,)) == [1]


def test_a_daemon_that_was_stopped_hears_first_who_came_back_and_what_is_needed() -> None:
    """Whoever connected meanwhile was not heard: clients, those who take a prefix up again, those who watch."""
    clock = Clock()
    other = clock.engine.open("job", lambda reply: None, client_id=b"other-0123456789", now=100.0)
    clock.engine.close(other, 100.0)
    clock.ask(m.GRANT, 1, 1000, False)
    clock.ask(m.HOLD, b"p/", 1, 20_000)
    clock.ask(m.SET, b"p/key", b"")
    clock.ask(m.REVOKE, 1)
    begun = clock.ask(m.WATCH, b"w/", None, 0)
    assert isinstance(begun, tuple)
    clock.ask(m.SET, b"w/key", b"")
    age = clock.engine.state.age()
    for stopped_s in (300.0, 1000.0):
        clock.now = clock.real = clock.now + stopped_s
        clock.engine.expire(clock.now, stopped_s - 20.0)
        assert clock.engine.client(b"other-0123456789") is not None
        assert clock.engine.namespaces["job"].holds[b"p/"].deadline == clock.now + 20.0  # not longer than it was
        assert clock.ask(m.WATCH, b"w/", begun[0], 0)
    assert clock.engine.state.age() == age + 40.0  # it served nobody else
    clock.now = clock.real = clock.now + 119.9
    clock.engine.expire(clock.now, 0.01)
    assert b"p/key" not in clock.engine.namespaces["job"].values
    assert clock.engine.client(b"other-0123456789") is not None
    clock.now = clock.real = clock.now + 0.2
    clock.engine.expire(clock.now, 0.01)
    assert clock.engine.client(b"other-0123456789") is None
    assert not clock.engine.namespaces["job"].histories


def test_a_short_delay_spares_nobody() -> None:
    clock = Clock()
    clock.ask(m.GRANT, 1, 1000, False)
    clock.engine.expire(101.0 + STALL_S, STALL_S)
    assert clock.ask(m.KEEP_ALIVE, (1,)) == [1]


async def test_the_exact_clock_agrees_with_the_loop() -> None:
    loop = asyncio.get_running_loop()
    clock = exact_clock(loop)
    began, began_s = loop.time(), time.monotonic()
    while time.monotonic() < began_s + 0.003:
        assert loop.time() <= clock()
    assert 0.003 <= clock() - began < 5


def test_the_exact_clock_of_a_simulation_is_the_simulations() -> None:
    loop = VirtualTimeLoop()
    try:
        assert exact_clock(loop)() == loop.time()
    finally:
        loop.close()
