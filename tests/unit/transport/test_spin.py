"""When a rank looks before it sleeps, for how long, and when it gives up doing so; on a clock of the test's own."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from asyncdist.concurrency.spin import (
    CATCH,
    DEFAULT_SPIN_US,
    MAX_SKIPPED,
    MAX_SPIN_US,
    PATIENCE,
    TURN_S,
    spin_us_from_environ,
)
from asyncdist.transport import spin
from asyncdist.transport.base_mesh import BURST, BaseMesh
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.spin import ALONE_S, FARTHEST, MAX_NEIGHBORS, RANKS_PER_CORE, Neighbors, Spinner

CORES = 4
LIMIT_US = 20.0
POLL_S = 1e-6


class Work:
    """Done after so many looks from now."""

    def __init__(self, looks: float = float("inf")) -> None:
        self._done = False
        self.looks = looks


class World:
    """A clock that each look moves on by a microsecond, and what there is to look at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks_here: int = 2) -> None:
        self.now_s = 100.0
        self.polls = self.awake = 0
        self.work = Work()
        monkeypatch.setattr(spin, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(CORES)), raising=False)
        doorbell = SimpleNamespace(
            poll=self.poll, poll_for=lambda _work: self.poll(), stay_awake=self.stay_awake, awake=False
        )
        self.memory: Any = SimpleNamespace(loop=None, ranks_here=ranks_here, crowded=False, doorbell=doorbell)
        self.neighbors = Neighbors()
        self.spinner = Spinner(self.memory, self.neighbors, LIMIT_US)

    def stay_awake(self) -> None:
        self.awake += 1

    def poll(self) -> bool:
        self.now_s += POLL_S
        self.polls += 1
        self.work.looks -= 1
        self.work._done = self.work.looks <= 0
        return False

    def look(self, looks: float = float("inf")) -> bool:
        """Look for a work that is done after so many looks; how long that took is in `polls`."""
        self.work = Work(looks)
        self.polls = 0
        return self.spinner.look(self.work)


def test_it_looks_as_long_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert world.look(15)
    assert world.polls == 15
    assert not world.look()
    assert world.polls == pytest.approx(LIMIT_US, abs=1)
    assert world.awake == 2, "nobody need ring meanwhile"


def test_a_glance_is_one_look_where_looking_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.spinner.glance(world.work)
    assert (world.polls, world.awake) == (1, 1)
    world.memory.crowded = True
    world.spinner.glance(world.work)
    assert (world.polls, world.awake) == (1, 1)


@pytest.mark.parametrize(
    ("ranks_here", "crowded", "looks"),
    [
        (0, False, False),
        (2, False, True),
        (CORES, False, True),
        (RANKS_PER_CORE * CORES, False, True),
        (RANKS_PER_CORE * CORES + 1, False, False),
        (2, True, False),
    ],
)
def test_where_it_pays(monkeypatch: pytest.MonkeyPatch, ranks_here: int, crowded: bool, looks: bool) -> None:
    world = World(monkeypatch, ranks_here)
    world.memory.crowded = crowded
    assert world.look(1) is looks
    assert bool(world.polls) is looks
    world.spinner.turn_due()
    assert bool(world.awake) is looks


@pytest.mark.parametrize(("ranks_here", "alone"), [(CORES, round(ALONE_S / POLL_S)), (CORES + 1, 0)])
def test_it_gives_cores_away(monkeypatch: pytest.MonkeyPatch, ranks_here: int, alone: int) -> None:
    """At once where there are more ranks than cores, and soon where the system may have put two on one all the same."""
    given: list[None] = []
    monkeypatch.setattr(spin, "_give_core_away", lambda: given.append(None))
    world = World(monkeypatch, ranks_here)
    if alone:
        assert world.look(alone - 1)
        assert not given
    assert world.look(alone + 7)
    assert len(given) == pytest.approx(7, abs=1)


