"""What a restart does where a random program rarely goes: holds that end, sizes of batches, what must not come back."""

from __future__ import annotations

from typing import Any

import pytest
from journal_kit import JournaledEngine, MemoryJournal, contents

from asyncdist_server import batch, history
from asyncdist_server.batch import CLEAN, GAPS, ROLLED_BACK, SLACK_BYTES
from asyncdist_server.engine import Client
from asyncdist_server.messages import (
    ADD,
    CLIENT_LINGER_S,
    COMPACTED,
    DELETE,
    GRANT,
    HOLD,
    LOCK,
    OK,
    QUEUE_POP,
    QUEUE_PUSH,
    SET,
    SET_LEASED,
    WATCH,
)

CLIENT = b"client-012345678"
STEP_S = history.HISTORY_LINGER_S / history.HISTORY_STEPS


class Store:
    """A journaled engine with one client that asks."""

    def __init__(self) -> None:
        self.now = 10.0
        self.journal = MemoryJournal()
        self.store = JournaledEngine(self.journal, self.now)
        self.client = self.open()
        self.last_id = 0

    def open(self, pending: tuple[int, ...] = ()) -> Client:
        return self.store.engine.open("job", lambda reply: None, client_id=CLIENT, pending=pending, now=self.now)

    def ask(self, *request: Any) -> tuple[int, Any]:
        self.last_id += 1
        reply = self.store.engine.request(self.client, (self.last_id, *request), self.now)
        assert reply is not None
        return reply[1:]

    def restart(self, pending: tuple[int, ...] = (), flags: int = 0) -> None:
        self.store.commit(flags)
        self.store = self.store.crash(self.now)
        self.client = self.open(pending)


def test_a_hold_that_ended_does_not_come_back() -> None:
    store = Store()
    store.ask(GRANT, 1, 1000, False)
    store.ask(HOLD, b"p/", 1, 1000)
    store.ask(SET, b"p/key", b"")
    store.store.commit()
    store.now += 1.5
    store.store.engine.expire(store.now)
    store.restart()
    assert list(contents(store.store.engine)["job"]["holds"]) == [b"p/"]
    store.now += 1.5
    store.store.engine.expire(store.now)
    store.restart()
    assert contents(store.store.engine) == {}


def test_a_lease_begins_anew() -> None:
    store = Store()
    store.ask(GRANT, 1, 1000, False)
    store.ask(SET_LEASED, b"key", b"", 1)
    store.now += 0.9
    store.restart()
    store.now += 0.9
    store.store.engine.expire(store.now)
    assert b"key" in store.store.engine.namespaces["job"].values
    store.now += 0.2
    store.store.engine.expire(store.now)
    assert b"key" not in store.store.engine.namespaces["job"].values


def test_revisions_and_tokens_never_go_back() -> None:
    store = Store()
    store.ask(GRANT, 1, 1000, False)
    code, token = store.ask(LOCK, b"lock", 1, 0)
    assert code == OK
    store.ask(DELETE, b"lock")
    store.restart()
    assert store.ask(LOCK, b"lock", 1, 0)[1] > token


def test_a_client_is_known_after_a_restart_and_its_retries_are_answered() -> None:
    store = Store()
    assert store.ask(ADD, b"n", 1) == (OK, 1)
    store.restart(pending=(1,))
    assert store.client.resumed
    assert store.store.engine.request(store.client, (1, ADD, b"n", 1), store.now) == (1, OK, 1)
    assert store.ask(ADD, b"n", 1)[1] == 2


def test_a_client_that_was_forgotten_stays_forgotten() -> None:
    """Else a retry would be applied twice: the client would be taken for one whose replies are all remembered."""
    store = Store()
    store.ask(ADD, b"n", 1)
    store.store.commit()
    store.store.engine.close(store.client, store.now)
    store.now += CLIENT_LINGER_S + 1
    store.store.engine.expire(store.now)
    store.restart(pending=(1,))
    assert not store.client.resumed


def test_an_item_that_went_to_a_waiting_client_is_in_its_reply() -> None:
    store = Store()
    store.store.engine.request(store.client, (100, QUEUE_POP, b"q", None), store.now)
    store.ask(QUEUE_PUSH, b"q", b"item")
    store.restart(pending=(100,))
    assert store.store.engine.request(store.client, (100, QUEUE_POP, b"q", None), store.now) == (100, OK, b"item")
    assert "job" not in contents(store.store.engine)


@pytest.mark.parametrize("flags", [CLEAN, GAPS, ROLLED_BACK])
def test_watches_go_on_only_where_no_event_can_be_missing(flags: int) -> None:
    store = Store()
    _, (start, _) = store.ask(WATCH, b"", None, 0)
    store.ask(SET, b"key", b"value")
    store.store.commit()
    store.restart(flags=flags)
    code, answer = store.ask(WATCH, b"", start, 0)
    assert code == (OK if flags == CLEAN else COMPACTED)
    assert flags != CLEAN or answer == (start + 1, [(start, 1, b"key", b"value")])
    assert store.client.resumed == (flags != ROLLED_BACK)


