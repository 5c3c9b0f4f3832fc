"""What all operations of the engine share: memory and waiter accounting, and blocking, waking and expiring requests."""

from __future__ import annotations

from asyncdist_server.clients import Client, Reply
from asyncdist_server.messages import (
    FRAME_SLACK_BYTES,
    GET,
    LIMIT,
    MAX_MISSING_REPORTED,
    OK,
    QUEUE_POP,
    TIMEOUT,
    WAIT,
    Limits,
)
from asyncdist_server.namespace import Namespace
from asyncdist_server.waiters import Deadlines, Waiter


class StoreState:
    """The engine's bookkeeping. A method that can be refused returns why, or an empty text."""

    __slots__ = ("deadlines", "limits", "memory_bytes", "reply_bytes", "waiter_count")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.reply_bytes = limits.frame_bytes - FRAME_SLACK_BYTES // 2
        self.memory_bytes = 0
        self.waiter_count = 0
        self.deadlines = Deadlines()

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

    def refuse_growth(self, growth: int) -> str:
        """Return why the store cannot grow by `growth` bytes."""
        if growth <= 0 or self.memory_bytes + growth <= self.limits.memory_bytes:
            return ""
        return (
            f"the store holds {self.memory_bytes} of at most {self.limits.memory_bytes} bytes, {growth} more are needed"
        )

    # ---- values

    def put(self, namespace: Namespace, key: bytes, value: bytes) -> str:
        """Store `value` and wake who waits for `key`, or change nothing and return why."""
        growth = namespace.growth_by_value(key, value)
        if (
            len(key) > self.limits.key_bytes
            or len(value) > self.limits.value_bytes
            or (growth > 0 and self.memory_bytes + growth > self.limits.memory_bytes)
        ):
            return self.refuse_key(key) or self.refuse_value(value) or self.refuse_growth(growth)
        self.memory_bytes += growth
        namespace.values[key] = value
        if key in namespace.readers:
            self.wake(namespace, key)
        return ""

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
    ) -> Reply | None:
        """Let a request wait for the missing key at `position`; returns its reply if it may not or need not wait."""
        waiter = Waiter(client, request_id, operation, keys, None if timeout_ms is None else now + timeout_ms / 1000)
        waiter.position = position
        if timeout_ms == 0:
            return request_id, TIMEOUT, self.missing(waiter)
        if self.waiter_count >= self.limits.waiters or len(client.blocked) >= self.limits.in_flight:
            return request_id, LIMIT, f"{self.waiter_count} requests are blocked, {len(client.blocked)} of this client"
        if refused := self.refuse_growth(waiter.bytes):
            return request_id, LIMIT, refused
        self.memory_bytes += waiter.bytes
        self.waiter_count += 1
        client.blocked[request_id] = waiter
        self.deadlines.add(waiter)
        self._wait_at(waiter, position)
        return None

    def _wait_at(self, waiter: Waiter, position: int) -> None:
        waiter.position = position
        namespace = waiter.client.namespace
        (namespace.poppers if waiter.operation == QUEUE_POP else namespace.readers).add(waiter)

    def unblock(self, waiter: Waiter) -> None:
        """Forget a blocked request, wherever it waits."""
        if waiter.waits_in is not None:
            waiter.waits_in.discard(waiter)
        waiter.done = True
        self.deadlines.forget(waiter)
        del waiter.client.blocked[waiter.request_id]
        self.waiter_count -= 1
        self.memory_bytes -= waiter.bytes

    def finish(self, waiter: Waiter, reply: Reply) -> None:
        """Answer a blocked request."""
        self.unblock(waiter)
        if waiter.operation == QUEUE_POP:
            waiter.client.note_reply(reply)
        waiter.client.deliver(reply)

    def wake(self, namespace: Namespace, key: bytes) -> None:
        """Look again at every request that waits for `key`, which is there now."""
        for waiter in namespace.readers.take_all(key):
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

    def expire(self, now: float) -> None:
        """Answer every blocked request whose time is over."""
        for waiter in self.deadlines.take_due(now):
            # It left the heap already, so that it must not be counted as dead in there.
            waiter.deadline = None
            self.finish(waiter, (waiter.request_id, TIMEOUT, self.missing(waiter)))

    def missing(self, waiter: Waiter) -> list[bytes]:
        """Return the keys, at most `MAX_MISSING_REPORTED`, that a request still waits for."""
        namespace = waiter.client.namespace
        if waiter.operation == QUEUE_POP:
            return list(waiter.keys)
        found: list[bytes] = []
        for key in waiter.keys:
            if key not in namespace.values and not (waiter.operation == WAIT and key in namespace.queues):
                found.append(key)
                if len(found) == MAX_MISSING_REPORTED:
                    break
        return found


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
