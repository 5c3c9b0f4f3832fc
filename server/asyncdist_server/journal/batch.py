"""What is written to the journal in one transaction, and when older batches are given up. No clock and no I/O.

A journal is a sequence of batches. A batch holds the new state of everything that changed since the batch before. What
no later batch mentions is still as an earlier batch has it. So the oldest batch can be dropped once a later one repeats
what is still valid in it. The journal needs no snapshots, and its size stays in proportion to what the store holds. A
piece that is appended to a value is written alone; the whole value is written when the value has to be repeated.

A batch consists of sections (kind, namespace, rows), in this order, rows being

    AGE        (the store's age in seconds, that at which the daemon started if this is its first batch, else None)
    CLIENTS    (client id, its namespace, or None if it was forgotten, since)
    REPLIES    (client id, [reply...], id below which the client has all replies, 0 if that is not known): replies to
               mutations
    VALUES     (key, value, lease id), the lease 0 for none; value None if the key is gone
    PIECES     (key, where it begins, piece): the value goes on with this; void where the value was not said before
    QUEUES     (key, number of the first item, of the one after the last); both 0 if the queue is gone
    ITEMS      (key, number, item)
    LEASES     (lease id, ttl in seconds, the client it is bound to or None, since); ttl None if the lease is gone
    HOLDS      (prefix, time to linger in seconds, None, (job, least, most) or None, since); linger None if it is gone.
               Up to format 2 the ids of all leases that held it stood in the third place
    HISTORIES  (prefix, floor, since); floor None if it is gone. Up to format 4 the third was for how many steps of 15 s
               nobody had watched
    EVENTS     (prefix, revision, kind, key, value)
    TAKEN      (client id, [(request id, queue)...]), whose item is in that reply and goes back if the client is lost;
               None if it does no longer
    HOLDERS    (prefix, lease id, whether that lease holds it)

`since` is the store's age at which the time that is left began to count. None: it begins at the next start of a daemon.
So what no client keeps alive has its full time after one restart, and after further restarts what is left of that.

Up to format 4 there are no ages, up to format 3 replies are without the third. TAKEN and HOLDERS came with format 3,
PIECES with format 2.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Container, Iterable
from typing import Any, Final

from asyncdist_server.engine.changes import ChangeLog, NamespaceChanges, Reply
from asyncdist_server.engine.clients import Client, value_bytes
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.history import EVENT_BYTES, HISTORY_OVERHEAD_BYTES
from asyncdist_server.engine.leases import LEASE_BYTES, LEASED_KEY_BYTES
from asyncdist_server.engine.namespace import ITEM_OVERHEAD_BYTES, KEY_OVERHEAD_BYTES, QUEUE_OVERHEAD_BYTES, Namespace
from asyncdist_server.wire.messages import Names

CLIENTS: Final = 1
REPLIES: Final = 2
VALUES: Final = 3
QUEUES: Final = 4
ITEMS: Final = 5
LEASES: Final = 6
HOLDS: Final = 7
HISTORIES: Final = 8
EVENTS: Final = 9
PIECES: Final = 10
TAKEN: Final = 11
HOLDERS: Final = 12
AGE: Final = 13

CLEAN: Final = 1
"""Flag of a batch: the store stopped after it, nothing is missing."""
ROLLED_BACK: Final = 2
"""Flag of a batch: clients may know more than earlier batches hold, whose clients and histories are void."""
GAPS: Final = 4
"""Flag of a batch: events may be missing before it. The histories of earlier batches are void."""

PART_BYTES: Final = 16 * 1024 * 1024
"""A batch is cut into rows of about this many bytes, or one value that is larger."""
CLEAN_AT_ONCE_BYTES: Final = 64 * 1024
"""How much is cleaned with a batch, besides twice what the last one wrote: more than grows, less than delays."""
FLOOR_REPLIES: Final = 1024
"""Most remembered replies, besides a few for each new one, among which each batch looks for the oldest."""

Section = tuple[int, str, list[Any]]


@dataclasses.dataclass(slots=True)
class Batch:
    """What one transaction writes: rows from `first_row` on, one for each of `parts`. Rows before `keep_from` go."""

    first_row: int
    revision: int
    flags: int
    keep_from: int
    parts: list[list[Section]]
    bytes: int = 0
    """Of all rows; known once they are written."""

    @property
    def next_row(self) -> int:
        """The number after the last row."""
        return self.first_row + len(self.parts)


@dataclasses.dataclass(slots=True)
class Written:
    """What is remembered of a batch in the journal: the things whose state it holds."""

    first_row: int
    next_row: int
    bytes: int
    subjects: list[Section]


class BatchMaker:
    """Makes batches of what an engine's changes say. One at a time: the next one after `written` was called."""

    def __init__(self, engine: StoreEngine, changes: ChangeLog) -> None:
        self._engine = engine
        self._changes = changes
        self._log: deque[Written] = deque()
        self._size = JournalSize(engine)
        self._next_row = 1
        self._last_bytes = 0
        self._subjects: list[Section] = []
        self._started_age: float | None = 0.0  # until a batch has said it
        self.age = 0.0
        """How old the store was when the last batch was taken."""
        self.bytes = 0
        """Of all rows in the journal."""

    @property
    def rows(self) -> int:
        """Rows in the journal."""
        return self._next_row - (self._log[0].first_row if self._log else self._next_row)

    def start(self, age: float) -> None:
        """Take note of how old the store is as its daemon starts."""
        self._started_age = self.age = age

    def recall(self, written: Written) -> None:
        """Take note of a batch found in the journal; oldest first."""
        self._log.append(written)
        self._next_row = written.next_row
        self.bytes += written.bytes

    def take(self, flags: int = 0) -> Batch:
        """Return what changed since the last time."""
        changes = self._changes
        keep_from = self._clean()
        clients, changes.clients = changes.clients, {}
        replies, changes.replies = changes.replies, {}
        taken, changes.taken = changes.taken, {}
        touched, changes.touched = changes.touched, []
        changes.dirty = changes.late = False
        self.age = max(self.age, self._engine.state.age())
        sections: list[Section] = [(AGE, "", [(self.age, self._started_age)])]
        self._started_age = None
        subjects: list[Section] = []
        if clients:
            find = self._engine.client
            sections.append((CLIENTS, "", [client_row(who, name, find(who)) for who, name in clients.items()]))
            subjects.append((CLIENTS, "", list(clients)))
        if replies:
            known_below = self._known_below
            sections.append((REPLIES, "", [(who, said, known_below(who, said)) for who, said in replies.items()]))
            # Of a reply the id is enough.
            subjects.append((REPLIES, "", [(who, [reply[0] for reply in said]) for who, said in replies.items()]))
        if taken:  # said again with their replies
            sections.append((TAKEN, "", [(who, list(items.items())) for who, items in taken.items()]))
        for each in touched:
            self._take_namespace(each, sections, subjects)
        parts = _cut(sections)
        self._subjects = subjects
        return Batch(self._next_row, self._engine.state.revision, flags, keep_from, parts)

    def written(self, batch: Batch) -> None:
        """Note that the batch taken last is in the journal."""
        while self._log and self._log[0].first_row < batch.keep_from:
            self.bytes -= self._log.popleft().bytes
        self._log.append(Written(batch.first_row, batch.next_row, batch.bytes, self._subjects))
        self._next_row = batch.next_row
        self._last_bytes = batch.bytes
        self._size.grew(batch.bytes)
        self.bytes += batch.bytes

    def _known_below(self, client_id: bytes, said: list[Reply]) -> int:
        client = self._engine.client(client_id)
        return 0 if client is None else client.oldest_remembered(FLOOR_REPLIES + 4 * len(said))

    def _take_namespace(self, changes: NamespaceChanges, sections: list[Section], subjects: list[Section]) -> None:
        name = changes.name
        namespace = self._engine.namespaces.get(name) or Namespace(name)
        changes.touched = False
        if changes.keys:
            rows = value_rows(changes.homes, namespace, changes.keys, self._next_row)
            if rows:
                sections.append((VALUES, name, rows))
                subjects.append((VALUES, name, [row[0] for row in rows if row[1] is not None]))
        if changes.appended:
            values, keys = namespace.values, changes.keys
            pieces = [(key, start, values[key][start:]) for key, start in changes.appended.items() if key not in keys]
            if pieces:
                sections.append((PIECES, name, pieces))
            changes.appended = {}
        if changes.keys:
            changes.keys = set()
        if changes.queues or changes.items:
            queues, changes.queues = changes.queues, set()
            items, changes.items = changes.items, {}
            sections.append((QUEUES, name, [(key, *changes.bounds.get(key, (0, 0))) for key in queues]))
            sections.append((ITEMS, name, [(key, number, item) for (key, number), item in items.items()]))
            subjects.append((QUEUES, name, list(queues)))
            subjects.append((ITEMS, name, list(items)))
        tables: tuple[tuple[int, set[Any], Callable[[Namespace, Any], Any]], ...] = (
            (LEASES, changes.leases, lease_row),
            (HOLDS, changes.holds, hold_row),
            (HOLDERS, changes.holders, holder_row),
            (HISTORIES, changes.histories, history_row),
        )
        for kind, ids, row_of in tables:
            if ids:
                sections.append((kind, name, [row_of(namespace, each) for each in ids]))
                subjects.append((kind, name, list(ids)))
                ids.clear()
        if changes.events:
            events, changes.events = changes.events, []
            sections.append((EVENTS, name, [(prefix, *event) for prefix, event in events]))
            subjects.append((EVENTS, name, [(prefix, event[0]) for prefix, event in events]))
        if changes.empty and name not in self._engine.namespaces:
            self._changes.namespaces.pop(name, None)

    # ---- cleaning

    def _clean(self) -> int:
        """Note what the oldest batches say as changed, if the journal is too long; returns the first row to keep."""
        excess = self._size.excess(self.bytes, len(self._log))
        budget = min(excess, 2 * (self._last_bytes + BATCH_BYTES) + CLEAN_AT_ONCE_BYTES)
        keep_from = self._log[0].first_row if self._log else self._next_row
        for written in self._log:
            if budget <= 0:
                break
            budget -= written.bytes + BATCH_BYTES
            keep_from = written.next_row
            for kind, name, ids in written.subjects:
                if kind in (CLIENTS, REPLIES):
                    self._say_again_of_clients(kind, ids)
                else:
                    self._say_again(kind, name, ids, written.first_row)
        return keep_from

    def _say_again_of_clients(self, kind: int, ids: list[Any]) -> None:
        changes, find = self._changes, self._engine.client
        if kind == CLIENTS:
            for client_id in ids:
                if client_id in changes.known and client_id not in changes.clients:
                    client = find(client_id)
                    if client is not None:
                        changes.clients[client_id] = client.namespace.name
            return
        for client_id, request_ids in ids:
            client = find(client_id)
            if client is not None:
                for reply in client.replies_to_resume(tuple(request_ids)).values():
                    changes.reply(client_id, reply)
                    key, there = client.taken.get(reply[0], (b"", False))
                    if there:
                        changes.took(client_id, reply[0], key)

    def _say_again(self, kind: int, name: str, ids: list[Any], first_row: int) -> None:
        namespace = self._engine.namespaces.get(name)
        changes = self._changes.of(name)
        if namespace is None or changes is None:
            return
        if kind == VALUES:
            homes = changes.homes
            for key in ids:
                if homes.get(key) == first_row:
                    changes.key(key)
        elif kind == ITEMS:
            for key, number in ids:
                head, tail = changes.bounds.get(key, (0, 0))
                if head <= number < tail:
                    changes.said_again(key, number, namespace.queues[key][number - head])
        elif kind == EVENTS:
            for prefix, revision in ids:
                history = namespace.histories.get(prefix)
                event = history.find(revision) if history is not None else None
                if event is not None:
                    changes.event(prefix, event)
        elif kind == HOLDERS:
            for prefix, lease_id in ids:
                if holds(namespace, prefix, lease_id):
                    changes.holder(prefix, lease_id)
        else:
            tables: dict[int, tuple[Container[Any], Callable[[Any], None]]] = {
                QUEUES: (changes.bounds, changes.queue),
                LEASES: (namespace.leases, changes.lease),
                HOLDS: (namespace.holds, changes.hold),
                HISTORIES: (namespace.histories, changes.history),
            }
            there, note = tables[kind]
            for each in filter(there.__contains__, ids):
                note(each)


