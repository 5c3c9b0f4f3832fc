"""What a restart does where a random program rarely goes: holds that end, sizes of batches, what must not come back."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import msgpack
import pytest
from journal_kit import JournaledEngine, MemoryJournal, contents

from asyncdist_server.engine import history
from asyncdist_server.engine.engine import Client, StoreEngine
from asyncdist_server.journal import batch
from asyncdist_server.journal.batch import BATCH_BYTES, CLEAN, GAPS, ROLLED_BACK, SLACK_BYTES
from asyncdist_server.journal.replay import Replay
from asyncdist_server.wire.messages import (
    ADD,
    APPEND,
    CLIENT_LINGER_S,
    COMPACTED,
    DELETE,
    GRANT,
    HOLD,
    JOIN,
    LOCK,
    OK,
    QUEUE_POP,
    QUEUE_PUSH,
    REVOKE,
    SET,
    SET_LEASED,
    WATCH,
)

CLIENT = b"client-012345678"
STEP_S = history.NOTED_S


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


def test_an_append_costs_what_was_appended() -> None:
    store = Store()
    store.ask(SET, b"static", b"s" * 100_000)
    store.ask(SET, b"log", b"x" * 500_000)
    store.store.commit()
    written = 0
    for number in range(1000):
        store.ask(APPEND, b"log", b"%099d\n" % number)
        written += store.store.commit().bytes
    assert written < 1000 * 300  # with the reply that is remembered
    before = contents(store.store.engine)
    store.restart()
    assert contents(store.store.engine) == before


def test_a_push_and_a_pop_cost_one_item_however_long_the_queue_is() -> None:
    store = Store()
    for _ in range(5000):
        store.ask(QUEUE_PUSH, b"queue", b"item" * 10)
    store.store.commit()
    for _ in range(10):
        store.ask(QUEUE_PUSH, b"queue", b"item" * 10)
        assert store.store.commit().bytes < 200
        store.ask(QUEUE_POP, b"queue", 0)
        assert store.store.commit().bytes < 200


def test_a_member_that_comes_or_goes_costs_as_much_in_a_large_job_as_in_a_small_one() -> None:
    store = Store()
    sizes: dict[int, list[int]] = {}
    for count in (20, 200):
        job = b"of %d" % count
        for lease_id in range(count * 1000, count * 1001):
            store.ask(GRANT, lease_id, 1000, False)
            request = (JOIN, job, b"%d" % lease_id, count + 1, count + 1, 0, lease_id, None)
            assert store.store.engine.request(store.client, (lease_id, *request), store.now) is None
            last = store.store.commit().bytes
        sizes[count] = [last]
        store.ask(REVOKE, count * 1000)
        sizes[count].append(store.store.commit().bytes)
    assert all(abs(large - small) < 30 for small, large in zip(*sizes.values(), strict=True)), sizes
    before = contents(store.store.engine)
    assert len(before["job"]["holds"][b"job/of 200/"][1]) == 199
    store.restart()
    assert contents(store.store.engine) == before


def test_who_holds_a_prefix_is_known_after_any_number_of_cleanings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "SLACK_BYTES", -100_000)
    monkeypatch.setattr(batch, "CLEAN_AT_ONCE_BYTES", 100)
    store = Store()
    for lease_id in range(1, 8):
        store.ask(GRANT, lease_id, 10**6, False)
    for number in range(120):
        store.ask(HOLD, b"p/", number % 7 + 1, 1000 + number)
        if number % 3 == 0:
            store.ask(REVOKE, (number + 3) % 7 + 1)
            store.store.commit()
            store.ask(GRANT, (number + 3) % 7 + 1, 10**6, False)
        store.store.commit()
        before = contents(store.store.engine)
        store.restart()
        assert contents(store.store.engine) == before, number
    assert min(store.journal.rows) > 60


def test_holds_of_an_older_journal_are_held_by_whom_they_name() -> None:
    """Up to format 2 the third place of a row said who: the changes since, and cleaning, go on from there."""
    journal = MemoryJournal()
    leases = [(number, 10.0, None) for number in (1, 2, 3)]
    sections = [
        (batch.LEASES, "job", leases),
        (batch.HOLDS, "job", [(b"p/", 5.0, [1, 2], None), (b"q/", 5.0, [3], None)]),
    ]
    journal.rows[1] = msgpack.packb((7, 0, sections))
    journal.rows[2] = msgpack.packb((7, 0, [(batch.HOLDS, "job", [(b"p/", 5.0, [2], None), (b"q/", None, [], None)])]))
    store = JournaledEngine(journal, 0.0)
    assert contents(store.engine)["job"]["holds"] == {b"p/": (5.0, [2], None)}
    client = store.engine.open("job", lambda reply: None)
    store.engine.request(client, (1, HOLD, b"p/", 3, 6000), 0.0)
    store.commit()
    expected = {b"p/": (6.0, [2, 3], None)}
    for drop in (0, 1, 1):
        with mock.patch.object(batch, "SLACK_BYTES", -10_000 * drop):
            store.commit()
        store = store.crash(0.0)
        assert contents(store.engine)["job"]["holds"] == expected
    assert min(journal.rows) > 2


def test_appending_for_long_costs_in_proportion_and_the_journal_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that only grows is said again as a whole now and then, so that its many pieces can be dropped."""
    monkeypatch.setattr(batch, "SLACK_BYTES", 20_000)
    store = Store()
    store.ask(SET, b"static", b"s" * 10_000)
    sizes = []
    for number in range(6000):
        store.ask(APPEND, b"log", b"%019d\n" % number)
        store.store.engine.frames_sent(store.client, 1)
        store.store.engine.acknowledge(store.client, store.client._frames_sent)
        sizes.append(store.store.commit().bytes)
        assert store.store.maker.bytes <= 2 * store.store.engine.memory_bytes + 150_000
        if number in (1500, 4000):
            store.restart()
    assert sum(sizes) < 6000 * (BATCH_BYTES + 200)
    assert sum(size > 10_000 for size in sizes) > 3  # the value as a whole
    assert min(store.journal.rows) > 3000
    before = contents(store.store.engine)
    store.restart()
    assert contents(store.store.engine) == before


