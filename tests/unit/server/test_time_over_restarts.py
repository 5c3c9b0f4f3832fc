"""Times that count over restarts: the store's age grows with the lives of its daemons, whatever their clocks say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from journal_kit import JournaledEngine, MemoryJournal

from asyncdist_server.engine.engine import Client
from asyncdist_server.engine.history import HISTORY_LINGER_S
from asyncdist_server.engine.leases import RETURN_S
from asyncdist_server.engine.membership import JOB_LINGER_S
from asyncdist_server.engine.namespace import Namespace
from asyncdist_server.journal import batch
from asyncdist_server.journal.journal import decode
from asyncdist_server.wire.messages import (
    CLIENT_LINGER_S,
    GRANT,
    HOLD,
    JOIN,
    KEEP_ALIVE,
    LEAVE,
    QUEUE_POP,
    QUEUE_PUSH,
    REVOKE,
    SET,
    WATCH,
)

LOST = b"client-012345678"
OTHER = b"other-0123456789"


class Lives:
    """A store whose daemons live one after the other, each with a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.journal = MemoryJournal()
        self.store = JournaledEngine(self.journal, self.now)
        self.last_id = 0

    def open(self, client_id: bytes) -> Client:
        return self.store.engine.open("job", lambda reply: None, client_id=client_id, now=self.now)

    def ask(self, client: Client, *request: Any) -> Any:
        self.last_id += 1
        return self.store.engine.request(client, (self.last_id, *request), self.now)

    def live(self, life_s: float, noted_s: float | None = None) -> None:
        """Let the daemon live so long, of which the journal is told the first `noted_s`, all of it by default."""
        noted_s = life_s if noted_s is None else noted_s
        self.now += noted_s
        self.store.engine.expire(self.now)
        self.store.commit()
        self.now += life_s - noted_s
        self.store.engine.expire(self.now)

    def restart(self) -> None:
        """Kill the daemon; the next one's clock began at another time, here even earlier."""
        self.now = 5000.0 - self.now
        self.store = self.store.crash(self.now)

    def lived_until(self, gone: Callable[[], bool], life_s: float, at_most_s: float = 1000.0) -> float:
        """Restart after every `life_s` until it is gone; returns how long daemons have lived from the first restart."""
        lived_s = 0.0
        self.restart()
        while not gone():
            assert lived_s < at_most_s
            self.live(life_s)
            lived_s += life_s
            if not gone():
                self.restart()
        return lived_s

    def assert_ends_in(self, gone: Callable[[], bool], time_s: float) -> None:
        """It ends within the last second of that time."""
        self.live(time_s - 1.0)
        assert not gone()
        self.live(1.0)
        assert gone()

    @property
    def space(self) -> Any:
        return self.store.engine.namespaces.get("job") or Namespace("job")


def lease_by_time(lives: Lives) -> Callable[[], bool]:
    lives.ask(lives.open(LOST), GRANT, 1, 40_000, False)
    return lambda: 1 not in lives.space.leases


def bound_lease(lives: Lives) -> Callable[[], bool]:
    lives.ask(lives.open(LOST), GRANT, 1, 40_000, True)
    return lambda: 1 not in lives.space.leases


def shortest_bound_lease(lives: Lives) -> Callable[[], bool]:
    lives.ask(lives.open(LOST), GRANT, 1, 1, True)
    return lambda: 1 not in lives.space.leases


def hold(lives: Lives) -> Callable[[], bool]:
    client = lives.open(LOST)
    lives.ask(client, GRANT, 1, 1_000_000, False)
    lives.ask(client, HOLD, b"held/", 1, 40_000)
    lives.ask(client, SET, b"held/key", b"")
    lives.ask(client, REVOKE, 1)
    return lambda: b"held/key" not in lives.space.values and not lives.space.holds


def client_with_an_item(lives: Lives) -> Callable[[], bool]:
    client = lives.open(LOST)
    lives.ask(client, QUEUE_PUSH, b"queue", b"item")
    lives.ask(client, QUEUE_POP, b"queue", 0)
    return lambda: list(lives.space.queues.get(b"queue", ())) == [b"item"] and lives.store.engine.client(LOST) is None