def _cut(sections: list[Section]) -> list[list[Section]]:
    """Return `sections` in parts that are about as large as a row should be; at least one, perhaps an empty one."""
    if sum(_rough_weight(kind, rows) for kind, _, rows in sections) <= PART_BYTES:
        return [sections]
    parts: list[list[Section]] = [[]]
    size = 0
    for kind, name, rows in sections:
        weight = sum(map(_weight, rows))
        if size + weight <= PART_BYTES:
            parts[-1].append((kind, name, rows))
            size += weight
            continue
        start = 0
        for position, row in enumerate(rows):
            weight = _weight(row)
            if size and size + weight > PART_BYTES:
                if position > start:
                    parts[-1].append((kind, name, rows[start:position]))
                parts.append([])
                start, size = position, 0
            size += weight
        parts[-1].append((kind, name, rows[start:]))
    return parts


def _rough_weight(kind: int, rows: list[Any]) -> int:
    """Return quickly about how many bytes a section needs, or more."""
    if kind == VALUES:
        return sum([len(key) + 24 if value is None else len(key) + len(value) + 24 for key, value, _ in rows])
    if kind == REPLIES:
        return sum([value_bytes(reply[2]) + 100 for row in rows for reply in row[1]])
    return sum(map(_weight, rows))


def _weight(row: object) -> int:
    """Return about how many bytes a row of a section needs."""
    if type(row) is bytes or type(row) is str:
        return len(row) + 5
    if type(row) is Names:
        return len(row.encoded)
    if type(row) is tuple or type(row) is list:
        return sum(map(_weight, row)) + 5
    return 9


