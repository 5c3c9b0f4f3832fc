"""From the batches of a journal back to a store. No clock and no I/O, the time is passed in.

    replay = Replay()
    for each row of the journal, oldest first: replay.row(number, size, revision, flags, sections)
    replay.restore(engine, changes, maker, now)

Later batches overrule earlier ones; nothing is put into the engine before all are read.
"""

from __future__ import annotations

from typing import Any

from asyncdist_server.batch import (
    CLEAN,
    CLIENTS,
    EVENTS,
    GAPS,
    HISTORIES,
    HOLDERS,
    HOLDS,
    ITEMS,
    LEASES,
    PIECES,
    QUEUES,
    REPLIES,
    ROLLED_BACK,
    TAKEN,
    VALUES,
    BatchMaker,
    Section,
    Written,
)
from asyncdist_server.changes import ChangeLog
from asyncdist_server.clients import Reply
from asyncdist_server.engine import StoreEngine
from asyncdist_server.history import Event
from asyncdist_server.leases import HOLD_BYTES, LEASE_BYTES, Hold, Lease
from asyncdist_server.membership import Job, find_job
from asyncdist_server.namespace import Namespace
from asyncdist_server.state import StoreState


class _Stored:
    """What the rows read so far say of one namespace."""

    def __init__(self) -> None:
        self.values: dict[bytes, tuple[bytes, int]] = {}
        self.pieces: dict[bytes, list[bytes]] = {}  # what was appended to a value
        self.lengths: dict[bytes, int] = {}  # of a value with its pieces
        self.homes: dict[bytes, int] = {}
        self.bounds: dict[bytes, tuple[int, int]] = {}
        self.items: dict[bytes, dict[int, bytes]] = {}
        self.leases: dict[int, tuple[float, bytes | None]] = {}
        self.holds: dict[bytes, tuple[float, Any]] = {}  # time to linger and job
        self.holders: dict[bytes, set[int]] = {}
        self.histories: dict[bytes, tuple[int, int]] = {}  # floor and steps
        self.events: dict[bytes, dict[int, Event]] = {}


