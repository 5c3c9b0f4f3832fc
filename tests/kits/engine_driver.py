"""Asks the engine and the model the same, and compares them: what the rules of `test_engine_model` are made of."""

from __future__ import annotations

import math
from typing import Any

import engine_books
from engine_model import JobModel, StoreModel, Waiting
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncdist_server.engine.clients import Reply
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.messages import Limits

TICK_S = 1e-4 * math.sqrt(2)
"""Between two requests, so that nothing ever is due at the same instant as something else."""
REPLIES_BYTES = 5_000
"""Remembered replies are charged, and bounded by their number, when the request has long been let in."""


class EngineDriver(RuleBasedStateMachine):
    """An engine with four clients, and the model of it. After every step all that both hold is compared."""

    limits = Limits()

    def __init__(self) -> None:
        super().__init__()
        self.engine = StoreEngine(b"i" * 16, self.limits)
        self.next_id = 1
        self.late: list[list[Reply]] = [[], [], [], []]
        self.last_token = 0
        self.frames = [0, 0, 0, 0]
        self.deaf: int | None = None  # the client that gets nothing of what it is told

    @initialize(least=st.integers(1, 2), more=st.integers(0, 1), settle_ms=st.sampled_from([0, 700]))
    def begin(self, least: int, more: int, settle_ms: int) -> None:
        """Draw the bounds of the job, connect, and watch everything."""
        self.model = StoreModel(JobModel(least, least + more, settle_ms / 1000))
        self.model.token = self._token_told
        self.clients = [self._open(number) for number in range(4)]  # the last only watches
        self.watched: int = self._ok(3, m.WATCH, b"", None, None)[0]

    def _open(self, number: int, pending: tuple[int, ...] = ()) -> Any:
        client_id = None if number == 2 else bytes([number]) * 16  # the third never comes back
        self.model.client_came(number)
        self.frames[number] = 0
        late: list[Reply] = []
        self.late[number] = late
        return self.engine.open("job", late.append, client_id=client_id, pending=pending, now=self.model.now)

    def _token_told(self, request_id: int) -> int:
        """Look up what the engine told a request that waited for a lock."""
        [token] = [reply[2] for late in self.late for reply in late if reply[0] == request_id]
        return self._checked(token)

    def _checked(self, token: int) -> int:
        assert token > self.last_token, "a fencing token went back"
        self.last_token = token
        return token

    def _ask(self, number: int, operation: int, *arguments: Any) -> Reply | None:
        self.model.now += TICK_S
        self._expire()
        request_id = self.next_id
        self.next_id += 1
        reply = self.engine.request(self.clients[number], (request_id, operation, *arguments), self.model.now)
        self.engine.frames_sent(self.clients[number], 1)
        self.engine.acknowledge(self.clients[number], self.frames[number])
        self.frames[number] += 1
        assert reply is None or reply[0] == request_id
        return reply

    def _confirm(self, number: int) -> None:
        """Say that the client has read all that it was told: else an item of a queue goes back when it is lost."""
        if not self.clients[number].closed:
            self.frames[number] += 1
            self.engine.frames_sent(self.clients[number], 1)
            self.engine.acknowledge(self.clients[number], self.frames[number])

    def _outcome(self, number: int, operation: int, *arguments: Any) -> tuple[int, Any]:
        """Return code and value of a reply that comes at once."""
        reply = self._ask(number, operation, *arguments)
        assert reply is not None
        return reply[1], reply[2]

    def _ok(self, number: int, operation: int, *arguments: Any) -> Any:
        code, value = self._outcome(number, operation, *arguments)
        assert code == m.OK, value
        return value

    def _done(self, number: int, operation: int, *arguments: Any) -> bool:
        """Run what returns nothing; false if a limit did not let it."""
        code, value = self._outcome(number, operation, *arguments)
        assert code == m.OK or self._refusable(code), value
        return code == m.OK

    def _refusable(self, code: int) -> bool:
        return code == m.LIMIT and self.limits != Limits()

    def _expire(self) -> None:
        self.engine.expire(self.model.now)
        self.model.expire()

    def _waits(
        self, number: int, operation: int, keys: tuple[bytes, ...], timeout_ms: int | None, **more: Any
    ) -> Waiting:
        now = self.model.now + TICK_S
        deadline = math.inf if timeout_ms is None else now + timeout_ms / 1000
        return Waiting(number, self.next_id, operation, keys, deadline, **more)

    def _begins_to_wait(self, waiter: Waiting, reply: Reply | None) -> None:
        if reply is None:
            self.model.waiting.append(waiter)
        else:
            assert self._refusable(reply[1]), reply

    # ---- what is always possible

    @rule()
    def watch(self) -> None:
        """Read what the watcher has not seen yet; what goes with one lease or hold has the order of its keys."""
        while True:
            code, value = self._outcome(3, m.WATCH, b"", self.watched, 0)
            if code == m.COMPACTED and self.limits != Limits():  # events make room for what happens
                self.watched = self._ok(3, m.WATCH, b"", None, None)[0]
                self.model.changes.clear()
                return
            if code == m.TIMEOUT:
                assert not self.model.changes
                return
            assert code == m.OK, value
            self.watched, events = value
            seen = [event[1:] for event in events]
            assert sorted(seen) == sorted(self.model.changes[: len(seen)])
            assert [event[0] for event in events] == sorted({event[0] for event in events})
            del self.model.changes[: len(seen)]

    @rule(milliseconds=st.integers(0, 2500) | st.sampled_from([40_000]))
    def pass_time(self, milliseconds: int) -> None:
        """Stop at each instant at which something is due."""
        self.watch()  # or nobody would remember the changes
        until = self.model.now + milliseconds / 1000
        while (due := self.engine.next_deadline()) is not None and due <= until:
            self.model.now = max(self.model.now, due)
            self._expire()
        self.model.now = until
        self._expire()

    # ---- what is always true

    @invariant()
    def compare(self) -> None:
        """Late replies, everything that is held, and the books."""
        for number in range(4):
            expected = [reply for who, reply in self.model.late if who == number]
            untold = {reply[:2] for reply in expected if reply[1:] == (m.TIMEOUT, None)}  # of a join: who is missing
            told = [
                (*reply[:2], None) if reply[:2] in untold else without_revision(reply) for reply in self.late[number]
            ]
            assert sorted(told, key=repr) == sorted(expected, key=repr)
            if told and number != self.deaf:
                self._confirm(number)
            self.late[number].clear()
        self.model.late.clear()
        space = self.engine.namespaces.get("job")
        assert space is not None
        assert space.values == self.model.values
        assert {key: list(queue) for key, queue in space.queues.items()} == self.model.queues
        assert {key: lease.lease_id for key, lease in space.leased.items()} == self.model.bound
        assert space.leases.keys() == self.model.leases.keys()
        assert space.holds.keys() == self.model.holds.keys()
        assert self.engine.waiter_count == len(self.model.waiting)
        assert not engine_books.problems(self.engine)
        assert self.engine.memory_bytes <= self.limits.memory_bytes + REPLIES_BYTES

    def teardown(self) -> None:
        if not hasattr(self, "clients"):
            return
        self.watch()
        for client in self.clients:
            self.engine.request(client, (self.next_id, m.DELETE_NAMESPACE), self.model.now)
            self.engine.request(client, (self.next_id + 1, m.GOODBYE), self.model.now)
            self.engine.close(client, self.model.now)
        for _ in range(60):
            self.model.now = max(self.model.now, self.engine.next_deadline() or 0.0)
            self.engine.expire(self.model.now)
        assert self.engine.memory_bytes == 0
        assert self.engine.waiter_count == 0
        assert self.engine.next_deadline() is None


def without_revision(reply: Reply) -> Reply:
    """Return the answer to a join without the revision, which the model does not know; any other as it is."""
    request_id, code, value = reply
    return (request_id, code, value[:3]) if type(value) is tuple else reply