def value_rows(homes: dict[bytes, int], namespace: Namespace, keys: Iterable[bytes], first_row: int) -> list[Any]:
    """Return what the values of `keys` are now, and note in `homes` that the batch of `first_row` says so."""
    rows: list[Any] = []
    values, leased = namespace.values, namespace.leased
    for key in keys:
        value = values.get(key)
        if value is not None:
            homes[key] = first_row
            rows.append((key, value, leased[key].lease_id if key in leased else 0))
        elif homes.pop(key, None) is not None:
            rows.append((key, None, 0))
    return rows


def client_row(
    client_id: bytes, namespace: str | None, client: Client | None
) -> tuple[bytes, str | None, float | None]:
    """Return what is known of a client now, which is forgotten where it has no namespace."""
    return client_id, namespace, None if client is None else client.idle_since


def lease_row(namespace: Namespace, lease_id: int) -> tuple[int, float | None, bytes | None, float | None]:
    """Return what a lease is now."""
    lease = namespace.leases.get(lease_id)
    if lease is None:
        return lease_id, None, None, None
    return lease_id, lease.ttl_s, lease.owner if isinstance(lease.owner, bytes) else None, lease.idle_since


def hold_row(namespace: Namespace, prefix: bytes) -> tuple[bytes, float | None, None, Any, float | None]:
    """Return what a hold is now, but for who holds it."""
    hold = namespace.holds.get(prefix)
    if hold is None:
        return prefix, None, None, None, None
    job = hold.job
    return prefix, hold.linger_s, None, None if job is None else (job.name, job.least, job.most), hold.idle_since