def test_a_journal_stays_in_proportion_to_what_the_store_holds() -> None:
    store = Store()
    for number in range(600):
        store.ask(SET, b"static/%d" % number, b"x" * 1000)
    store.ask(GRANT, 1, 10**6, False)
    store.ask(HOLD, b"held/", 1, 1000)
    store.ask(QUEUE_PUSH, b"queue", b"item")
    store.ask(WATCH, b"watched/", None, 0)
    store.ask(SET, b"watched/key", b"event")
    store.store.commit()
    for number in range(4000):
        store.ask(SET, b"hot/%d" % (number % 7), b"%d" % number * 1000)
        store.store.engine.frames_sent(store.client, 1)
        store.store.engine.acknowledge(store.client, number + 1)
        store.store.commit()
        assert store.store.maker.bytes <= 2 * store.store.engine.memory_bytes + SLACK_BYTES + 100_000
    assert store.journal.writes == 4001
    size = sum(map(len, store.journal.rows.values()))
    assert size < 2 * store.store.engine.memory_bytes + SLACK_BYTES
    assert min(store.journal.rows) > 1000  # what was said at the beginning was said again
    before = contents(store.store.engine)
    store.restart()
    assert contents(store.store.engine) == before


def test_events_that_were_dropped_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "HISTORY_EVENTS", 3)
    store = Store()
    store.ask(WATCH, b"", None, 0)
    for number in range(10):
        store.ask(SET, b"key", b"%d" % number)
        store.store.commit()
    before = contents(store.store.engine)
    assert len(before["job"]["histories"][b""][1]) == 3
    store.restart()
    assert contents(store.store.engine) == before
    store.store.engine.state.recorder.make_room(1)
    before = contents(store.store.engine)
    assert len(before["job"]["histories"][b""][1]) == 2
    store.restart()
    assert contents(store.store.engine) == before


def test_a_history_that_ended_does_not_come_back() -> None:
    store = Store()
    store.ask(WATCH, b"", None, 0)
    store.restart()
    assert b"" in contents(store.store.engine)["job"]["histories"]
    store.now += history.HISTORY_LINGER_S + 1
    store.store.engine.expire(store.now)
    store.restart()
    assert contents(store.store.engine) == {}


def test_restarts_prolong_the_history_of_a_prefix_nobody_watches_by_a_step_at_most() -> None:
    store = Store()
    store.ask(WATCH, b"", None, 0)
    store.ask(WATCH, b"watched", None, 0)
    unwatched_s = 0.0
    while b"" in store.store.engine.namespaces["job"].histories:
        assert unwatched_s < 3 * history.HISTORY_LINGER_S
        for _ in range(2):
            store.now += STEP_S
            unwatched_s += STEP_S
            store.store.engine.expire(store.now)
        store.ask(WATCH, b"watched", None, 0)
        store.now += 0.5 * STEP_S
        unwatched_s += 0.5 * STEP_S
        store.restart()
    restarts = store.journal.writes
    assert history.HISTORY_LINGER_S <= unwatched_s <= history.HISTORY_LINGER_S + (restarts + 1) * STEP_S / 2
    assert b"watched" in store.store.engine.namespaces["job"].histories


def test_a_history_that_was_watched_stays_in_full_after_a_restart() -> None:
    store = Store()
    _, (start, _) = store.ask(WATCH, b"", None, 0)
    store.now += history.HISTORY_LINGER_S - 1
    store.store.engine.expire(store.now)
    store.ask(WATCH, b"", start, 0)
    store.restart()
    store.now += history.HISTORY_LINGER_S - 1
    store.store.engine.expire(store.now)
    assert store.ask(WATCH, b"", start, 0)[0] != COMPACTED
    assert b"" in store.store.engine.namespaces["job"].histories


def test_a_large_change_is_cut_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PART_BYTES", 30_000)
    store = Store()
    for number in range(20):
        store.ask(SET, b"%d" % number, b"x" * 9000)
    store.ask(SET, b"huge", b"x" * 100_000)
    made = store.store.commit()
    assert len(made.parts) > 5
    sizes = [len(contents) for contents in store.journal.rows.values()]
    assert sorted(sizes)[-1] > 100_000
    assert sorted(sizes)[-2] < 31_000
    store.restart()
    assert len(store.store.engine.namespaces["job"].values) == 21


def test_torch_keys_are_not_in_the_journal() -> None:
    store = Store()
    torch = store.store.engine.open("torch/29500", lambda reply: None)
    store.store.engine.request(torch, (1, SET, b"key", b""), store.now)
    assert not store.store.engine.namespaces["torch/29500"].changes
    store.restart()
    assert "torch/29500" not in store.store.engine.namespaces
