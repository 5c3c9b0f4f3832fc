"""The engine against a model in dicts and lists: any requests of several clients, leases, locks, members, lost clients.

Every reply is compared, at once or late, and every change that a watcher is told; after each step the books of the
engine are counted afresh. ASYNCDIST_MODEL_EXAMPLES asks for more than some seconds' worth: `make sim` does.
"""

from __future__ import annotations

import math
import os
from typing import Any

from engine_driver import EngineDriver
from engine_model import LeaseModel, Waiting
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from asyncdist_server.engine.membership import JOB_LINGER_S
from asyncdist_server.serving.config import limits_for
from asyncdist_server.wire import messages as m

EXAMPLES = int(os.environ.get("ASYNCDIST_MODEL_EXAMPLES", "40"))

KEYS = st.sampled_from([b"a", b"b", b"held/c"])
VALUES = st.sampled_from([b"", b"1", b"22", b"x", b" -7y", b"9223372036854775807", b"v" * 40])
TIMEOUTS = st.none() | st.integers(0, 3000)
CLIENTS = st.integers(0, 2)
LEASES = st.integers(1, 4)
NAMES = st.sampled_from([b"m1", b"m2", b"m3"])


class EngineMachine(EngineDriver):
    """Each rule runs a request on both sides."""

    # ---- keys

    @rule(number=CLIENTS, key=KEYS, value=VALUES)
    def set(self, number: int, key: bytes, value: bytes) -> None:
        if self._done(number, m.SET, key, value):
            self.model.put(key, value)

    @rule(number=CLIENTS, key=KEYS, value=VALUES)
    def append(self, number: int, key: bytes, value: bytes) -> None:
        if self._done(number, m.APPEND, key, value):
            self.model.put(key, self.model.values.get(key, b"") + value, keep=True)

    @rule(number=CLIENTS, key=KEYS, amount=st.integers(-5, 5) | st.sampled_from([2**63 - 1, -(2**63)]))
    def add(self, number: int, key: bytes, amount: int) -> None:
        code, value = self._outcome(number, m.ADD, key, amount)
        if not self._refusable(code):
            total = self.model.add(key, amount)
            assert (code, value if code == m.OK else None) == (m.INVALID if total is None else m.OK, total)

    @rule(number=CLIENTS, key=KEYS, expected=VALUES, desired=VALUES)
    def compare_set(self, number: int, key: bytes, expected: bytes, desired: bytes) -> None:
        code, value = self._outcome(number, m.COMPARE_SET, key, expected, desired)
        if not self._refusable(code):
            assert (code, value) == (m.OK, self.model.compare_set(key, expected, desired))

    @rule(number=CLIENTS, pairs=st.lists(st.tuples(KEYS, VALUES), max_size=3))
    def multi_set(self, number: int, pairs: list[tuple[bytes, bytes]]) -> None:
        arguments = tuple(zip(*pairs, strict=True)) or ((), ())
        if self._done(number, m.MULTI_SET, *arguments):
            self.model.values.update(pairs)  # all at one moment
            for key, value in dict(pairs).items():
                self.model.put(key, value)

    @rule(number=CLIENTS, key=KEYS)
    def delete(self, number: int, key: bytes) -> None:
        deleted = self._ok(number, m.DELETE, key)
        assert deleted is self.model.remove(key)

    @rule(number=CLIENTS, keys=st.lists(KEYS, max_size=3))
    def look(self, number: int, keys: list[bytes]) -> None:
        model = self.model
        assert self._ok(number, m.CHECK, tuple(keys)) is all(model.present(m.WAIT, key) for key in keys)
        assert sorted(self._ok(number, m.LIST_KEYS, b"", b"")[1]) == sorted(model.values)
        assert sorted(self._ok(number, m.LIST_KEYS, b"held/", b"")[1]) == [
            key for key in model.values if key[:5] == b"held/"
        ]
        assert self._ok(number, m.NUM_KEYS) == len(model.values)
        assert self._ok(number, m.QUEUE_LEN, b"a") == len(model.queues.get(b"a", ()))
        assert self._ok(number, m.PING) is None
        assert self._ok(number, m.WAITS, False)[0] == len(model.waiting)
        assert self._ok(number, m.STATUS)["leases"] == len(model.leases)

    @rule(
        number=CLIENTS,
        operation=st.sampled_from([m.GET, m.WAIT, m.MULTI_GET]),
        keys=st.lists(KEYS, min_size=1, max_size=3),
        timeout_ms=TIMEOUTS,
    )
    def read(self, number: int, operation: int, keys: list[bytes], timeout_ms: int | None) -> None:
        wanted = tuple(keys[:1] if operation == m.GET else keys)
        waiter = self._waits(number, operation, wanted, timeout_ms)
        reply = self._ask(number, operation, wanted[0] if operation == m.GET else wanted, timeout_ms)
        missing = self.model.missing(waiter)
        if not missing:
            assert reply is not None
            assert reply[1:] == (m.OK, self.model.read(operation, wanted))
        elif timeout_ms == 0:
            assert reply is not None
            assert reply[1:] == (m.TIMEOUT, missing)
        else:
            self._begins_to_wait(waiter, reply)

    @rule(number=CLIENTS, key=KEYS, item=VALUES, at_head=st.booleans())
    def push(self, number: int, key: bytes, item: bytes, at_head: bool) -> None:
        if self._done(number, m.QUEUE_RETURN if at_head else m.QUEUE_PUSH, key, item):
            self.model.push(key, item, at_head)

    @rule(number=CLIENTS, key=KEYS, timeout_ms=TIMEOUTS)
    def pop(self, number: int, key: bytes, timeout_ms: int | None) -> None:
        waiter = self._waits(number, m.QUEUE_POP, (key,), timeout_ms)
        reply = self._ask(number, m.QUEUE_POP, key, timeout_ms)
        item = self.model.pop(key)
        if item is not None or timeout_ms == 0:
            assert reply is not None
            assert reply[1:] == ((m.TIMEOUT, [key]) if item is None else (m.OK, item))
        else:
            self._begins_to_wait(waiter, reply)

    @rule(number=CLIENTS)
    def delete_namespace(self, number: int) -> None:
        assert self._ok(number, m.DELETE_NAMESPACE) == self.model.clear()

    # ---- leases, locks

    @rule(number=CLIENTS, lease=LEASES, ttl_ms=st.integers(1, 3000), bound=st.booleans())
    def grant(self, number: int, lease: int, ttl_ms: int, bound: bool) -> None:
        code, _ = self._outcome(number, m.GRANT, lease, ttl_ms, bound)
        if lease in self.model.leases:
            assert code == m.INVALID
        elif not self._refusable(code):
            assert code == m.OK
            ends = math.inf if bound else self.model.now + ttl_ms / 1000
            self.model.leases[lease] = LeaseModel(ttl_ms / 1000, ends, number if bound else None)

    @rule(number=CLIENTS, lease=LEASES)
    def keep_alive(self, number: int, lease: int) -> None:
        unknown = self._ok(number, m.KEEP_ALIVE, (lease,))
        known = self.model.leases.get(lease)
        assert unknown == ([] if known else [lease])
        if known and known.ends < math.inf:
            known.ends = self.model.now + known.ttl_s

    @rule(number=CLIENTS, lease=LEASES)
    def revoke(self, number: int, lease: int) -> None:
        assert self._ok(number, m.REVOKE, lease) is (lease in self.model.leases)
        if lease in self.model.leases:
            self.model.end_lease(lease, m.EVENT_DELETE)

    def _under_lease(self, lease: int, outcome: tuple[int, Any]) -> bool:
        """Whether something was done that needs a lease."""
        if lease not in self.model.leases:
            assert outcome[0] == m.LEASE_LOST
            return False
        assert outcome[0] == m.OK or self._refusable(outcome[0]), outcome
        return outcome[0] == m.OK

    @rule(number=CLIENTS, lease=LEASES, key=KEYS, value=VALUES)
    def set_leased(self, number: int, lease: int, key: bytes, value: bytes) -> None:
        if self._under_lease(lease, self._outcome(number, m.SET_LEASED, key, value, lease)):
            self.model.put(key, value, lease)

    @rule(number=CLIENTS, lease=LEASES, linger_ms=st.integers(0, 1500))
    def hold(self, number: int, lease: int, linger_ms: int) -> None:
        if self._under_lease(lease, self._outcome(number, m.HOLD, b"held/", lease, linger_ms)):
            self.model.hold(b"held/", lease, linger_ms / 1000)

    @rule(number=CLIENTS, lease=LEASES, key=KEYS, timeout_ms=TIMEOUTS)
    def lock(self, number: int, lease: int, key: bytes, timeout_ms: int | None) -> None:
        waiter = self._waits(number, m.LOCK, (key,), timeout_ms, lease=lease)
        reply = self._ask(number, m.LOCK, key, lease, timeout_ms)
        if lease not in self.model.leases:
            assert reply is not None
            assert reply[1] == m.LEASE_LOST
        elif key not in self.model.values:
            assert reply is not None
            if not self._refusable(reply[1]):
                self.model.put(key, b"%d" % self._checked(reply[2]), lease)
        elif timeout_ms == 0:
            assert reply is not None
            assert reply[1:] == (m.TIMEOUT, [key])
        else:
            self._begins_to_wait(waiter, reply)

    @rule(number=CLIENTS, key=KEYS, wrong=st.booleans())
    def unlock(self, number: int, key: bytes, wrong: bool) -> None:
        value = self.model.values.get(key, b"")
        token = int(value) + wrong if value.isdigit() and len(value) < 19 and value == b"%d" % int(value) else 0
        held = value == b"%d" % token
        assert self._ok(number, m.UNLOCK, key, token) is held
        if held:
            self.model.remove(key)

    # ---- members

    @rule(number=CLIENTS, name=NAMES, lease=LEASES, timeout_ms=st.none() | st.integers(1, 3000))
    def join(self, number: int, name: bytes, lease: int, timeout_ms: int | None) -> None:
        job = self.model.job
        waiter = self._waits(number, m.JOIN, (b"j",), timeout_ms, lease=lease, member=name)
        settle_ms = round(job.settle_s * 1000)
        revision = self.engine.state.revision
        reply = self._ask(number, m.JOIN, b"j", name, job.least, job.most, settle_ms, lease, timeout_ms)
        if lease not in self.model.leases:
            assert reply is not None
            assert reply[1] == m.LEASE_LOST
        elif reply is not None and self._refusable(reply[1]):
            self._could_not_wait(waiter, came=self.engine.state.revision > revision)
        elif self.model.join(waiter):
            assert reply is not None
            assert reply[1] == m.INVALID
        else:
            assert reply is None

    def _could_not_wait(self, waiter: Waiting, came: bool) -> None:
        """A member that was let in, or in already, and then met a limit, has left."""
        model, name = self.model, waiter.member
        if came and name not in model.job.members:
            model.put(model.PREFIX + b"members/" + name, b"%d" % waiter.lease, waiter.lease)
            if model.PREFIX not in self.engine.namespaces["job"].holds:
                model.remove(model.PREFIX + b"members/" + name)
                return
            model.hold(model.PREFIX, waiter.lease, JOB_LINGER_S)
            model.job.members[name] = waiter.lease
        if model.job.members.get(name) == waiter.lease:
            model.lose(name, m.EVENT_DELETE)

    @rule(number=CLIENTS, lease=LEASES)
    def leave(self, number: int, lease: int) -> None:
        names = [name for name, number in self.model.job.members.items() if number == lease]
        assert self._ok(number, m.LEAVE, b"j", lease) is bool(names)
        for name in names:
            self.model.lose(name, m.EVENT_DELETE)

    # ---- what happens to clients and requests

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.model.waiting))
        cancelled = self._ok(waiter.client, m.CANCEL, waiter.request_id)
        assert cancelled is (waiter in self.model.waiting)
        if cancelled:
            self.model.finish(waiter, m.CANCELLED, "withdrawn by the client")
            if waiter.entered:
                self.model.lose(waiter.member, m.EVENT_DELETE)

    @rule(number=CLIENTS, away_ms=st.sampled_from([0, 0, 100, 2000]), goodbye=st.booleans())
    def lose_connection(self, number: int, away_ms: int, goodbye: bool) -> None:
        if goodbye:
            self._ok(number, m.GOODBYE)
        self.engine.close(self.clients[number], self.model.now)
        self.model.client_went(number, goodbye or number == 2)
        self.compare()
        self.pass_time(away_ms)
        self.compare()
        self.clients[number] = self._open(number)

    # Sequences that chance would rarely hit upon.

    @rule(number=st.integers(0, 1), lease=LEASES, key=KEYS)
    def come_back_in_time(self, number: int, lease: int, key: bytes) -> None:
        """A bound lease outlives a short absence."""
        self.revoke(number, lease)
        self.grant(number, lease, 500, True)
        self.set_leased(number, lease, key, b"1")
        self.lose_connection(number, 100, False)
        self.pass_time(700)
        self.compare()

    @rule(number=CLIENTS, name=NAMES, lease=LEASES)
    def join_and_leave(self, number: int, name: bytes, lease: int) -> None:
        """Who leaves before the round is complete takes its time with it."""
        self.grant(number, lease, 3000, False)
        self.join(number, name, lease, None)
        self.compare()
        self.leave(number, lease)
        self.compare()
        self.pass_time(900)
        self.compare()

    @rule(number=st.integers(0, 1), name=NAMES, lease=st.integers(1, 2), other=st.integers(3, 4), timeout_ms=TIMEOUTS)
    def take_a_name(self, number: int, name: bytes, lease: int, other: int, timeout_ms: int | None) -> None:
        """Another client joins under a member's name, before or after the member's connection is lost."""
        self.grant(number, lease, 500, True)
        self.grant(1 - number, other, 500, True)
        self.join(number, name, lease, None)
        self.compare()
        if timeout_ms is None:
            self.join(1 - number, name, other, None)
            self.compare()
            self.lose_connection(number, 100, False)
        else:
            self.lose_connection(number, 0, False)
            self.join(1 - number, name, other, timeout_ms + 1)
        self.compare()
        self.pass_time(700)
        self.compare()

    @rule(number=st.integers(0, 1), key=KEYS, framed=st.booleans())
    def retry(self, number: int, key: bytes, framed: bool) -> None:
        """An append and a pop whose replies are lost with the connection are applied once."""
        self.deaf = number
        requests = [(self.next_id, m.APPEND, key, b"r"), (self.next_id + 1, m.QUEUE_POP, key, 0)]
        self.next_id += 2
        first = [self.engine.request(self.clients[number], request, self.model.now) for request in requests]
        if framed:
            self.engine.frames_sent(self.clients[number], 1)
        assert first[0] is not None
        if first[0][1] == m.OK:
            self.model.put(key, self.model.values.get(key, b"") + b"r", keep=True)
        item = self.model.pop(key)
        assert first[1] is not None
        assert first[1][1:] == ((m.TIMEOUT, [key]) if item is None else (m.OK, item))
        self.compare()
        self.engine.close(self.clients[number], self.model.now)
        self.model.client_went(number, for_good=False)
        self.compare()
        self.deaf = None
        self.clients[number] = self._open(number, (requests[0][0], requests[1][0]))
        assert self.clients[number].resumed
        assert [self.engine.request(self.clients[number], request, self.model.now) for request in requests] == first
        self._confirm(number)


class SmallEngineMachine(EngineMachine):
    """The same within limits that are reached all the time: what is refused changes nothing."""

    limits = limits_for(45, memory_bytes=9_000, waiters=3, in_flight=40, items=3)


SETTINGS = settings(max_examples=EXAMPLES, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow])
EngineMachine.TestCase.settings = SETTINGS
SmallEngineMachine.TestCase.settings = SETTINGS
TestEngineModel = EngineMachine.TestCase
TestSmallEngineModel = SmallEngineMachine.TestCase
