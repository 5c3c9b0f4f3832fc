"""How much a restart has to read, whatever was done before: rows, replies, and the memory that noting them needs."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import msgpack
import pytest
from journal_kit import JournaledEngine, MemoryJournal, charged, contents

from asyncdist_server.engine.engine import Client
from asyncdist_server.journal import batch
from asyncdist_server.journal.batch import BATCH_BYTES, ESTIMATE_BYTES, SLACK_BYTES, said_once_bytes
from asyncdist_server.wire.messages import ADD, GRANT, OK, QUEUE_POP, QUEUE_PUSH, SET, SET_LEASED, WATCH

CLIENT = b"client-012345678"


class Store:
    """A journaled engine whose one client confirms each answer with its next request, as asyncdist's does."""

    def __init__(self) -> None:
        self.journal = MemoryJournal()
        self.store = JournaledEngine(self.journal, 0.0)
        self.last_id = 0
        self.open()

    def open(self, *pending: int) -> None:
        self.client: Client = self.store.engine.open(
            "job", lambda reply: None, client_id=CLIENT, pending=pending, now=0.0
        )
        self.sent = 0

    def ask(self, *request: Any, request_id: int = 0) -> Any:
        if not request_id:
            self.last_id += 1
            request_id = self.last_id
        self.store.engine.acknowledge(self.client, self.sent)
        reply = self.store.engine.request(self.client, (request_id, *request), 0.0)
        self.store.commit()
        self.sent += 1
        self.store.engine.frames_sent(self.client, 1)
        return None if reply is None else reply[1:]

    def restart(self) -> None:
        self.store = self.store.crash(0.0)


def most_rows(store: Store) -> float:
    """As many rows of one batch each as the journal may have, with what one estimate may be late by."""
    return (2 * said_once_bytes(store.store.engine) + SLACK_BYTES + ESTIMATE_BYTES) / BATCH_BYTES + 1


@pytest.mark.parametrize("held", [0, 1000])
def test_the_rows_that_a_restart_reads_are_bounded_however_many_were_written(held: int) -> None:
    store = Store()
    for number in range(held):
        store.ask(SET, b"held/%d" % number, b"value")
    for _ in range(9000):
        store.ask(ADD, b"counter", 1)
    assert store.journal.writes == held + 9000
    assert len(store.journal.rows) <= most_rows(store)
    before = contents(store.store.engine)
    store.restart()
    assert contents(store.store.engine) == before


def test_what_is_noted_of_a_batch_is_what_it_is_taken_for() -> None:
    """Else many small changes of a store that holds a few large values would need memory that nobody charges."""
    store = Store()
    store.ask(SET, b"large", b"x" * 10_000_000)
    for _ in range(500):
        store.ask(ADD, b"counter", 1)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(3000):
            store.ask(ADD, b"counter", 1)
            store.journal.rows.clear()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 * BATCH_BYTES < (after - before) / 3000 < 1.3 * BATCH_BYTES


def test_the_estimate_is_near_what_saying_everything_once_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    store.ask(GRANT, 1, 10**6, False)
    store.ask(WATCH, b"event/", None, 0)
    for number in range(400):
        store.ask(SET, b"key/%d" % number, b"v" * (number % 60))
        store.ask(SET_LEASED, b"leased/%d" % number, b"v", 1)
        store.ask(QUEUE_PUSH, b"queue/%d" % (number % 9), b"item")
        store.ask(SET, b"event/%d" % (number % 7), b"v" * 40)
        store.ask(GRANT, number + 2, 10**6, False)
    estimate = said_once_bytes(store.store.engine)
    monkeypatch.setattr(batch, "SLACK_BYTES", -(10**9))  # nothing may stay where it is
    monkeypatch.setattr(batch, "CLEAN_AT_ONCE_BYTES", 10**9)
    size = store.store.commit().bytes
    assert 0.5 * estimate < size < 1.5 * estimate


def test_replies_that_have_arrived_are_not_kept_over_a_restart() -> None:
    store = Store()
    for number in range(300):
        assert store.ask(ADD, b"counter", 1) == (OK, number + 1)
    store.restart()
    away = store.store.engine.client(CLIENT)
    assert away is not None
    assert list(away.replay) == [300]  # nobody knows whether the last one has
    assert store.store.engine.memory_bytes == charged(store.store.engine)


def test_a_reply_that_has_not_arrived_is_kept_among_others_that_have() -> None:
    store = Store()
    assert store.ask(QUEUE_POP, b"q", None, request_id=1) is None
    store.last_id = 1
    for _ in range(5):
        store.ask(ADD, b"counter", 1)
    store.ask(QUEUE_PUSH, b"q", b"item")  # 7: answered after the pop that it serves
    for _ in range(3):
        store.store.engine.request(store.client, (store.last_id + 1, ADD, b"counter", 1), 0.0)  # nothing is confirmed
        store.last_id += 1
        store.store.commit()
    store.restart()
    away = store.store.engine.client(CLIENT)
    assert away is not None
    assert {1, 7, 8, 9, 10} <= set(away.replay)
    assert not {2, 3, 4} & set(away.replay)
    store.open(1, 8)
    for request, reply in (((1, QUEUE_POP, b"q", None), (OK, b"item")), ((8, ADD, b"counter", 1), (OK, 6))):
        assert store.store.engine.request(store.client, request, 0.0) == (request[0], *reply)


def test_the_oldest_reply_is_not_looked_for_among_too_many() -> None:
    store = Store()
    for number in range(5):
        store.store.engine.request(store.client, (number + 1, ADD, b"counter", 1), 0.0)
    assert store.client.oldest_remembered(5) == 1
    assert store.client.oldest_remembered(4) == 0


def test_replies_of_an_older_journal_are_all_kept() -> None:
    """Up to format 3 nothing said which of them had arrived."""
    journal = MemoryJournal()
    journal.rows[1] = msgpack.packb(
        (3, 0, [(batch.CLIENTS, "", [(CLIENT, "job")]), (batch.REPLIES, "", [(CLIENT, [(1, OK, 1), (2, OK, 2)])])])
    )
    journal.rows[2] = msgpack.packb((3, 0, [(batch.REPLIES, "", [(CLIENT, [(3, OK, 3)])])]))
    away = JournaledEngine(journal, 0.0).engine.client(CLIENT)
    assert away is not None
    assert list(away.replay) == [1, 2, 3]
