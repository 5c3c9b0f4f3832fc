"""What each operation of the store does: one function each, (state, client, request, now) -> reply, or None if blocked.

Semantics are torch's Store, without the faults of its servers: waiters look again at all their keys when woken, a queue
item goes to exactly one client, nothing is applied in part, and a request that fails is answered, never hung up on.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncdist_server.engine.clients import KEY_WORK_BYTES, Client, Reply
from asyncdist_server.engine.state import StoreState, first_missing
from asyncdist_server.wire.messages import (
    ADD,
    APPEND,
    CANCEL,
    CANCELLED,
    CHECK,
    COMPARE_SET,
    DELETE,
    DELETE_NAMESPACE,
    EVENT_SET,
    GET,
    GOODBYE,
    INVALID,
    LIMIT,
    LIST_KEYS,
    MAX_TIMEOUT_MS,
    MULTI_GET,
    MULTI_SET,
    NUM_KEYS,
    OK,
    OPERATION_NAMES,
    PING,
    QUEUE_LEN,
    QUEUE_POP,
    QUEUE_PUSH,
    QUEUE_RETURN,
    SET,
    WAIT,
    ProtocolError,
)

Request = tuple[Any, ...]
Operation = Callable[[StoreState, Client, Request, float], Reply | None]

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
MAX_INT64_DIGITS: Final = 19
"""More digits than this, leading zeros aside, exceed an int64; int() would take quadratic time on a long value."""
LISTED_KEYS: Final = 8192
"""Most keys in one answer to a listing: to find and pack them takes some 2 ms. The client asks for what follows."""
LISTED_BYTES: Final = 1024 * 1024
"""Most bytes of keys in it, but for a single key: what a turn's replies may hold."""
KEY_HEADER_BYTES: Final = 5
"""What msgpack may add to a key."""
_NUMBER: Final = re.compile(rb"[ \t\n\v\f\r]*([+-]?)([0-9]+)")
"""What C's strtoll reads, which torch's servers apply to a stored value: the rest of the text is ignored."""


def malformed(request: Request) -> ProtocolError:
    """Return the error for a request whose arguments have the wrong number or types."""
    return ProtocolError(f"malformed arguments of {OPERATION_NAMES[request[1]]}")


