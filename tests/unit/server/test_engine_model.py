"""The engine against a model that is a plain dict: any sequence of requests, retries, time-outs and lost clients.

Leases, and a watcher that reads now and then, are part of it: it must see each change of the model, in order.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncdist_server import messages as m
from asyncdist_server.clients import Reply
from asyncdist_server.engine import StoreEngine

KEYS = st.sampled_from([b"a", b"b", b"c"])
VALUES = st.sampled_from([b"", b"1", b"22", b"x"])
TIMEOUTS = st.none() | st.integers(0, 3000)
CLIENTS = st.integers(0, 2)
LEASES = st.integers(1, 3)


class Waiting:
    """A request the model believes to be blocked."""

    def __init__(self, client: int, request_id: int, operation: int, keys: tuple[bytes, ...], deadline: float | None):
        self.client = client
        self.request_id = request_id
        self.operation = operation
        self.keys = keys
        self.deadline = deadline


class EngineMachine(RuleBasedStateMachine):
    """Each rule runs a request on both sides and compares every reply, at once or late."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = StoreEngine(b"i" * 16)
        self.now = 0.0
        self.next_id = 1
        self.ttl_s: dict[int, float] = {}
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, list[bytes]] = {}
        self.waiting: list[Waiting] = []
        self.late: list[list[Reply]] = [[], [], []]
        self.expected: list[list[Reply]] = [[], [], []]
        self.clients = [self._open(number) for number in range(3)]
        self.leases: dict[int, tuple[float, int | None]] = {}  # when it ends, whose connection it needs; inf: not now
        self.bound: dict[bytes, int] = {}
        self.changes: list[tuple[int, bytes, bytes]] = []
        self.watched = self._value(0, m.WATCH, b"", None, None)[0]

    def _open(self, number: int, pending: tuple[int, ...] = ()) -> Any:
        late: list[Reply] = []
        self.late[number] = late
        return self.engine.open("job", late.append, client_id=bytes([number]) * 16, pending=pending, now=self.now)

    def _ask(self, number: int, operation: int, *arguments: Any) -> Reply | None:
        request_id = self.next_id
        self.next_id += 1
        client = self.clients[number]
        reply = self.engine.request(client, (request_id, operation, *arguments), self.now)
        self.engine.frames_sent(client, 1)
        return reply

    def _value(self, number: int, operation: int, *arguments: Any) -> Any:
        reply = self._ask(number, operation, *arguments)
        assert reply is not None
        assert reply[:2] == (self.next_id - 1, m.OK)
        return reply[2]

    # ---- the model

    def _present(self, waiter: Waiting, key: bytes) -> bool:
        return key in self.values or (waiter.operation == m.WAIT and key in self.queues)

    def _answer(self, waiter: Waiting) -> Any:
        if waiter.operation == m.GET:
            return self.values[waiter.keys[0]]
        return None if waiter.operation == m.WAIT else [self.values[key] for key in waiter.keys]

    def _model_wake(self) -> None:
        """Answer every reader whose keys are all there now; the model looks at all of them every time."""
        for waiter in list(self.waiting):
            if waiter.operation != m.QUEUE_POP and all(self._present(waiter, key) for key in waiter.keys):
                self.waiting.remove(waiter)
                self.expected[waiter.client].append((waiter.request_id, m.OK, self._answer(waiter)))

    def _put(self, key: bytes, value: bytes, keep_lease: bool = False) -> None:
        self.values[key] = value
        if not keep_lease:
            self.bound.pop(key, None)
        self.changes.append((m.EVENT_SET, key, value))
        self._model_wake()

    def _remove(self, key: bytes, kind: int) -> bool:
        if self.values.pop(key, None) is None:
            return False
        self.bound.pop(key, None)
        self.changes.append((kind, key, b""))
        return True

    def _end_lease(self, lease_id: int, kind: int) -> None:
        del self.leases[lease_id]
        for key in [key for key, lease in self.bound.items() if lease == lease_id]:
            self._remove(key, kind)

    # ---- requests

    @rule(number=CLIENTS, key=KEYS, value=VALUES)
    def set(self, number: int, key: bytes, value: bytes) -> None:
        assert self._value(number, m.SET, key, value) is None
        self._put(key, value)

    @rule(number=CLIENTS, key=KEYS, value=VALUES)
    def append(self, number: int, key: bytes, value: bytes) -> None:
        self._value(number, m.APPEND, key, value)
        self._put(key, self.values.get(key, b"") + value, keep_lease=True)

    @rule(number=CLIENTS, key=KEYS, amount=st.integers(-5, 5))
    def add(self, number: int, key: bytes, amount: int) -> None:
        reply = self._ask(number, m.ADD, key, amount)
        assert reply is not None
        stored = self.values.get(key, b"0")
        digits = ""
        for character in stored.decode():
            if not (character.isdigit() or (character == "-" and not digits)):
                break
            digits += character
        if digits in ("", "-") or len(digits) > 18:
            if len(digits) <= 18:
                assert reply[1] == m.INVALID
            return
        assert reply[1:] == (m.OK, int(digits) + amount)
        self._put(key, b"%d" % (int(digits) + amount), keep_lease=True)

    @rule(number=CLIENTS, key=KEYS, expected=VALUES, desired=VALUES)
    def compare_set(self, number: int, key: bytes, expected: bytes, desired: bytes) -> None:
        answer = self._value(number, m.COMPARE_SET, key, expected, desired)
        current = self.values.get(key)
        if current == expected or (current is None and not expected):
            assert answer == desired
            self._put(key, desired)
        else:
            assert answer == (expected if current is None else current)

    @rule(number=CLIENTS, keys=st.lists(KEYS, max_size=3), data=st.data())
    def multi_set(self, number: int, keys: list[bytes], data: st.DataObject) -> None:
        values = data.draw(st.lists(VALUES, min_size=len(keys), max_size=len(keys)))
        self._value(number, m.MULTI_SET, tuple(keys), tuple(values))
        pairs = dict(zip(keys, values, strict=True))
        self.values.update(pairs)
        for key, value in pairs.items():
            self._put(key, value)

    @rule(number=CLIENTS, key=KEYS)
    def delete(self, number: int, key: bytes) -> None:
        assert self._value(number, m.DELETE, key) is self._remove(key, m.EVENT_DELETE)

    @rule(number=CLIENTS, keys=st.lists(KEYS, max_size=3))
    def check(self, number: int, keys: list[bytes]) -> None:
        known = self.values.keys() | self.queues.keys()
        assert self._value(number, m.CHECK, tuple(keys)) is all(key in known for key in keys)
        assert sorted(self._value(number, m.LIST_KEYS, b"")) == sorted(self.values)
        assert self._value(number, m.NUM_KEYS) == len(self.values)

    @rule(
        number=CLIENTS,
        operation=st.sampled_from([m.GET, m.WAIT, m.MULTI_GET]),
        keys=st.lists(KEYS, min_size=1, max_size=3),
        timeout_ms=TIMEOUTS,
    )
    def read(self, number: int, operation: int, keys: list[bytes], timeout_ms: int | None) -> None:
        wanted = tuple(keys[:1] if operation == m.GET else keys)
        deadline = None if timeout_ms is None else self.now + timeout_ms / 1000
        waiter = Waiting(number, self.next_id, operation, wanted, deadline)
        reply = self._ask(number, operation, wanted[0] if operation == m.GET else wanted, timeout_ms)
        missing = [key for key in wanted if not self._present(waiter, key)]
        if not missing:
            assert reply == (waiter.request_id, m.OK, self._answer(waiter))
        elif timeout_ms == 0:
            assert reply == (waiter.request_id, m.TIMEOUT, missing)
        else:
            assert reply is None
            self.waiting.append(waiter)

    @rule(number=CLIENTS, key=KEYS, item=VALUES, at_head=st.booleans())
    def push(self, number: int, key: bytes, item: bytes, at_head: bool) -> None:
        self._value(number, m.QUEUE_RETURN if at_head else m.QUEUE_PUSH, key, item)
        for waiter in self.waiting:
            if waiter.operation == m.QUEUE_POP and waiter.keys == (key,):
                self.waiting.remove(waiter)
                self.expected[waiter.client].append((waiter.request_id, m.OK, item))
                return
        self.queues.setdefault(key, []).insert(0 if at_head else len(self.queues[key]), item)
        self._model_wake()

    @rule(number=CLIENTS, key=KEYS, timeout_ms=TIMEOUTS)
    def pop(self, number: int, key: bytes, timeout_ms: int | None) -> None:
        request_id = self.next_id
        reply = self._ask(number, m.QUEUE_POP, key, timeout_ms)
        if key in self.queues:
            assert reply == (request_id, m.OK, self.queues[key].pop(0))
            if not self.queues[key]:
                del self.queues[key]
        elif timeout_ms == 0:
            assert reply == (request_id, m.TIMEOUT, [key])
        else:
            assert reply is None
            deadline = None if timeout_ms is None else self.now + timeout_ms / 1000
            self.waiting.append(Waiting(number, request_id, m.QUEUE_POP, (key,), deadline))

    # ---- leases and watching

    @rule(number=CLIENTS, lease_id=LEASES, ttl_ms=st.integers(1, 3000), bound=st.booleans())
    def grant(self, number: int, lease_id: int, ttl_ms: int, bound: bool) -> None:
        reply = self._ask(number, m.GRANT, lease_id, ttl_ms, bound)
        assert reply is not None
        assert reply[1] == (m.INVALID if lease_id in self.leases else m.OK)
        if lease_id not in self.leases:
            self.ttl_s[lease_id] = ttl_ms / 1000
            self.leases[lease_id] = (math.inf, number) if bound else (self.now + ttl_ms / 1000, None)

    @rule(number=CLIENTS, lease_id=LEASES)
    def keep_alive(self, number: int, lease_id: int) -> None:
        assert self._value(number, m.KEEP_ALIVE, (lease_id,)) == ([] if lease_id in self.leases else [lease_id])
        if lease_id in self.leases and self.leases[lease_id][0] < math.inf:
            self.leases[lease_id] = (self.now + self.ttl_s[lease_id], self.leases[lease_id][1])

    @rule(number=CLIENTS, lease_id=LEASES)
    def revoke(self, number: int, lease_id: int) -> None:
        assert self._value(number, m.REVOKE, lease_id) is (lease_id in self.leases)
        if lease_id in self.leases:
            self._end_lease(lease_id, m.EVENT_DELETE)

    @rule(number=CLIENTS, lease_id=LEASES, key=KEYS, value=VALUES)
    def set_leased(self, number: int, lease_id: int, key: bytes, value: bytes) -> None:
        if lease_id not in self.leases:
            self.grant(number, lease_id, 1000 * lease_id, lease_id == 2)
        reply = self._ask(number, m.SET_LEASED, key, value, lease_id)
        assert reply is not None
        assert reply[1] == m.OK
        self._put(key, value)
        self.bound[key] = lease_id

    @rule(number=CLIENTS)
    def lose_connection(self, number: int) -> None:
        """The client comes back at once, or leases bound to it run out in `pass_time`."""
        self.compare_late_replies()
        self.waiting = [waiter for waiter in self.waiting if waiter.client != number]
        self.engine.close(self.clients[number], self.now)
        self.engine.expire(self.now)
        self.clients[number] = self._open(number)

    @rule(number=CLIENTS, milliseconds=st.integers(0, 2500))
    def be_away(self, number: int, milliseconds: int) -> None:
        """The client is away for a time, in which its bound leases may end."""
        self.compare_late_replies()
        self.waiting = [waiter for waiter in self.waiting if waiter.client != number]
        self.engine.close(self.clients[number], self.now)
        for lease_id, (_, owner) in list(self.leases.items()):
            if owner == number:
                self.leases[lease_id] = (self.now + self.ttl_s[lease_id], owner)
        self.pass_time(milliseconds)
        self.clients[number] = self._open(number)
        for lease_id, (_, owner) in self.leases.items():
            if owner == number:
                self.leases[lease_id] = (math.inf, owner)

    @rule(number=CLIENTS)
    def watch(self, number: int) -> None:
        """Read what the watcher has not seen yet; the order of keys that expire together is the lease's own."""
        while self.changes:
            self.watched, events = self._value(number, m.WATCH, b"", self.watched, 0)
            seen = [event[1:] for event in events]
            assert sorted(seen) == sorted(self.changes[: len(seen)])
            assert [event[0] for event in events] == sorted({event[0] for event in events})
            del self.changes[: len(seen)]
        reply = self._ask(number, m.WATCH, b"", self.watched, 0)
        assert reply is not None
        assert reply[1] == m.TIMEOUT

    # ---- what happens to requests

    @rule(milliseconds=st.integers(0, 2000))
    def pass_time(self, milliseconds: int) -> None:
        self.now += milliseconds / 1000
        self.engine.expire(self.now)
        for lease_id, (ends, _) in sorted(self.leases.items(), key=lambda item: item[1][0]):
            if ends <= self.now:
                self._end_lease(lease_id, m.EVENT_EXPIRE)
        due = [waiter for waiter in self.waiting if waiter.deadline is not None and waiter.deadline <= self.now]
        for waiter in sorted(due, key=lambda waiter: waiter.deadline or 0.0):
            self.waiting.remove(waiter)
            missing = [key for key in waiter.keys if waiter.operation == m.QUEUE_POP or not self._present(waiter, key)]
            self.expected[waiter.client].append((waiter.request_id, m.TIMEOUT, missing))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(waiter)
        self.expected[waiter.client].append((waiter.request_id, m.CANCELLED, "withdrawn by the client"))
        assert self._value(waiter.client, m.CANCEL, waiter.request_id) is True

    @rule(number=CLIENTS, key=KEYS, frame_sent=st.booleans())
    def reconnect_and_retry(self, number: int, key: bytes, frame_sent: bool) -> None:
        """An append and a pop whose replies are lost with the connection are applied once."""
        self.compare_late_replies()
        append = (self.next_id, m.APPEND, key, b"r")
        pop = (self.next_id + 1, m.QUEUE_POP, key, 0)
        self.next_id += 2
        first = [self.engine.request(self.clients[number], request, self.now) for request in (append, pop)]
        if frame_sent:
            self.engine.frames_sent(self.clients[number], 1)
        self._put(key, self.values.get(key, b"") + b"r", keep_lease=True)
        if key in self.queues:
            self.queues[key].pop(0)
            if not self.queues[key]:
                del self.queues[key]
        self._model_wake()
        self.compare_late_replies()
        self.waiting = [waiter for waiter in self.waiting if waiter.client != number]
        self.engine.close(self.clients[number], self.now)
        self.clients[number] = self._open(number, (append[0], pop[0]))
        assert self.clients[number].resumed
        assert [self.engine.request(self.clients[number], request, self.now) for request in (append, pop)] == first

    @invariant()
    def compare_late_replies(self) -> None:
        for number in range(3):
            assert sorted(self.late[number], key=repr) == sorted(self.expected[number], key=repr)
            self.late[number].clear()
            self.expected[number].clear()

    @invariant()
    def nothing_is_lost_in_the_books(self) -> None:
        assert self.engine.waiter_count == len(self.waiting)

    def teardown(self) -> None:
        self.watch(0)
        for client in self.clients:
            self.engine.request(client, (self.next_id, m.DELETE_NAMESPACE), self.now)
            self.engine.close(client, self.now)
        for _ in range(20):
            self.now = max(self.now, self.engine.next_deadline() or 0.0)
            self.engine.expire(self.now)
        assert self.engine.memory_bytes == 0
        assert self.engine.waiter_count == 0
        assert self.engine.next_deadline() is None


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngineModel = EngineMachine.TestCase