@pytest.mark.parametrize(("away_us", "looks"), [(0, 20), (1, 20), (4, 20), (9, 10), (1000, 1)])
def test_time_in_which_others_had_the_core_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, away_us: float, looks: int
) -> None:
    """Within bounds: five times the limit, or the loop's other work would wait too long."""
    world = World(monkeypatch, CORES + 1)

    def give_away() -> None:
        world.now_s += away_us * 1e-6

    monkeypatch.setattr(spin, "_give_core_away", give_away)
    assert not world.look()
    assert world.polls == pytest.approx(looks, abs=1)


@pytest.mark.parametrize("sockets", [1, 2, CORES - 1, CORES])
def test_sockets_of_this_host_count_as_ranks(monkeypatch: pytest.MonkeyPatch, sockets: int) -> None:
    world = World(monkeypatch, ranks_here=0)
    pollers = [lambda index=index: world.poll() for index in range(sockets)]  # type: ignore[misc]
    for poller in pollers:
        world.neighbors.add(poller, poller, crowded=False)
    given: list[None] = []
    monkeypatch.setattr(spin, "_give_core_away", lambda: given.append(None))
    assert world.look(1)
    assert len(given) == (1 + sockets > CORES), "a rank without a core of its own gives it away before it looks"
    for poller in pollers:
        world.neighbors.remove(poller)
        world.neighbors.remove(poller)
    assert not world.look(1)
    world.neighbors.add(pollers[0], pollers[0], crowded=True)
    assert not world.look(1)


