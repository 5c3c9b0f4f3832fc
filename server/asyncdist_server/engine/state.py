"""What all operations of the engine share: memory and waiter accounting, and blocking, waking and expiring requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from asyncdist_server.engine.clients import Client, Reply
from asyncdist_server.engine.counters import Counters
from asyncdist_server.engine.history import Recorder
from asyncdist_server.engine.leases import Leases
from asyncdist_server.engine.namespace import KEY_OVERHEAD_BYTES, Namespace, begins_with_any
from asyncdist_server.engine.timers import Timed, Timers
from asyncdist_server.engine.waiters import WOKEN_AT_ONCE, Waiter, WaitPlace, Woken
from asyncdist_server.wire.messages import (
    EVENT_DELETE,
    EVENT_SET,
    FRAME_SLACK_BYTES,
    GET,
    JOIN,
    LEASE_LOST,
    LIMIT,
    LOCK,
    MAX_MISSING_REPORTED,
    MULTI_GET,
    OK,
    QUEUE_POP,
    TIMEOUT,
    WAIT,
    WATCH,
    Limits,
)

KEY_WAITS: Final = frozenset({GET, WAIT, MULTI_GET})
"""Waits for keys that a client should set; those for events, locks, items and other members may be long by nature."""
TAKING: Final = frozenset({QUEUE_POP, LOCK, JOIN})
"""Operations that may block and change something when they end: their late replies are remembered for a retry."""


class StoreState:
    """The engine's bookkeeping. A method that can be refused returns why, or an empty text."""

    __slots__ = (
        "age_offset_s",
        "clients",
        "clock",
        "counters",
        "deadlines",
        "describe",
        "event_bytes",
        "every_client",
        "key_waits",
        "leases",
        "limits",
        "memory_bytes",
        "namespaces",
        "now",
        "other_waits",
        "recorder",
        "remembered_bytes",
        "reply_bytes",
        "revision",
        "timers",
        "waiter_bytes",
        "waiter_count",
        "woken",
    )

    def __init__(self, limits: Limits, first_revision: int = 0) -> None:
        self.limits = limits
        self.reply_bytes = limits.frame_bytes - FRAME_SLACK_BYTES // 2
        self.memory_bytes = 0
        self.waiter_count = 0
        self.waiter_bytes = 0
        self.remembered_bytes = 0  # of replies
        self.event_bytes = 0
        # Blocked requests in the order they came, so that the first has waited longest: those for keys that somebody
        # should set, and all others.
        self.key_waits: dict[Waiter, None] = {}
        self.other_waits: dict[Waiter, None] = {}
        self.deadlines: Timers[Waiter] = Timers()
        self.woken: deque[Woken] = deque()  # to be answered by `wake_more`
        self.timers: Timers[Timed] = Timers()
        self.leases = Leases(self)
        self.recorder = Recorder(self)
        self.clients: dict[Client, None] = {}
        self.counters = Counters(())
        self.revision = first_revision  # grows with every change that is recorded, in any namespace, and every lock
        self.now = 0.0  # of the request or expiry under way
        self.age_offset_s = 0.0
        self.clock: Callable[[], float] | None = None  # tells when it is where `now` may be a while ago
        self.describe: Callable[[], dict[str, Any]] = dict
        self.namespaces: Mapping[str, Namespace] = {}
        self.every_client: Callable[[], Iterable[Client]] = tuple  # those that are away, too

    def age(self) -> float:
        """Return for how many seconds daemons have served this store by now, as far as the journal knows of them.

        Times that restarts must not begin anew again and again are counted in it. It stands still while no daemon runs.
        """
        return self.age_at(self.now if self.clock is None else max(self.now, self.clock()))

    def age_at(self, time: float) -> float:
        """Return the store's age at a time of the clock that this daemon goes by."""
        return time + self.age_offset_s

    def remember(self, grown_bytes: int) -> None:
        """Charge, or no longer charge, what replies need that are remembered."""
        self.memory_bytes += grown_bytes
        self.remembered_bytes += grown_bytes

    def record_bytes(self, grown_bytes: int) -> None:
        """Charge, or no longer charge, what histories need."""
        self.memory_bytes += grown_bytes
        self.event_bytes += grown_bytes

    def charge(self, namespace: Namespace, grown_bytes: int) -> None:
        """Charge, or no longer charge, what keys, queues and blocked requests of `namespace` need."""
        self.memory_bytes += grown_bytes
        if namespace.share is not None:
            namespace.share.bytes += grown_bytes

    # ---- limits

    def refuse_key(self, key: bytes) -> str:
        """Return why `key` is too long."""
        if len(key) <= self.limits.key_bytes:
            return ""
        return f"the key has {len(key)} bytes, allowed are {self.limits.key_bytes}"

    def refuse_keys(self, client: Client, keys: tuple[bytes, ...]) -> str:
        """Return why `keys` are too many for one request of `client` or one is too long."""
        if len(keys) > client.max_keys:
            return f"{len(keys)} keys in one request, allowed are {client.max_keys}"
        longest = max(keys, key=len, default=b"")
        return self.refuse_key(longest)

    def refuse_value(self, value: bytes) -> str:
        """Return why `value` is too long."""
        if len(value) <= self.limits.value_bytes:
            return ""
        return f"the value has {len(value)} bytes, allowed are {self.limits.value_bytes}"

    def refuse_growth(self, growth: int, namespace: Namespace | None = None) -> str:
        """Return why the store, or the share of `namespace` in it, cannot grow by `growth` bytes."""
        share = None if namespace is None else namespace.share
        if share is not None and growth > 0 and share.bytes + growth > share.limit_bytes:
            limit = f"{share.limit_bytes} bytes ({share.option})"
            return f"namespaces like this one hold {share.bytes} of at most {limit}, {growth} more are needed"
        if growth <= 0 or self.memory_bytes + growth <= self.limits.memory_bytes:
            return ""
        self.recorder.make_room(self.memory_bytes + growth - self.limits.memory_bytes)
        if self.memory_bytes + growth <= self.limits.memory_bytes:
            return ""
        limit = f"{self.limits.memory_bytes} bytes (a daemon's --max-memory-bytes)"
        return f"the store holds {self.memory_bytes} of at most {limit}, {growth} more are needed"

    def put(
        self,
        namespace: Namespace,
        key: bytes,
        value: bytes,
        keep_lease: bool = False,
        always: bool = False,
        kept: int | None = None,
    ) -> str:
        """Store `value` and wake the clients that wait for `key`, or change nothing and return why.

        A lease that the key is bound to lets go of it unless `keep_lease`. With `always` no limit refuses it. `kept`
        is how much of the value is as it was, where it only becomes longer.
        """
        values = namespace.values
        old = values.get(key)
        growth = KEY_OVERHEAD_BYTES + len(key) + len(value) if old is None else len(value) - len(old)
        if (
            (
                len(key) > self.limits.key_bytes
                or len(value) > self.limits.value_bytes
                or (growth > 0 and self.memory_bytes + growth > self.limits.memory_bytes)
                or (growth > 0 and namespace.share is not None)
            )
            and not always
            and (refused := self.refuse_key(key) or self.refuse_value(value) or self.refuse_growth(growth, namespace))
        ):
            return refused
        self.memory_bytes += growth
        if namespace.share is not None:
            namespace.share.bytes += growth
        values[key] = value
        if old is None:
            namespace.key_came(key)
        if namespace.changes is not None:
            if kept is None:
                namespace.changes.key(key)
            else:
                namespace.changes.appended_to(key, kept)
        if namespace.leased and not keep_lease:
            self.leases.detach(namespace, key)
        if namespace.histories:
            self.recorder.record(namespace, EVENT_SET, key, value)
        if key in namespace.readers:
            self.wake(namespace, key)
        return ""

    def remove(self, namespace: Namespace, key: bytes, kind: int = EVENT_DELETE) -> bool:
        """Remove `key` and give the lock it may be to the next; returns whether it was there."""
        freed = namespace.delete_value(key)
        if freed is None:
            return False
        self.charge(namespace, -freed)
        if namespace.leased:
            self.leases.detach(namespace, key)
        if namespace.histories:
            self.recorder.record(namespace, kind, key, b"")
        if key in namespace.lockers:
            self.pass_lock_on(namespace, key)
        return True

    def remove_all(self, namespace: Namespace, keys: list[bytes], kind: int = EVENT_DELETE) -> None:
        """Do with `keys`, which are all there, what `remove` does with each: together, as they may be a great many."""
        if not keys:
            return
        self.charge(namespace, -namespace.delete_values(keys))
        if namespace.leased:
            self.leases.detach_all(namespace, keys)
        if namespace.histories:
            self.recorder.record_all(namespace, kind, keys)
        if namespace.lockers:
            for key in filter(namespace.lockers.__contains__, keys):
                self.pass_lock_on(namespace, key)

    def clear(
        self,
        namespace: Namespace,
        prefixes: list[bytes] | None = None,
        accept: Callable[[bytes], bool] | None = None,
    ) -> int:
        """Remove all keys and queues, or those that begin with one of `prefixes` and that `accept` accepts.

        Returns how many. Wakes no readers.
        """
        begins = None if prefixes is None else begins_with_any(prefixes)
        keys = list(namespace.values) if prefixes is None else namespace.keys_under_any(prefixes)
        queues = list(filter(begins, namespace.queues)) if begins else list(namespace.queues)
        if accept is not None:
            keys, queues = list(filter(accept, keys)), list(filter(accept, queues))
        self.remove_all(namespace, keys)
        for key in queues:
            self.charge(namespace, -namespace.clear_queue(key))
        for client in self.every_client():
            if client.taken and client.namespace.name == namespace.name:
                client.forget_items(lambda key: (not begins or begins(key)) and (not accept or accept(key)))
        return len(keys) + len(queues)

    def enqueue(self, namespace: Namespace, key: bytes, item: bytes, at_head: bool) -> None:
        """Give `item` to the longest waiting client of that queue, or keep it there. No limit refuses it."""
        waiter = namespace.poppers.take_first(key)
        if waiter is not None:
            # The queue is empty, else no client would wait.
            waiter.client.note_taken(waiter.request_id, key)
            self.finish(waiter, (waiter.request_id, OK, item))
            return
        self.charge(namespace, namespace.growth_by_item(key, item))
        namespace.push_item(key, item, at_head)
        if key in namespace.readers:
            self.wake(namespace, key)

    def read_many(self, namespace: Namespace, request_id: int, keys: tuple[bytes, ...]) -> Reply:
        """Return the reply to a multi_get whose keys are all present."""
        values = [namespace.values[key] for key in keys]
        size = sum(map(len, values))
        if size > self.reply_bytes:
            return request_id, LIMIT, f"the values have {size} bytes, one reply may have {self.reply_bytes}"
        return request_id, OK, values

    # ---- blocked requests

    def block(
        self,
        client: Client,
        request_id: int,
        operation: int,
        keys: tuple[bytes, ...],
        position: int,
        timeout_ms: int | None,
        now: float,
        place: WaitPlace | None = None,
        argument: int | bytes = 0,
    ) -> Reply | None:
        """Let a request wait for the missing key at `position`; returns its reply if it may not or need not wait.

        A request that waits for something else than a key waits in a `place` of its own.
        """
        waiter = Waiter(client, request_id, operation, keys, None if timeout_ms is None else now + timeout_ms / 1000)
        waiter.position = position
        waiter.since = now
        waiter.argument = argument
        if timeout_ms == 0:
            return request_id, TIMEOUT, self.missing(waiter)
        if self.waiter_count >= self.limits.waiters or len(client.blocked) >= self.limits.in_flight:
            return request_id, LIMIT, f"{self.waiter_count} requests are blocked, {len(client.blocked)} of this client"
        if refused := self.refuse_growth(waiter.bytes, client.namespace):
            return request_id, LIMIT, refused
        self.charge(client.namespace, waiter.bytes)
        self.waiter_count += 1
        self.waiter_bytes += waiter.bytes
        (self.key_waits if operation in KEY_WAITS else self.other_waits)[waiter] = None
        client.blocked[request_id] = waiter
        self.deadlines.arm(waiter)
        if place is None:
            self._wait_at(waiter, position)
        else:
            place.add(waiter)
        return None

    def _wait_at(self, waiter: Waiter, position: int) -> None:
        waiter.position = position
        namespace = waiter.client.namespace
        (namespace.poppers if waiter.operation == QUEUE_POP else namespace.readers).add(waiter)

    def unblock(self, waiter: Waiter) -> None:
        """Forget a blocked request, wherever it waits."""
        if waiter.waits_in is not None:
            waiter.waits_in.discard(waiter)
        self.deadlines.end(waiter)
        del waiter.client.blocked[waiter.request_id]
        self.waiter_count -= 1
        self.waiter_bytes -= waiter.bytes
        del (self.key_waits if waiter.operation in KEY_WAITS else self.other_waits)[waiter]
        if waiter.operation == WATCH:
            waiter.client.namespace.histories[waiter.keys[0]].seen()
        self.charge(waiter.client.namespace, -waiter.bytes)

    def finish(self, waiter: Waiter, reply: Reply) -> None:
        """Answer a blocked request, one that is woken with what it waited for."""
        place = waiter.waits_in
        if self.woken:
            reply = self.decided(waiter) or reply
        self.unblock(waiter)
        if reply[1] != OK and place is not None:
            place.give_up(waiter)
        if waiter.operation in TAKING:
            waiter.client.note_reply(reply)
        self.counters.finished(waiter.operation, reply[1], self.now - waiter.since)
        waiter.client.deliver(reply)

    def wake(self, namespace: Namespace, key: bytes) -> None:
        """Look again at every request that waits for `key`, which is there now."""
        waiters: Iterable[Waiter] | None = None
        if key in namespace.values:
            many = namespace.readers.take_many(key, WOKEN_AT_ONCE)
            if many is not None:
                waiters = [waiter for waiter in many if len(waiter.keys) > 1]
                for waiter in waiters:
                    del many[waiter]
                self.woken.append(Woken(many, namespace.values[key]))
                self.wake_more()
        for waiter in namespace.readers.take_all(key) if waiters is None else waiters:
            position = first_missing(namespace, waiter.operation, waiter.keys, waiter.position)
            if position is not None:
                self._wait_at(waiter, position)
                continue
            request_id = waiter.request_id
            if waiter.operation == GET:
                self.finish(waiter, (request_id, OK, namespace.values[key]))
            elif waiter.operation == WAIT:
                self.finish(waiter, (request_id, OK, None))
            else:
                self.finish(waiter, self.read_many(namespace, request_id, waiter.keys))

    def decided(self, waiter: Waiter) -> Reply | None:
        """Return the answer to a request that is woken and was not told yet."""
        return next((reply for woken in self.woken if (reply := woken.reply_to(waiter)) is not None), None)

    def wake_more(self) -> None:
        """Answer some of those who were woken together with a great many others."""
        left = WOKEN_AT_ONCE
        while self.woken and left:
            waiter = self.woken[0].take_first()
            if waiter is None:
                self.woken.popleft()
            else:
                left -= 1
                self.finish(waiter, (waiter.request_id, OK, None))

    def expire(self, now: float) -> None:
        """Answer every blocked request whose time is over."""
        while (waiter := self.deadlines.take_due(now)) is not None:
            why = "" if waiter.waits_in is None else waiter.waits_in.explain()
            self.finish(waiter, (waiter.request_id, TIMEOUT, why or self.missing(waiter)))

    def missing(self, waiter: Waiter) -> list[bytes]:
        """Return the keys, at most `MAX_MISSING_REPORTED`, that a request still waits for."""
        namespace = waiter.client.namespace
        if waiter.operation == JOIN and waiter.waits_in is not None:
            return waiter.waits_in.missing()[:MAX_MISSING_REPORTED]
        if waiter.operation in (QUEUE_POP, WATCH, LOCK, JOIN):
            return list(waiter.keys)
        found: list[bytes] = []
        for key in waiter.keys:
            if key not in namespace.values and not (waiter.operation == WAIT and key in namespace.queues):
                found.append(key)
                if len(found) == MAX_MISSING_REPORTED:
                    break
        return found

    # ---- locks

    def take_lock(
        self, namespace: Namespace, request_id: int, key: bytes, lease_id: int, always: bool = False
    ) -> Reply:
        """Bind the free lock `key` to a lease, and return the reply with the fencing token or why not.

        With `always` it is not refused because the store is full.
        """
        lease = namespace.leases.get(lease_id)
        if lease is None:
            return request_id, LEASE_LOST, "there is no such lease (any more)"
        self.revision += 1
        token = self.revision
        if refused := self.put(namespace, key, b"%d" % token, always=always):
            return request_id, LIMIT, refused
        self.leases.attach(lease, key)
        return request_id, OK, token

    def pass_lock_on(self, namespace: Namespace, key: bytes) -> None:
        """Give a lock that became free to the client that has waited longest."""
        while key not in namespace.values and (waiter := namespace.lockers.take_first(key)) is not None:
            assert type(waiter.argument) is int
            # Not refused where the store is full: to hold a lock takes less room than to wait for it.
            self.finish(waiter, self.take_lock(namespace, waiter.request_id, key, waiter.argument, always=True))


def first_missing(namespace: Namespace, operation: int, keys: tuple[bytes, ...], start: int = 0) -> int | None:
    """Return the position of a key that is not there, None if all are there now.

    The search begins at `start`, where a waiter stood, and then looks at the keys before it again: one of them may have
    been deleted since.
    """
    values = namespace.values
    queues = namespace.queues if operation == WAIT else ()
    for position in range(start, len(keys)):
        if keys[position] not in values and keys[position] not in queues:
            return position
    for position in range(start):
        if keys[position] not in values and keys[position] not in queues:
            return position
    return None