def test_a_value_is_what_was_said_last_of_it_however_it_came_about() -> None:
    """Appends before and after what says the whole value, within one batch and in several."""
    changes = {"a": (APPEND, b"k", b"12"), "s": (SET, b"k", b"3"), "d": (DELETE, b"k"), "n": (ADD, b"k", 1), "c": None}
    for program in itertools.product("asdnc", repeat=4):
        store = Store()
        for name in program:
            change = changes[name]
            if change is None:
                store.store.commit()
            else:
                store.ask(*change)
        before = contents(store.store.engine)
        store.restart()
        assert contents(store.store.engine) == before, program


def test_pieces_of_a_value_that_was_replaced_are_void(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its beginning is dropped first: then there are pieces whose value is not known any more."""
    monkeypatch.setattr(batch, "SLACK_BYTES", -1000)
    monkeypatch.setattr(batch, "CLEAN_AT_ONCE_BYTES", 0)
    store = Store()
    store.ask(SET, b"k", b"first")
    store.store.commit()
    for _ in range(20):
        store.ask(APPEND, b"k", b"piece")
        store.store.commit()
    store.ask(SET, b"k", b"second")
    for number in range(30):
        store.store.commit()
        before = contents(store.store.engine)
        store.restart()
        assert contents(store.store.engine) == before, number
    assert min(store.journal.rows) > 20


def test_a_piece_that_does_not_fit_is_damage() -> None:
    store = Store()
    store.ask(SET, b"k", b"value")
    store.store.commit()
    for start in (4, 6):
        replay = Replay()
        store.journal.read(replay.row)
        with pytest.raises(ValueError, match=rf"{start} bytes of b'k' should be known, and 5 are"):
            replay.row(2, 10, 1, 0, [(batch.PIECES, "job", [(b"k", start, b"more")])])


@pytest.mark.parametrize(("row", "left_s"), [((b"p", 3), 120), ((b"p", 3, 0), 120), ((b"p", 3, 5), 45)])
def test_a_history_of_an_older_journal_has_the_time_that_it_says_in_steps(row: Any, left_s: float) -> None:
    """Format 1 says nothing of it; up to 4 it is counted in steps of 15 s."""
    replay = Replay()
    replay.row(1, 10, 7, 0, [(batch.HISTORIES, "job", [row])])
    engine = StoreEngine(b"")
    replay.fill(engine, 7.0)
    found = engine.namespaces["job"].histories[b"p"]
    assert (found.floor, found.deadline) == (3, 7.0 + left_s)


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