def _set(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, key, value = request
    if type(key) is not bytes or type(value) is not bytes:
        raise malformed(request)
    refused = state.put(client.namespace, key, value)
    return (request_id, LIMIT, refused) if refused else (request_id, OK, None)


def _get(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, key, _ = request
    if type(key) is not bytes:
        raise malformed(request)
    value = client.namespace.values.get(key)
    if value is not None:
        return request_id, OK, value
    return _block(state, client, request, (key,), 0, now)


def _add(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, key, amount = request
    if type(key) is not bytes or type(amount) is not int:
        raise malformed(request)
    stored = client.namespace.values.get(key, b"0")
    client.work_bytes += len(stored)
    number = parse_number(stored)
    if number is None:
        return request_id, INVALID, f"add to a value that is not a number: {stored[:40]!r}"
    total = number + amount
    if not INT64_MIN <= total <= INT64_MAX or not INT64_MIN <= amount <= INT64_MAX:
        return request_id, INVALID, f"{number} + {amount} exceeds the range of int64"
    refused = state.put(client.namespace, key, b"%d" % total, keep_lease=True)
    return (request_id, LIMIT, refused) if refused else (request_id, OK, total)


def parse_number(text: bytes) -> int | None:
    """Return the int64 that `text` begins with, None if it does not begin with one."""
    if len(text) < MAX_INT64_DIGITS and text.isdigit():
        return int(text)
    match = _NUMBER.match(text)
    if match is None:
        return None
    digits = match[2].lstrip(b"0")
    if len(digits) > MAX_INT64_DIGITS:
        return None
    number = int(match[1] + (digits or b"0"))
    return number if INT64_MIN <= number <= INT64_MAX else None


def _check(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, keys = request
    _require_keys(client, request, keys)
    if refused := state.refuse_keys(client, keys):
        return request_id, LIMIT, refused
    return request_id, OK, first_missing(client.namespace, WAIT, keys) is None


def _wait(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, keys, _ = request
    _require_keys(client, request, keys)
    position = first_missing(client.namespace, WAIT, keys)
    if position is not None:
        return _block(state, client, request, keys, position, now)
    refused = state.refuse_keys(client, keys)
    return (request_id, LIMIT, refused) if refused else (request_id, OK, None)


def _compare_set(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, key, expected, desired = request
    if type(key) is not bytes or type(expected) is not bytes or type(desired) is not bytes:
        raise malformed(request)
    current = client.namespace.values.get(key)
    if current is None and expected:
        # torch's answer: the caller sees that `desired` was not stored, not that the key is missing.
        return request_id, OK, expected
    if current is not None and current != expected:
        return request_id, OK, current
    refused = state.put(client.namespace, key, desired)
    return (request_id, LIMIT, refused) if refused else (request_id, OK, desired)


def _delete(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, key = request
    if type(key) is not bytes:
        raise malformed(request)
    return request_id, OK, state.remove(client.namespace, key)


def _append(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, key, value = request
    if type(key) is not bytes or type(value) is not bytes:
        raise malformed(request)
    old = client.namespace.values.get(key)
    if old is None:
        refused = state.put(client.namespace, key, value, keep_lease=True)
    elif len(old) + len(value) > state.limits.value_bytes:
        refused = f"the value would have {len(old) + len(value)} bytes, allowed are {state.limits.value_bytes}"
    else:
        client.work_bytes += len(old)
        refused = state.put(client.namespace, key, old + value, keep_lease=True, kept=len(old))
    return (request_id, LIMIT, refused) if refused else (request_id, OK, None)


def _multi_get(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, keys, _ = request
    _require_keys(client, request, keys)
    position = first_missing(client.namespace, MULTI_GET, keys)
    if position is not None:
        return _block(state, client, request, keys, position, now)
    return state.read_many(client.namespace, request_id, keys)


def _multi_set(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, keys, values = request
    _require_keys(client, request, keys)
    if type(values) is not tuple or len(values) != len(keys) or not all(type(value) is bytes for value in values):
        raise malformed(request)
    namespace = client.namespace
    pairs = dict(zip(keys, values, strict=True))
    growth = sum(namespace.growth_by_value(key, value) for key, value in pairs.items())
    refused = (
        state.refuse_keys(client, keys)
        or state.refuse_value(max(values, key=len, default=b""))
        or state.refuse_growth(growth, namespace)
    )
    if refused:
        return request_id, LIMIT, refused
    state.charge(namespace, growth)
    namespace.update(pairs)
    for key, value in pairs.items():
        if namespace.changes is not None:
            namespace.changes.key(key)
        if namespace.leased:
            state.leases.detach(namespace, key)
        if namespace.histories:
            state.recorder.record(namespace, EVENT_SET, key, value)
        if key in namespace.readers:
            state.wake(namespace, key)
    return request_id, OK, None


def _num_keys(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    return request[0], OK, len(client.namespace.values)


def _list_keys(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, prefix, start = request
    if type(prefix) is not bytes or type(start) is not bytes:
        raise malformed(request)
    namespace = client.namespace
    keys = namespace.keys_under(prefix, start, LISTED_KEYS + 1)
    client.work_bytes += KEY_WORK_BYTES * (len(namespace.values) if namespace.index is None else len(keys))
    ends = list(itertools.accumulate(len(key) + KEY_HEADER_BYTES for key in keys[:LISTED_KEYS]))
    count = max(bisect.bisect_right(ends, min(LISTED_BYTES, state.reply_bytes)), 1)
    return request_id, OK, (keys[count] if count < len(keys) else None, keys[:count])


def _queue_push(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, operation, key, item = request
    if type(key) is not bytes or type(item) is not bytes:
        raise malformed(request)
    namespace = client.namespace
    if refused := state.refuse_key(key) or state.refuse_value(item):
        return request_id, LIMIT, refused
    back = operation == QUEUE_RETURN
    if key not in namespace.poppers:
        growth = namespace.growth_by_item(key, item)
        # What was in the store before may come back, though others have taken its room meanwhile.
        if refused := state.refuse_growth(growth - state.limits.value_bytes if back else growth, namespace):
            return request_id, LIMIT, refused
    state.enqueue(namespace, key, item, at_head=back)
    return request_id, OK, None


def _queue_pop(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, key, _ = request
    if type(key) is not bytes:
        raise malformed(request)
    if key not in client.namespace.queues:
        return _block(state, client, request, (key,), 0, now)
    item, freed = client.namespace.pop_item(key)
    state.charge(client.namespace, -freed)
    client.note_taken(request_id, key)
    return request_id, OK, item


def _queue_len(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, key = request
    if type(key) is not bytes:
        raise malformed(request)
    return request_id, OK, len(client.namespace.queues.get(key, ()))


def _cancel(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, blocked_id = request
    if type(blocked_id) is not int:
        raise malformed(request)
    waiter = client.blocked.get(blocked_id)
    if waiter is None:
        return request_id, OK, False
    answered = state.decided(waiter) is not None
    state.finish(waiter, (blocked_id, CANCELLED, "withdrawn by the client"))
    return request_id, OK, not answered


def _delete_namespace(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    return request[0], OK, state.clear(client.namespace)


def _ping(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    return request[0], OK, None


def _goodbye(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    client.leaving = True
    return request[0], OK, None


def _require_keys(client: Client, request: Request, keys: object) -> None:
    if type(keys) is not tuple or not all(type(key) is bytes for key in keys):
        raise malformed(request)
    client.work_bytes += KEY_WORK_BYTES * len(keys)


def _block(
    state: StoreState, client: Client, request: Request, keys: tuple[bytes, ...], position: int, now: float
) -> Reply | None:
    request_id, operation, _, timeout_ms = request
    if timeout_ms is not None and (type(timeout_ms) is not int or not 0 <= timeout_ms <= MAX_TIMEOUT_MS):
        raise malformed(request)
    if request_id in client.blocked:
        raise ProtocolError(f"request id {request_id} is in use by a blocked request")
    if refused := state.refuse_keys(client, keys):
        return request_id, LIMIT, refused
    return state.block(client, request_id, operation, keys, position, timeout_ms, now)


OPERATIONS: Final[Mapping[int, tuple[Operation, int]]] = {
    SET: (_set, 4),
    GET: (_get, 4),
    ADD: (_add, 4),
    CHECK: (_check, 3),
    WAIT: (_wait, 4),
    COMPARE_SET: (_compare_set, 5),
    DELETE: (_delete, 3),
    APPEND: (_append, 4),
    MULTI_GET: (_multi_get, 4),
    MULTI_SET: (_multi_set, 4),
    NUM_KEYS: (_num_keys, 2),
    LIST_KEYS: (_list_keys, 4),
    QUEUE_PUSH: (_queue_push, 4),
    QUEUE_POP: (_queue_pop, 4),
    QUEUE_LEN: (_queue_len, 3),
    QUEUE_RETURN: (_queue_push, 4),
    CANCEL: (_cancel, 3),
    DELETE_NAMESPACE: (_delete_namespace, 2),
    PING: (_ping, 2),
    GOODBYE: (_goodbye, 2),
}
"""For each operation code the function, and how many elements its request has."""