class Replay:
    """Reads rows; see the module's docstring."""

    def __init__(self) -> None:
        self.revision = 0
        self.clean = True
        """Whether the store stopped in order after the last batch."""
        self._batches: list[Written] = []
        self._namespaces: dict[str, _Stored] = {}
        self._clients: dict[bytes, str] = {}
        self._replies: dict[bytes, dict[int, Reply]] = {}
        self._taken: dict[bytes, dict[int, bytes]] = {}
        self._lost: dict[bytes, None] = {}  # clients of a store that this is a copy of: none of them comes back

    def row(self, number: int, size: int, revision: int, flags: int, sections: list[Section]) -> None:
        """Take the next row. Each counts as a batch of its own: that it was written with others matters no more."""
        self.revision = max(self.revision, revision)
        self.clean = bool(flags & CLEAN)
        if flags & ROLLED_BACK:
            self._lost.update(dict.fromkeys(self._clients))
        if flags & (ROLLED_BACK | GAPS):
            self.forget_histories()
        subjects: list[Section] = []
        for kind, name, rows in sections:
            if kind == CLIENTS:
                self._take_clients(rows)
                subjects.append((kind, name, [row[0] for row in rows]))
            elif kind == REPLIES:
                self._take_replies(rows)
                subjects.append((kind, name, [(row[0], [reply[0] for reply in row[1]]) for row in rows]))
            elif kind == TAKEN:
                self._take_items(rows)
            else:
                stored = self._namespaces.get(name)
                if stored is None:
                    stored = self._namespaces[name] = _Stored()
                self._take(number, kind, stored, rows)
                wide = kind in (ITEMS, EVENTS, HOLDERS)
                if kind != PIECES:  # these go with their value
                    subjects.append((kind, name, [(row[0], row[1]) if wide else row[0] for row in rows]))
                if kind == HOLDS:
                    subjects.append((HOLDERS, name, [(row[0], holder) for row in rows for holder in row[2] or ()]))
        self._batches.append(Written(number, number + 1, size, subjects))

    def forget_histories(self) -> None:
        """Drop the events that watchers could go on from."""
        for stored in self._namespaces.values():
            stored.histories.clear()
            stored.events.clear()

    def _take_clients(self, rows: list[Any]) -> None:
        for client_id, namespace in rows:
            self._lost.pop(client_id, None)
            if namespace is None:
                for table in (self._clients, self._replies, self._taken):
                    table.pop(client_id, None)
            else:
                self._clients[client_id] = namespace

    def _take_replies(self, rows: list[Any]) -> None:
        for client_id, replies, *floor in rows:
            known = self._replies.get(client_id)
            if known is None:
                known = self._replies[client_id] = {}
            for reply in replies:
                known[reply[0]] = reply
            # They stand in the order in which they were said. One that may be asked for again hides those behind it,
            # whose requests were asked before its own and waited: they go when it does.
            while floor and known and (first := next(iter(known))) < floor[0]:
                del known[first]

    def _take_items(self, rows: list[Any]) -> None:
        for client_id, items in rows:
            known = self._taken.setdefault(client_id, {})
            for request_id, key in items:
                if key is None:
                    known.pop(request_id, None)
                else:
                    known[request_id] = key

    def _take(self, number: int, kind: int, stored: _Stored, rows: list[Any]) -> None:
        if kind == VALUES:
            for key, value, lease_id in rows:
                if value is None:
                    stored.values.pop(key, None)
                    stored.homes.pop(key, None)
                else:
                    stored.values[key] = value, lease_id
                    stored.homes[key] = number
                stored.pieces.pop(key, None)
        elif kind == PIECES:
            for key, start, piece in rows:
                _append(stored, key, start, piece)
        elif kind == QUEUES:
            for key, head, tail in rows:
                if head < tail:
                    stored.bounds[key] = head, tail
                else:
                    stored.bounds.pop(key, None)
                    stored.items.pop(key, None)
        elif kind == ITEMS:
            for key, position, item in rows:
                stored.items.setdefault(key, {})[position] = item
        elif kind == EVENTS:
            for prefix, *event in rows:
                stored.events.setdefault(prefix, {})[event[0]] = tuple(event)
        elif kind == HOLDS:
            for prefix, linger_s, holders, job in rows:
                if linger_s is None:
                    stored.holds.pop(prefix, None)
                    stored.holders.pop(prefix, None)
                else:
                    stored.holds[prefix] = linger_s, job
                    if holders is not None:
                        stored.holders[prefix] = set(holders)
        elif kind == HOLDERS:
            for prefix, lease_id, holds in rows:
                known = stored.holders.setdefault(prefix, set())
                (known.add if holds else known.discard)(lease_id)
        else:
            tables: dict[int, dict[Any, Any]] = {LEASES: stored.leases, HISTORIES: stored.histories}
            for key, *what in rows:
                if what[0] is None:
                    tables[kind].pop(key, None)
                    if kind == HISTORIES:
                        stored.events.pop(key, None)
                else:
                    tables[kind][key] = (what[0], what[1] if len(what) > 1 else 0) if kind == HISTORIES else tuple(what)

    # ---- back into an engine

    def restore(self, engine: StoreEngine, changes: ChangeLog, maker: BatchMaker, now: float) -> None:
        """Fill an engine without clients, and what is to be known of the journal. Every lease begins anew."""
        self.fill(engine, now)
        engine.note_changes(changes)
        for name, stored in self._namespaces.items():
            noted = changes.of(name)
            assert noted is not None
            noted.homes = stored.homes
            noted.bounds = stored.bounds
            for prefix in engine.namespaces[name].histories if name in engine.namespaces else ():
                if prefix not in stored.histories:
                    noted.history(prefix)  # a job's, begun anew
            if name not in engine.namespaces:
                changes.namespace_dropped(name)
        for client_id, namespace in self._clients.items():
            changes.known.add(client_id)
            replies, taken = self._replies.get(client_id, {}), self._taken.get(client_id, {})
            engine.restore_client(client_id, namespace, replies, taken, now)
        for client_id in self._lost:
            engine.give_up(client_id)
        for written in self._batches:
            maker.recall(written)

    def fill(self, engine: StoreEngine, now: float) -> None:
        """Put all that lives in namespaces into an engine."""
        state = engine.state
        state.now = now
        state.revision = max(state.revision, self.revision)
        for name, stored in self._namespaces.items():
            self._restore_namespace(engine, name, stored, now)
        engine.renew_leases(now)

    def _restore_namespace(self, engine: StoreEngine, name: str, stored: _Stored, now: float) -> None:
        state = engine.state
        if not (stored.values or stored.bounds or stored.leases or stored.holds or stored.histories):
            return
        namespace = engine.restore_namespace(name)
        for lease_id, (ttl_s, owner) in stored.leases.items():
            _restore_lease(state, namespace, lease_id, ttl_s, owner)
        for key, (value, lease_id) in stored.values.items():
            if key in stored.pieces:
                value = b"".join((value, *stored.pieces[key]))
            state.memory_bytes += namespace.growth_by_value(key, value)
            namespace.values[key] = value
            if lease_id in namespace.leases:
                state.leases.attach(namespace.leases[lease_id], key)
        for key, (head, tail) in stored.bounds.items():
            items = stored.items[key]
            for number in range(head, tail):
                state.memory_bytes += namespace.growth_by_item(key, items[number])
                namespace.push_item(key, items[number], at_head=False)
        for prefix, (floor, steps) in stored.histories.items():
            _restore_history(state, namespace, prefix, floor, steps, stored.events.get(prefix, {}))
        for prefix, (linger_s, job) in stored.holds.items():
            _restore_hold(state, namespace, prefix, linger_s, stored.holders.get(prefix, set()), now)
            if job is not None:
                _restore_job(state, namespace, prefix, *job)


