"""What the operations of coordination do: leases, holds, watches, locks, jobs, and what people ask in a hang.

As in `operations`: one function each, (state, client, request, now) -> reply, or None if blocked.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Final

from asyncdist_server.engine.clients import KEY_WORK_BYTES, Client, Reply
from asyncdist_server.engine.membership import Job, find_job
from asyncdist_server.engine.operations import Operation, Request, malformed
from asyncdist_server.engine.state import StoreState
from asyncdist_server.engine.waiters import Waiter
from asyncdist_server.wire.messages import (
    CLIENTS,
    COMPACTED,
    EVENT_DELETE,
    GRANT,
    HOLD,
    INVALID,
    JOIN,
    KEEP_ALIVE,
    LEASE_LOST,
    LEAVE,
    LIMIT,
    LOCK,
    MAX_LEASE_ID,
    MAX_MEMBERS,
    MAX_TIMEOUT_MS,
    NAMESPACES,
    OK,
    OPERATION_NAMES,
    REVOKE,
    SET_LEASED,
    STATUS,
    UNLOCK,
    WAITS,
    WATCH,
    ProtocolError,
)

MAX_WAITS: Final = 1000
"""Most waiting requests in one answer: those that wait longest tell why a job hangs."""
MAX_NAMESPACES: Final = 1000
"""Most namespaces in one answer: those that hold most tell where the memory is."""
MAX_CLIENTS: Final = 1000
"""Most clients in one answer: it takes a millisecond to make."""
SHOWN_KEYS: Final = 5
"""Most keys shown of each."""
SHOWN_KEY_BYTES: Final = 200
"""Most bytes shown of a key, so that the longest answer stays around 1 MiB."""


def _lost(request_id: int) -> Reply:
    return request_id, LEASE_LOST, "there is no such lease (any more)"


def _require_times(request: Request, *times_ms: object, least: int = 0) -> None:
    for time_ms in times_ms:
        if type(time_ms) is not int or not least <= time_ms <= MAX_TIMEOUT_MS:
            raise malformed(request)


def _require_wait(client: Client, request: Request) -> None:
    timeout_ms = request[-1]
    if timeout_ms is not None:
        _require_times(request, timeout_ms)
    if request[0] in client.blocked:
        raise ProtocolError(f"request id {request[0]} is in use by a blocked request")


# ---- leases


def _grant(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, lease_id, ttl_ms, bound = request
    _require_times(request, ttl_ms, least=1)
    if type(lease_id) is not int or not 0 < lease_id <= MAX_LEASE_ID or type(bound) is not bool:
        raise malformed(request)
    if lease_id in client.namespace.leases:
        return request_id, INVALID, f"there is a lease {lease_id} already"
    refused = state.leases.grant(client, lease_id, ttl_ms / 1000, bound, now)
    return (request_id, LIMIT, refused) if refused else (request_id, OK, None)


def _keep_alive(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, lease_ids = request
    if type(lease_ids) is not tuple or not all(type(lease_id) is int for lease_id in lease_ids):
        raise malformed(request)
    unknown = []
    for lease_id in lease_ids:
        lease = client.namespace.leases.get(lease_id)
        if lease is None:
            unknown.append(lease_id)
        elif lease.deadline is not None:  # else its owner is connected
            lease.postpone(now)
            lease.vouched()
    return request_id, OK, unknown


def _revoke(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, lease_id = request
    if type(lease_id) is not int:
        raise malformed(request)
    lease = client.namespace.leases.get(lease_id)
    if lease is not None:
        state.leases.end(lease, EVENT_DELETE, now)
    return request_id, OK, lease is not None


def _set_leased(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, key, value, lease_id = request
    if type(key) is not bytes or type(value) is not bytes or type(lease_id) is not int:
        raise malformed(request)
    lease = client.namespace.leases.get(lease_id)
    if lease is None:
        return _lost(request_id)
    if refused := state.put(client.namespace, key, value):
        return request_id, LIMIT, refused
    state.leases.attach(lease, key)
    return request_id, OK, None


def _hold(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, prefix, lease_id, linger_ms = request
    _require_times(request, linger_ms)
    if type(prefix) is not bytes or type(lease_id) is not int:
        raise malformed(request)
    lease = client.namespace.leases.get(lease_id)
    if lease is None:
        return _lost(request_id)
    refused = state.leases.hold(lease, prefix, linger_ms / 1000)
    return (request_id, LIMIT, refused) if refused else (request_id, OK, None)


# ---- watches


def _watch(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, prefix, revision, timeout_ms = request
    if type(prefix) is not bytes or (revision is not None and type(revision) is not int):
        raise malformed(request)
    _require_wait(client, request)
    namespace = client.namespace
    if prefix not in namespace.histories and (
        refused := state.refuse_key(prefix) or state.refuse_growth(state.recorder.cost(prefix))
    ):
        return request_id, LIMIT, refused
    history = state.recorder.history(namespace, prefix)
    if revision is None:
        return _start_of_watch(state, client, request_id)
    if not history.floor < revision <= state.revision + 1:
        known = f"{history.floor + 1} to {state.revision}" if history.floor < state.revision else "none"
        return request_id, COMPACTED, f"revision {revision} is not one of those remembered ({known})"
    if events := history.since(revision):
        return request_id, OK, (events[-1][0] + 1, events)
    return state.block(client, request_id, WATCH, (prefix,), 0, timeout_ms, now, namespace.watchers, revision)


def _start_of_watch(state: StoreState, client: Client, request_id: int) -> Reply:
    """Return where a watch begins. A retry gets the same answer: what was asked behind it may have been done since."""
    reply, freed = client.take_replay(request_id)
    state.remember(-freed)
    if reply is not None:
        return reply
    if client.remembered > client.in_flight:
        return request_id, LIMIT, f"more than {client.in_flight} replies were not acknowledged"
    reply = request_id, OK, (state.revision + 1, [])
    client.note_reply(reply)
    return reply


# ---- locks


def _lock(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, key, lease_id, timeout_ms = request
    if type(key) is not bytes or type(lease_id) is not int:
        raise malformed(request)
    _require_wait(client, request)
    if refused := state.refuse_key(key):
        return request_id, LIMIT, refused
    if key not in client.namespace.values:
        return state.take_lock(client.namespace, request_id, key, lease_id)
    if lease_id not in client.namespace.leases:
        return _lost(request_id)
    return state.block(client, request_id, LOCK, (key,), 0, timeout_ms, now, client.namespace.lockers, lease_id)


def _unlock(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, key, token = request
    if type(key) is not bytes or type(token) is not int:
        raise malformed(request)
    held = client.namespace.values.get(key) == b"%d" % token
    if held:
        state.remove(client.namespace, key)
    return request_id, OK, held


# ---- jobs


def _join(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, name, member, least, most, settle_ms, lease_id, _ = request
    _require_times(request, settle_ms)
    _require_wait(client, request)
    if type(name) is not bytes or type(member) is not bytes or type(least) is not int or type(most) is not int:
        raise malformed(request)
    if not 0 < least <= most <= MAX_MEMBERS:
        return request_id, INVALID, f"a job has 1 to {MAX_MEMBERS} members, not {least} to {most}"
    lease = client.namespace.leases.get(lease_id) if type(lease_id) is int else None
    if lease is None:
        return _lost(request_id)
    job = find_job(state, client.namespace, name)
    if type(job) is str:
        return request_id, LIMIT, job
    assert isinstance(job, Job)
    reply = job.join(client, request, lease, now)
    hold = client.namespace.holds.get(job.prefix)
    if hold is None or hold.job is not job:
        job.end()  # no member was admitted yet
    return reply


def _leave(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, name, lease_id = request
    if type(name) is not bytes or type(lease_id) is not int:
        raise malformed(request)
    job = client.namespace.jobs.get(name)
    lease = client.namespace.leases.get(lease_id)
    if job is None or lease is None or job not in lease.jobs:
        return request_id, OK, False
    job.lose(lease, EVENT_DELETE, now)
    return request_id, OK, True


# ---- what people ask


def _status(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    return request[0], OK, state.describe()


def _waits(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, everywhere = request
    if type(everywhere) is not bool:
        raise malformed(request)
    waiters: Iterator[Waiter] = heapq.merge(state.key_waits, state.other_waits, key=operator.attrgetter("since"))
    count = state.waiter_count
    if not everywhere:
        count = sum(len(each.blocked) for each in state.clients if each.namespace is client.namespace)
        waiters = (waiter for waiter in waiters if waiter.client.namespace is client.namespace)
    client.work_bytes += KEY_WORK_BYTES * (state.waiter_count + len(state.clients))
    rows: list[Any] = [count]
    for waiter in itertools.islice(waiters, min(count, MAX_WAITS)):
        who = waiter.client
        keys = [key[:SHOWN_KEY_BYTES] for key in state.missing(waiter)[:SHOWN_KEYS]]
        waited_ms = round((now - waiter.since) * 1000)
        name = OPERATION_NAMES[waiter.operation]
        rows.append([name, keys, waited_ms, who.namespace.name, who.name, who.rank, who.address])
    return request_id, OK, rows


def _namespaces(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    spaces = state.namespaces
    client.work_bytes += KEY_WORK_BYTES * len(spaces)
    most = heapq.nlargest(MAX_NAMESPACES, spaces.values(), key=lambda space: (len(space.values), space.clients))
    rows = [[space.name, len(space.values), len(space.queues), space.clients] for space in most]
    return request[0], OK, [len(spaces), *rows]


def _clients(state: StoreState, client: Client, request: Request, now: float) -> Reply | None:
    request_id, _, everywhere = request
    if type(everywhere) is not bool:
        raise malformed(request)
    clients = [
        each
        for each in state.every_client()
        if each is not client and (everywhere or each.namespace.name == client.namespace.name)
    ]
    client.work_bytes += KEY_WORK_BYTES * len(clients)
    rows = [
        [who.namespace.name, who.name, who.rank, who.address, len(who.blocked), who.closed]
        for who in clients[:MAX_CLIENTS]
    ]
    return request_id, OK, [len(clients), *rows]


COORDINATION: Final[Mapping[int, tuple[Operation, int]]] = {
    GRANT: (_grant, 5),
    KEEP_ALIVE: (_keep_alive, 3),
    REVOKE: (_revoke, 3),
    SET_LEASED: (_set_leased, 5),
    HOLD: (_hold, 5),
    WATCH: (_watch, 5),
    LOCK: (_lock, 5),
    UNLOCK: (_unlock, 4),
    JOIN: (_join, 9),
    LEAVE: (_leave, 4),
    STATUS: (_status, 2),
    WAITS: (_waits, 3),
    NAMESPACES: (_namespaces, 2),
    CLIENTS: (_clients, 3),
}
"""For each operation code the function, and how many elements its request has."""