def history(lives: Lives) -> Callable[[], bool]:
    lives.ask(lives.open(LOST), WATCH, b"watched/", None, 0)
    return lambda: b"watched/" not in lives.space.histories


KINDS = [
    (lease_by_time, 40.0),
    (bound_lease, 40.0),
    (shortest_bound_lease, RETURN_S),
    (hold, 40.0),
    (client_with_an_item, CLIENT_LINGER_S),
    (history, HISTORY_LINGER_S),
]


@pytest.fixture(params=["all said once", "said again"])
def _cleaning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether batches are given up all the time, and what they say is said again."""
    if request.param == "said again":
        monkeypatch.setattr(batch, "SLACK_BYTES", -100_000)
        monkeypatch.setattr(batch, "CLEAN_AT_ONCE_BYTES", 100)


@pytest.mark.usefixtures("_cleaning")
@pytest.mark.parametrize("life_s", [0.5, 7.0, 39.0])
@pytest.mark.parametrize(("kind", "time_s"), KINDS)
def test_what_nobody_needs_ends_after_its_time_over_all_lives(kind: Any, time_s: float, life_s: float) -> None:
    lives = Lives()
    gone = kind(lives)
    lives.ask(lives.open(OTHER), SET, b"kept", b"")
    lives.live(3.0)
    assert not gone()
    lived_s = lives.lived_until(gone, life_s)
    assert time_s <= lived_s < time_s + life_s or (kind is history and time_s - 3 <= lived_s < time_s + life_s)


@pytest.mark.usefixtures("_cleaning")
def test_what_is_needed_in_every_life_has_its_full_time_in_the_next() -> None:
    lives = Lives()
    client = lives.open(LOST)
    lives.ask(client, GRANT, 1, 40_000, False)
    lives.ask(client, GRANT, 2, 40_000, True)
    lives.ask(client, GRANT, 3, 10**9, True)
    lives.ask(client, HOLD, b"held/", 3, 0)
    lives.ask(client, SET, b"held/key", b"")
    for _ in range(20):
        lives.live(5.0)
        lives.restart()
        lives.live(30.0)
        client = lives.open(LOST)
        assert client.resumed
        assert lives.ask(client, KEEP_ALIVE, (1, 2, 3))[2] == []
        lives.ask(client, WATCH, b"watched/", None, 0)
        lives.live(5.0)
        lives.restart()
        lives.live(39.9)
        assert sorted(lives.space.leases) == [1, 2, 3]
        assert b"held/key" in lives.space.values
        assert b"watched/" in lives.space.histories
        lives.ask(lives.open(LOST), KEEP_ALIVE, (1,))


def test_a_prefix_that_is_taken_up_again_has_its_full_time_to_linger() -> None:
    lives = Lives()
    gone = hold(lives)
    for released in range(3):
        lives.live(1.0)
        lives.restart()
        lives.live(30.0)
        client = lives.open(OTHER)
        lives.ask(client, GRANT, 2, 10**6, True)
        lives.ask(client, HOLD, b"held/", 2, 0)
        if released == 1:
            lives.live(15.0)
        lives.ask(client, REVOKE, 2)
    lives.assert_ends_in(gone, 40.0)


def test_a_client_is_forgotten_before_others_that_came_earlier_and_again() -> None:
    lives = Lives()
    lives.open(OTHER)
    lives.open(LOST)
    for life_s in (10.0, 30.0):
        lives.live(life_s)
        lives.restart()
        lives.open(OTHER)
    lives.live(10.0)
    lives.restart()
    lives.live(CLIENT_LINGER_S - 40.0)
    assert [client.client_id for client in lives.store.engine.all_clients()] == [OTHER]
    lives.assert_ends_in(lambda: lives.store.engine.client(OTHER) is None, 40.0)


def test_a_journal_that_has_dropped_the_start_of_its_daemon_is_of_this_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ages would be taken for the steps of older ones."""
    monkeypatch.setattr(batch, "SLACK_BYTES", -100_000)
    monkeypatch.setattr(batch, "CLEAN_AT_ONCE_BYTES", 100)
    lives = Lives()
    gone = history(lives)
    for _ in range(10):
        lives.live(4.0)
    first = decode(min(lives.journal.rows.items())[1])
    assert first[2][0][2][0][1] is None
    lives.restart()
    lives.assert_ends_in(gone, HISTORY_LINGER_S - 40.0)