@pytest.mark.parametrize("cores", [1, 2])
def test_no_more_ranks_than_cores_can_serve(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    world = World(monkeypatch)
    monkeypatch.setattr(world.spinner, "_cores", cores)
    most = RANKS_PER_CORE * cores
    world.memory.ranks_here = most - 1
    world.neighbors.add(world.poll, world.poll, crowded=False)
    assert world.look(1)
    world.memory.ranks_here = most
    assert not world.look(1)


@pytest.mark.parametrize(("local_ranks", "given"), [(1, 0), (CORES, 0), (CORES + 1, 1)])
def test_ranks_of_the_host_that_are_not_connected_need_cores_too(
    monkeypatch: pytest.MonkeyPatch, local_ranks: int, given: int
) -> None:
    away: list[None] = []
    monkeypatch.setattr(spin, "_give_core_away", lambda: away.append(None))
    world = World(monkeypatch, ranks_here=0)
    world.spinner = Spinner(world.memory, world.neighbors, LIMIT_US, local_ranks)
    assert not world.look(1), "there is nobody to hear from"
    world.neighbors.add(world.poll, world.poll, crowded=False)
    assert world.look(1)
    assert len(away) == given
    world.spinner = Spinner(world.memory, world.neighbors, LIMIT_US, RANKS_PER_CORE * CORES + 1)
    assert not world.look(1)


@pytest.mark.parametrize(("text", "ranks"), [("", 1), ("8", 8), ("many", 1)])
def test_how_many_ranks_share_the_host_is_read(text: str, ranks: int) -> None:
    assert TransportConfig.from_environ({"LOCAL_WORLD_SIZE": text}).local_ranks == ranks


def test_no_more_sockets_than_are_worth_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    monkeypatch.setattr(world.spinner, "_cores", 100)
    for number in range(MAX_NEIGHBORS):
        world.neighbors.add(lambda number=number: world.poll(), world.poll, crowded=False)  # type: ignore[misc]
    assert world.look(1)
    world.neighbors.add(lambda: False, lambda: False, crowded=False)
    assert not world.look(1)


@pytest.mark.parametrize("sockets", [1, MAX_NEIGHBORS, MAX_NEIGHBORS + 1])
def test_catching_up_is_one_round_of_the_sockets(monkeypatch: pytest.MonkeyPatch, sockets: int) -> None:
    world = World(monkeypatch)
    for number in range(sockets):
        world.neighbors.add(lambda number=number: bool(number), world.poll, crowded=False)  # type: ignore[misc]
    world.spinner.catch_up()
    assert world.polls == (sockets if sockets <= MAX_NEIGHBORS else 0)


def test_a_burst_of_calls_catches_up_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.neighbors.add(world.poll, world.poll, crowded=False)
    owner: Any = SimpleNamespace()
    mesh = BaseMesh(0, 2, owner)
    mesh.issued(BURST)  # sockets of a mesh without a spinner are left to the loop
    mesh.spinner = world.spinner
    for in_flight in range(1, 3 * BURST):
        mesh.issued(in_flight)
    assert world.polls == 2


def test_in_vain_it_looks_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    looked = []
    for _ in range(500):
        world.look()
        looked.append(world.polls > 0)
    assert looked[:PATIENCE] == [True] * PATIENCE
    gaps, last = [], PATIENCE - 1
    for index in range(PATIENCE, 500):
        if looked[index]:
            gaps.append(index - last - 1)
            last = index
    assert gaps[:4] == [1, 3, 7, 15]
    assert max(gaps) == MAX_SKIPPED
    while not world.look(1):
        pass
    assert world.look(1), "once it has helped, it looks at every await again"


def test_whoever_is_woken_soon_looks_longer_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert not world.look(50)
    world.now_s += 50e-6
    world.spinner.woken()
    assert world.look(50), "two that answer each other meet"
    assert world.look(50), "and may take as long again"
    assert world.look(5)
    assert not world.look(50), "until they need it no more"
    world.now_s += CATCH * LIMIT_US * 1e-6
    world.spinner.woken()
    assert not world.look(50), "that was too long after"


def wait_asleep(world: World, us: float) -> None:
    """A wait that ends so long after its look began, when that had been given up."""
    began_s = world.now_s
    assert not world.look()
    world.now_s = began_s + us * 1e-6
    world.spinner.woken()


def test_where_being_woken_takes_long_two_that_answer_each_other_meet_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow virtual machine an exchange in which both are woken takes 250 us, and 30 if both look."""
    world = World(monkeypatch)
    wait_asleep(world, 250)
    assert world.look(130), "the other has to be woken still"
    assert world.look(130)
    assert world.look(30), "both look"
    assert world.look(30)
    assert world.look(5)
    assert not world.look(30), "until they need it no more"


def test_what_takes_longer_than_being_woken_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    wait_asleep(world, 2 * FARTHEST * LIMIT_US)
    assert not world.look(30), "nor does a first wait that is long say that wake-ups are"
    wait_asleep(world, 60)
    assert world.look(30), "this one was hardly more than that"
    world = World(monkeypatch)
    wait_asleep(world, 60)
    wait_asleep(world, 250)
    assert not world.look(30), "where they are short, that was something else"


def test_a_task_that_is_always_served_lets_the_loop_turn_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    turns = 0
    for _ in range(1000):
        world.now_s += TURN_S / 100
        turns += world.spinner.turn_due()
    assert 9 <= turns <= 11


@pytest.mark.parametrize(("text", "value"), [("", DEFAULT_SPIN_US), ("0", 0), (" 7.5 ", 7.5), ("1000", MAX_SPIN_US)])
def test_the_limit_is_read(text: str, value: float) -> None:
    assert spin_us_from_environ({"ASYNCDIST_SPIN_US": text}) == value


@pytest.mark.parametrize("text", ["1000.1", "-1", "nan", "inf", "long"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ASYNCDIST_SPIN_US"):
        spin_us_from_environ({"ASYNCDIST_SPIN_US": text})


def test_it_does_not_look_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop may be reading there at that moment."""
    world = World(monkeypatch)
    looked: list[bool] = []
    thread = threading.Thread(target=lambda: looked.append(world.look(15)))
    thread.start()
    thread.join()
    assert looked == [False]
    assert world.polls == 0
    assert world.look(15)
