"""Whatever is done to a store, what its journal brings back is what it held: random programs that crash."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from fewer_cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_kit import JournaledEngine, MemoryJournal, charged, contents

from asyncdist_server.engine.engine import Client, StoreEngine
from asyncdist_server.journal import batch
from asyncdist_server.wire.messages import (
    ADD,
    APPEND,
    COMPARE_SET,
    DELETE,
    DELETE_NAMESPACE,
    GRANT,
    HOLD,
    JOIN,
    LEAVE,
    LOCK,
    MULTI_SET,
    QUEUE_POP,
    QUEUE_PUSH,
    QUEUE_RETURN,
    REVOKE,
    SET,
    SET_LEASED,
    UNLOCK,
    WATCH,
    ProtocolError,
)

NAMES = ("job", "job", "torch/1")
"""The namespaces of the clients."""

keys = st.sampled_from([b"k", b"p/1", b"p/q/2"])
prefixes = st.sampled_from([b"", b"p/", b"job/j/"])
values = st.binary(max_size=12)
leases = st.integers(1, 2)
times_ms = st.integers(1, 5000)
requests = st.one_of(
    st.tuples(st.just(SET), keys, values),
    st.tuples(st.just(ADD), keys, st.integers(-5, 5)),
    st.tuples(st.just(APPEND), keys, values),
    st.tuples(st.just(APPEND), keys, values),
    st.tuples(st.just(COMPARE_SET), keys, values, values),
    st.tuples(st.just(DELETE), keys),
    st.tuples(st.just(MULTI_SET), st.tuples(keys, keys), st.tuples(values, values)),
    st.tuples(st.sampled_from([QUEUE_PUSH, QUEUE_RETURN]), st.just(b"q"), values),
    st.tuples(st.sampled_from([QUEUE_PUSH, QUEUE_RETURN]), st.just(b"q"), values),
    st.tuples(st.just(QUEUE_POP), st.just(b"q"), st.sampled_from([0, None, 1000])),
    st.tuples(st.just(QUEUE_POP), st.just(b"q"), st.sampled_from([0, None, 1000])),
    st.tuples(st.just(GRANT), leases, times_ms, st.booleans()),
    st.tuples(st.just(REVOKE), leases),
    st.tuples(st.just(SET_LEASED), keys, values, leases),
    st.tuples(st.just(HOLD), prefixes, leases, times_ms),
    st.tuples(st.just(WATCH), prefixes, st.sampled_from([None, 1, 5]), st.sampled_from([0, None, 1000])),
    st.tuples(st.just(LOCK), keys, leases, st.sampled_from([0, None, 1000])),
    st.tuples(st.just(UNLOCK), keys, st.integers(1, 20)),
    st.tuples(
        st.just(JOIN),
        st.just(b"j"),
        st.sampled_from([b"m1", b"m2"]),
        st.just(1),
        st.just(2),
        st.just(0),
        leases,
        st.just(None),
    ),
    st.tuples(st.just(LEAVE), st.just(b"j"), leases),
    st.tuples(st.just(DELETE_NAMESPACE)),
)
step = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, len(NAMES) - 1), requests),
    st.tuples(st.just("ask"), st.just(0), requests),
    st.tuples(st.sampled_from(["lose", "leave", "acknowledge"]), st.integers(0, len(NAMES) - 1), st.none()),
    st.tuples(st.just("wait"), st.just(0), st.sampled_from([0.5, 3.0, 200.0])),
    st.tuples(st.sampled_from(["commit", "commit", "crash", "die"]), st.just(0), st.none()),
)
# A short program rarely has a lease with a key and a hold that ends; but only short ones can be read.
programs = st.sampled_from([0, 60, 100]).flatmap(lambda least: st.lists(step, min_size=least, max_size=least + 30))


class Program:
    """Runs steps on an engine that crashes now and then."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store = JournaledEngine(MemoryJournal(), self.now)
        self.clients: dict[int, Client] = {}
        self.frames = [0] * len(NAMES)
        self.last_id = 0
        self.committed: tuple[Any, ...] = {}, {}, 0, {}

    @property
    def engine(self) -> StoreEngine:
        return self.store.engine

    def client(self, number: int) -> Client:
        if number not in self.clients:
            client_id = b"client-%d........" % number
            pending = tuple(range(1, self.last_id + 1, 2))  # as if every other answer had been lost
            opened = self.engine.open(
                NAMES[number], lambda reply: None, client_id=client_id, pending=pending, now=self.now
            )
            opened.read_only = NAMES[number].startswith("torch/")
            self.clients[number] = opened
            self.frames[number] = 0
        return self.clients[number]

    def step(self, kind: str, number: int, argument: Any) -> None:
        if kind == "ask":
            self.last_id += 1
            client = self.client(number)
            with contextlib.suppress(ProtocolError):
                self.engine.request(client, (self.last_id, *argument), self.now)
            self.frames[number] += 1
            self.engine.frames_sent(client, 1)
        elif kind == "acknowledge" and number in self.clients:
            self.engine.acknowledge(self.clients[number], self.frames[number])
        elif kind in ("lose", "leave") and number in self.clients:
            client = self.clients.pop(number)
            client.leaving = kind == "leave"
            self.engine.close(client, self.now)
        elif kind == "wait":
            self.now += argument
            self.engine.expire(self.now)
        elif kind == "commit":
            self.commit()
        elif kind == "crash":
            self.commit()
            self.die()
        elif kind == "die":
            self.die()

    def commit(self) -> None:
        self.store.commit()
        self.committed = contents(self.engine), self.taken(), self.engine.state.revision, self.remembered()

    def die(self) -> None:
        """Lose all that was not committed."""
        *before, remembered = self.committed
        self.store = self.store.crash(self.now)
        self.clients.clear()
        assert [contents(self.engine), self.taken(), self.engine.state.revision] == before
        assert self.engine.memory_bytes == charged(self.engine)
        found = self.remembered()
        assert found.keys() == remembered.keys()
        for client_id, replies in remembered.items():
            assert {number: found[client_id].get(number) for number in replies} == replies

    def taken(self) -> dict[bytes, list[tuple[bytes, bytes]]]:
        """Queue and item of each pop whose reply the client is not known to have."""
        found = {
            client.client_id: sorted(client.unacknowledged_items())
            for client in self.engine.all_clients()
            if client.client_id is not None
        }
        return {client_id: items for client_id, items in found.items() if items}

    def remembered(self) -> dict[bytes, dict[int, Any]]:
        """The replies each client may ask for again."""
        every = tuple(range(1, self.last_id + 1))
        return {
            client.client_id: {
                number: (code, _plain(value)) for number, (_, code, value) in client.replies_to_resume(every).items()
            }
            for client in self.engine.all_clients()
            if client.client_id is not None and not client.namespace.name.startswith("torch/")
        }


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


@settings(max_examples=examples(27))
@given(programs, st.sampled_from([0, 300, 1 << 20]))
def test_a_journal_brings_back_what_the_store_held(program: list[tuple[str, int, Any]], slack: int) -> None:
    with (
        mock.patch.object(batch, "SLACK_BYTES", slack - 5000),
        mock.patch.object(batch, "CLEAN_AT_ONCE_BYTES", 200),
        mock.patch.object(batch, "PART_BYTES", 60),
    ):
        run = Program()
        for step in (*program, ("crash", 0, None), ("crash", 0, None)):
            run.step(*step)
