"""What an engine ought to have on its books: memory and waiters counted afresh from all it holds."""

from __future__ import annotations

from asyncdist_server.engine.clients import REPLY_BYTES, Client, value_bytes
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.history import EVENT_BYTES, HISTORY_OVERHEAD_BYTES
from asyncdist_server.engine.leases import HOLD_BYTES, LEASE_BYTES, LEASED_KEY_BYTES
from asyncdist_server.engine.membership import JOB_BYTES
from asyncdist_server.engine.namespace import ITEM_OVERHEAD_BYTES, KEY_OVERHEAD_BYTES, QUEUE_OVERHEAD_BYTES, Namespace
from asyncdist_server.engine.state import KEY_WAITS
from asyncdist_server.engine.waiters import WAITER_BYTES, Waiter

__all__ = ["memory_bytes", "problems"]


def namespace_bytes(space: Namespace) -> int:
    """Bytes of everything in one namespace but its clients."""
    total = sum(KEY_OVERHEAD_BYTES + len(key) + len(value) for key, value in space.values.items())
    for key, queue in space.queues.items():
        total += QUEUE_OVERHEAD_BYTES + len(key) + sum(ITEM_OVERHEAD_BYTES + len(item) for item in queue)
    total += LEASE_BYTES * len(space.leases) + LEASED_KEY_BYTES * len(space.leased)
    total += sum(HOLD_BYTES + len(prefix) for prefix in space.holds)
    for prefix, history in space.histories.items():
        total += HISTORY_OVERHEAD_BYTES + len(prefix)
        total += sum(EVENT_BYTES + len(key) + len(value) for _, _, key, value in history.events)
    return total + JOB_BYTES * len(space.jobs)


def waiter_bytes(waiter: Waiter) -> int:
    """Bytes of a blocked request."""
    return WAITER_BYTES + sum(map(len, waiter.keys)) + 48 * len(waiter.keys)


def client_bytes(client: Client) -> int:
    """Bytes of a client's blocked requests and of its replies that may be asked for again."""
    total = sum(map(waiter_bytes, client.blocked.values()))
    if client.client_id is None:
        total += client.remembered_bytes  # of a torch session, which knows what of it was read
    for _, _, framed in client._frames:
        # Texts and lists in these are short and few, and not looked at before somebody comes back for them.
        total += sum(REPLY_BYTES + value_bytes(value) * (type(value) in (bytes, tuple)) for _, _, value in framed)
        total += sum(len(client.taken[number][0]) for number, _, _ in framed if number in client.taken)
    total += sum(len(client.taken[number][0]) for number in client.replay if number in client.taken)
    return total + sum(REPLY_BYTES + value_bytes(value) for _, _, value in client.replay.values())


def memory_bytes(engine: StoreEngine) -> int:
    """What `engine.memory_bytes` should say."""
    clients = [*engine._state.clients, *(client for _, client in engine._away.values())]
    return sum(map(namespace_bytes, engine.namespaces.values())) + sum(map(client_bytes, clients))


def problems(engine: StoreEngine) -> list[str]:
    """Everything on the books that is not so."""
    found = []
    if engine.memory_bytes != (counted := memory_bytes(engine)):
        found.append(f"memory_bytes is {engine.memory_bytes}, counted are {counted}")
    blocked = sum(len(client.blocked) for client in engine._state.clients)
    if engine.waiter_count != blocked:
        found.append(f"waiter_count is {engine.waiter_count}, blocked are {blocked}")
    waiters = [waiter for client in engine._state.clients for waiter in client.blocked.values()]
    if engine._state.waiter_bytes != (counted := sum(map(waiter_bytes, waiters))):
        found.append(f"waiter_bytes is {engine._state.waiter_bytes}, counted are {counted}")
    events = sum(
        HISTORY_OVERHEAD_BYTES
        + len(prefix)
        + sum(EVENT_BYTES + len(key) + len(value) for _, _, key, value in history.events)
        for space in engine.namespaces.values()
        for prefix, history in space.histories.items()
    )
    if engine._state.event_bytes != events:
        found.append(f"event_bytes is {engine._state.event_bytes}, counted are {events}")
    remembered = sum(client.remembered_bytes for client in engine.all_clients())
    if engine._state.remembered_bytes != remembered:
        found.append(f"remembered_bytes is {engine._state.remembered_bytes}, counted are {remembered}")
    both = [*engine._state.key_waits, *engine._state.other_waits]
    if len(both) != len(waiters) or set(both) != set(waiters):
        found.append(f"{len(both)} are listed as waiting, blocked are {len(waiters)}")
    key_waits = [waiter for waiter in waiters if waiter.operation in KEY_WAITS]
    if engine._state.key_waits.keys() != set(key_waits):
        found.append(f"{len(engine._state.key_waits)} wait for keys, blocked are {len(key_waits)}")
    oldest = next(iter(engine._state.key_waits), None)
    if oldest is not None and oldest.since != min(waiter.since for waiter in key_waits):
        found.append(f"the oldest wait is said to be since {oldest.since}")
    leases = sum(len(space.leases) for space in engine.namespaces.values())
    if engine._state.leases.count != leases:
        found.append(f"the count of leases is {engine._state.leases.count}, there are {leases}")
    for share in {space.share for space in engine.namespaces.values() if space.share is not None}:
        spaces = [space for space in engine.namespaces.values() if space.share is share]
        counted = sum(map(namespace_bytes, spaces))
        counted += sum(client_bytes(client) for client in engine._state.clients if client.namespace in spaces)
        if share.bytes != counted:
            found.append(f"a share has {share.bytes} bytes, counted are {counted}")
    for space in engine.namespaces.values():
        if (index := space.index) is not None and index.under(b"") != sorted(space.values):
            found.append(f"the index of {space.name!r} does not hold its keys")
        waiting = sum(
            len(waiters)
            for places in (space.readers, space.poppers, space.watchers, space.lockers)
            for waiters in places._waiters.values()
        ) + sum(len(job.waiting) for job in space.jobs.values())
        waiting += sum(len(line.requests) for job in space.jobs.values() for line in job.namesakes.values())
        own = sum(len(client.blocked) for client in engine._state.clients if client.namespace is space)
        if waiting != own:
            found.append(f"{waiting} wait in {space.name!r}, its clients have {own} blocked requests")
        for key, lease in space.leased.items():
            if key not in space.values or key not in lease.keys or space.leases.get(lease.lease_id) is not lease:
                found.append(f"{key!r} is bound to the lease {lease.lease_id}, which does not know of it")
        if any(not queue for queue in space.queues.values()):
            found.append("an empty queue is kept")
    return found