def _append(stored: _Stored, key: bytes, start: int, piece: bytes) -> None:
    """Take what was appended to a value. One whose beginning was dropped from the journal was replaced later."""
    if key not in stored.values:
        return
    pieces = stored.pieces.get(key)
    if pieces is None:
        pieces = stored.pieces[key] = []
        stored.lengths[key] = len(stored.values[key][0])
    if start != stored.lengths[key]:
        raise ValueError(f"{start} bytes of {key[:40]!r} should be known, and {stored.lengths[key]} are")
    pieces.append(piece)
    stored.lengths[key] += len(piece)


def _restore_lease(state: StoreState, namespace: Namespace, lease_id: int, ttl_s: float, owner: bytes | None) -> None:
    lease = Lease(state, namespace, lease_id, ttl_s, owner)
    namespace.leases[lease_id] = lease
    state.memory_bytes += LEASE_BYTES
    state.leases.count += 1
    if owner is not None:
        namespace.bound.setdefault(owner, {})[lease] = None


def _restore_history(
    state: StoreState, namespace: Namespace, prefix: bytes, floor: int, steps: int, events: dict[int, Event]
) -> None:
    history = state.recorder.history(namespace, prefix)
    history.floor, history.steps = floor, steps
    for revision in sorted(events):
        if revision > floor:
            history.append(events[revision])


def _restore_hold(
    state: StoreState, namespace: Namespace, prefix: bytes, linger_s: float, lease_ids: set[int], now: float
) -> None:
    hold = namespace.holds[prefix] = Hold(state, namespace, prefix)
    state.memory_bytes += HOLD_BYTES + len(prefix)
    hold.linger_s = linger_s
    for lease_id in lease_ids:
        lease = namespace.leases[lease_id]
        hold.leases.add(lease)
        lease.holds[hold] = None
    if not hold.leases:
        hold.linger(now)


def _restore_job(state: StoreState, namespace: Namespace, prefix: bytes, name: bytes, least: int, most: int) -> None:
    job = find_job(state, namespace, name)
    if isinstance(job, Job):  # else there is no room; the next join makes it
        job.least, job.most = least, most
        namespace.holds[prefix].job = job