def holder_row(namespace: Namespace, holder: tuple[bytes, int]) -> tuple[bytes, int, bool]:
    """Return whether a lease holds a prefix now; `holder` is prefix and lease id."""
    return *holder, holds(namespace, *holder)


def holds(namespace: Namespace, prefix: bytes, lease_id: int) -> bool:
    """Return whether a lease holds a prefix now."""
    hold, lease = namespace.holds.get(prefix), namespace.leases.get(lease_id)
    return hold is not None and lease in hold.leases


def history_row(namespace: Namespace, prefix: bytes) -> tuple[bytes, int | None, float | None]:
    """Return what a history is now, but for its events."""
    history = namespace.histories.get(prefix)
    return (prefix, None, None) if history is None else (prefix, history.floor, history.idle_since)


SLACK_BYTES: Final = 4 * 1024 * 1024
"""How much longer than twice what it has to say a journal may be: small stores are hardly ever cleaned."""
BATCH_BYTES: Final = 700
"""What a batch costs besides its rows: the objects that say what it speaks of (measured, of one key and one reply)."""
ENTRY_BYTES: Final = 16
"""What a key, an event or a lease costs in the journal besides its names and its value."""
ESTIMATE_BYTES: Final = 64 * 1024
"""So much is written between two estimates: they take a moment for each namespace."""


class JournalSize:
    """Estimates how much of the journal is still valid, and says by how much it is too long."""

    __slots__ = ("_engine", "_valid_bytes", "_written")

    def __init__(self, engine: StoreEngine) -> None:
        self._engine = engine
        self._written = ESTIMATE_BYTES  # since the last estimate
        self._valid_bytes = 0

    def grew(self, batch_bytes: int) -> None:
        """Note that a batch was written."""
        self._written += batch_bytes

    def excess(self, journal_bytes: int, batches: int) -> int:
        """Return by how many bytes a journal of that size is too long; not positive if it is not."""
        if self._written >= ESTIMATE_BYTES:
            self._written = 0
            self._valid_bytes = said_once_bytes(self._engine)
        return journal_bytes + BATCH_BYTES * batches - 2 * self._valid_bytes - SLACK_BYTES


def said_once_bytes(engine: StoreEngine) -> int:
    """Return about how many bytes say everything that a store holds, once: what it is charged without its objects."""
    state = engine.state
    size = state.memory_bytes - state.waiter_bytes
    for namespace in engine.namespaces.values():
        size -= (KEY_OVERHEAD_BYTES - ENTRY_BYTES) * len(namespace.values)
        size -= (QUEUE_OVERHEAD_BYTES - ITEM_OVERHEAD_BYTES) * len(namespace.queues)
        size -= (LEASE_BYTES - ENTRY_BYTES) * len(namespace.leases) + LEASED_KEY_BYTES * len(namespace.leased)
        for history in namespace.histories.values():
            size -= HISTORY_OVERHEAD_BYTES + (EVENT_BYTES - ENTRY_BYTES) * len(history.events)
    return size
