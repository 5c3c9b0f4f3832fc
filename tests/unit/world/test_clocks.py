"""HostClocks: the shortest round trip counts, one rank of a host is asked, and only answers are believed."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
from group_kit import Group

from asyncdist.inspect import dumps
from asyncdist.inspect.recorder import RECORDER
from asyncdist.testing import VirtualTimeLoop, run_world
from asyncdist.world import clocks
from asyncdist.world.clocks import AGAIN_S, SAMPLES, HostClocks
from asyncdist.world.control import Clock, ControlMessage
from asyncdist.world.world import World

HOSTS = {0: "here", 1: "there", 2: "there", 3: "elsewhere", 4: None}


class Hosts:
    """Rank 0's clocks, and those it asks: their clock is 100 s ahead, and messages travel for as long as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loop: Any) -> None:
        self.now_s = 1000.0
        self.sent: deque[tuple[int, Any]] = deque()
        self.there = True
        monkeypatch.setattr(clocks.time, "time", lambda: self.now_s)
        self.clocks = HostClocks(loop, HOSTS.get, self._send)

    def _send(self, rank: int, message: ControlMessage) -> bool:
        self.sent.append((rank, message))
        return self.there

    def answer(self, there_s: float, back_s: float) -> None:
        rank, question = self.sent.popleft()
        self.now_s += there_s
        answered_s = self.now_s + 100
        self.now_s += back_s
        self.clocks.heard(rank, Clock(question.asked_s, answered_s))


class VirtualLoop:
    virtual_time = True


def test_the_shortest_round_trip_of_a_few_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, VirtualLoop())
    hosts.clocks.connected(1, "here")
    for there_s, back_s in ((0.5, 0.1), (0.01, 0.03), *[(0.3, 0.0)] * (SAMPLES - 2)):
        assert not hosts.clocks.compared
        hosts.answer(there_s, back_s)
    bound_s, ahead_s = hosts.clocks.compared[1]
    assert bound_s == pytest.approx(0.02)
    assert abs(ahead_s - 100) <= bound_s + 1e-9
    assert not hosts.sent


def test_one_rank_of_each_other_host_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, VirtualLoop())
    for rank in (0, 1, 2, 3, 4, 1):
        hosts.clocks.connected(rank, "here")
    assert [rank for rank, _ in hosts.sent] == [1, 3]
    hosts.there = False
    hosts.answer(0.1, 0.1)  # rank 1 has gone since, so rank 2 may be asked in its place
    hosts.sent.clear()
    hosts.clocks.connected(2, "here")
    assert [rank for rank, _ in hosts.sent] == [2]


def test_only_the_answer_to_the_last_question_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, VirtualLoop())
    hosts.clocks.heard(1, Clock(0.0, 5.0))
    hosts.clocks.connected(1, "here")
    for _ in range(2 * SAMPLES):
        hosts.clocks.heard(1, Clock(0.0, 5.0))
        hosts.clocks.heard(3, Clock(hosts.sent[0][1].asked_s, 5.0))
    assert len(hosts.sent) == 1
    assert not hosts.clocks.compared
    hosts.clocks.stop()
    hosts.answer(0.1, 0.1)
    assert not hosts.sent
    hosts.clocks.heard(3, Clock(7.0, None))  # a question
    assert hosts.sent.pop() == (3, Clock(7.0, hosts.now_s))


async def test_it_asks_again_after_a_minute_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[tuple[float, Any]] = []

    class Loop:
        def call_later(self, delay_s: float, callback: Any) -> Any:
            timers.append((delay_s, callback))
            return asyncio.get_running_loop().call_later(1000, print)

    hosts = Hosts(monkeypatch, Loop())
    hosts.clocks.connected(1, "here")
    hosts.answer(0.1, 0.1)
    ((delay_s, again),) = timers
    assert delay_s == AGAIN_S
    again()
    assert len(timers) == 2
    for _ in range(2):
        hosts.sent.popleft()  # that of before, which a lost answer has left open
        hosts.sent.append((1, Clock(hosts.clocks._asked[1], None)))
    hosts.sent.pop()
    for _ in range(SAMPLES):
        hosts.answer(0.1, 0.1)
    assert 1 in hosts.clocks.compared
    hosts.clocks.stop()


@pytest.mark.parametrize("loop_factory", [VirtualTimeLoop, asyncio.new_event_loop])
def test_ranks_of_two_hosts_compare_their_clocks_as_they_connect(
    monkeypatch: pytest.MonkeyPatch, loop_factory: Any
) -> None:
    async def main(group: Group) -> dict[str, Any]:
        for _ in range(2 * SAMPLES):
            await group.barrier()
        found: dict[str, Any] = dumps.document(group.rank, "asked")["clock"]
        return found

    RECORDER.entries.clear()
    monkeypatch.setattr(World, "_host_of", lambda self, rank: f"host {rank % 2}")
    monkeypatch.setattr(World, "host", property(lambda self: f"host {self.rank % 2}", lambda self, host: None), False)
    clock = run_world(4, main, loop_factory=loop_factory)
    for rank, found in enumerate(clock):
        (compared,) = found["compared"]
        assert compared["rank"] % 2 == 1 - rank % 2
        assert abs(compared["ahead_s"]) <= compared["bound_s"] < 1
    assert clock[0]["host"] == clock[1]["host"]