def test_a_history_that_a_job_needed_has_its_full_time_from_the_jobs_end_on() -> None:
    lives = Lives()
    client = lives.open(LOST)
    lives.ask(client, GRANT, 1, 10**6, True)
    lives.ask(client, JOIN, b"j", b"member", 1, 1, 0, 1, None)
    lives.live(5.0)
    for _ in range(40):
        lives.restart()
        client = lives.open(LOST)
        lives.live(10.0)
    assert b"job/j/members/" in lives.space.histories
    lives.ask(client, LEAVE, b"j", 1)
    lives.live(JOB_LINGER_S)
    assert not lives.space.jobs
    lives.live(1.0)
    lives.restart()
    lives.assert_ends_in(lambda: b"job/j/members/" not in lives.space.histories, HISTORY_LINGER_S)


def test_lives_of_which_the_journal_knows_nothing_do_not_count() -> None:
    """Time that may not have passed is never taken from anybody."""
    lives = Lives()
    gone = lease_by_time(lives)
    lives.live(1.0)
    for _ in range(100):
        lives.restart()
        lives.now += 39.0
        lives.store.engine.expire(lives.now)
        assert not gone()
    for _ in range(20):
        lives.restart()
        assert not gone()
        lives.live(1.9)
        lives.now += 1.0  # it is killed before it notes that
    lives.restart()
    lives.live(2.0)
    assert gone()


def test_the_age_never_goes_back_and_grows_with_the_lives_only() -> None:
    lives = Lives()
    lives.live(2.0)
    ages = [lives.store.replay.age]
    for _ in range(5):
        lives.now += 1e6  # nobody was served
        lives.restart()
        ages.append(lives.store.replay.age)
        lives.live(3.0)
    assert [round(age, 6) for age in ages] == [0.0, 2.0, 5.0, 8.0, 11.0, 14.0]
    lives.now -= 50.0  # a clock that goes back after all
    lives.store.engine.expire(lives.now)
    lives.store.commit()
    lives.restart()
    assert round(lives.store.replay.age, 6) == 17.0


def test_daemons_that_do_nothing_but_restart_do_not_let_the_journal_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "SLACK_BYTES", 50_000)
    lives = Lives()
    lives.ask(lives.open(LOST), GRANT, 1, 10**9, False)
    for _ in range(500):
        for _ in range(3):
            lives.live(1.0)
        lives.restart()
        assert len(lives.journal.rows) < 100
    assert min(lives.journal.rows) > 1000
    assert lives.space.leases[1].deadline == lives.now + 10**6 - 499 * 3.0


def test_times_of_an_older_journal_begin_with_the_first_daemon_that_counts() -> None:
    """Up to format 4 its rows have no places for them."""
    lives = Lives()
    sections = [
        (batch.CLIENTS, "", [(LOST, "job")]),
        (batch.LEASES, "job", [(1, 40.0, None), (2, 50.0, LOST)]),
        (batch.HOLDS, "job", [(b"p/", 60.0, None, None)]),
    ]
    lives.journal.rows[1] = msgpack.packb((7, 0, sections))
    lives.store = lives.store.crash(lives.now)
    before = set()
    ended = []
    for life in range(130):
        clients = [client.client_id for client in lives.store.engine.all_clients()]
        found = {*lives.space.leases, *lives.space.holds, *clients}
        ended += [(life, each) for each in before - found]
        if not found:
            break
        before = found
        lives.live(1.0)
        lives.restart()
    assert ended == [(40, 1), (50, 2), (60, b"p/"), (120, LOST)]
