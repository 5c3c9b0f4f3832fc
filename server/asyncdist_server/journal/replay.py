"""From the batches of a journal back to a store. No clock and no I/O, the time is passed in.

    replay = Replay()
    for each row of the journal, oldest first: replay.row(number, size, revision, flags, sections)
    replay.restore(engine, changes, maker, now)

Later batches overrule earlier ones; nothing is put into the engine before all are read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from asyncdist_server.engine.changes import ChangeLog
from asyncdist_server.engine.clients import Reply
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.history import Event, History
from asyncdist_server.engine.leases import HOLD_BYTES, LEASE_BYTES, Hold, Lease
from asyncdist_server.engine.membership import Job, find_job
from asyncdist_server.engine.namespace import Namespace
from asyncdist_server.engine.state import StoreState
from asyncdist_server.journal.batch import (
    AGE,
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

STEP_S: Final = 15.0
"""Seconds in a step. Journals up to format 4 count in steps for how long a prefix has had no watch."""

_Began = tuple[float | None, int]
"""From which age of the store on a time counts, if the journal says it; and after how many starts of daemons it did."""


class _Stored:
    """What the rows read so far say of one namespace."""

    def __init__(self) -> None:
        self.values: dict[bytes, tuple[bytes, int]] = {}
        self.pieces: dict[bytes, list[bytes]] = {}  # what was appended to a value
        self.lengths: dict[bytes, int] = {}  # of a value with its pieces
        self.homes: dict[bytes, int] = {}
        self.bounds: dict[bytes, tuple[int, int]] = {}
        self.items: dict[bytes, dict[int, bytes]] = {}
        self.leases: dict[int, tuple[float, bytes | None, _Began]] = {}
        self.holds: dict[bytes, tuple[float, Any]] = {}  # time to linger and job
        self.lingering: dict[bytes, _Began] = {}
        self.holders: dict[bytes, set[int]] = {}
        self.histories: dict[bytes, tuple[int, _Began]] = {}  # with the floor
        self.events: dict[bytes, dict[int, Event]] = {}


class Replay:
    """Reads rows; see the module's docstring."""

    def __init__(self) -> None:
        self.revision = 0
        self.clean = True
        """Whether the store stopped in order after the last batch."""
        self.age = 0.0
        """For how many seconds daemons have served the store, as far as they noted it."""
        self._aged = False  # a row has said it: earlier ones are of an older format
        self._starts: list[float] = []  # how old it was when they started, the oldest ones perhaps left out
        self._batches: list[Written] = []
        self._namespaces: dict[str, _Stored] = {}
        self._clients: dict[bytes, tuple[str, _Began]] = {}
        self._replies: dict[bytes, dict[int, Reply]] = {}
        self._taken: dict[bytes, dict[int, bytes]] = {}
        self._lost: dict[bytes, None] = {}  # clients of a store that this is a copy of: none of them comes back

    @property
    def timed(self) -> bool:
        """Whether anything was found that ends by itself."""
        each = self._namespaces.values()
        return bool(self._clients) or any(stored.leases or stored.holds or stored.histories for stored in each)

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
            if kind == AGE:
                self._take_age(*rows[0])
            elif kind == CLIENTS:
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
                take = self._TAKE.get(kind)
                if take is None:
                    raise ValueError(f"unknown kind {kind}")
                take(self, stored, rows, number)
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

    def _take_age(self, age: float, started_age: float | None) -> None:
        self._aged = True
        self.age = age
        if started_age is not None:
            self._starts.append(started_age)

    def _began(self, row: tuple[Any, ...], place: int) -> _Began:
        return row[place] if len(row) > place else None, len(self._starts)

    def _since(self, began: _Began) -> float:
        """Return from which age on a time counts: the present one if no daemon has started since that was said."""
        since, starts = began
        if since is None:
            since = self._starts[starts] if starts < len(self._starts) else self.age
        return since

    def _take_clients(self, rows: list[Any]) -> None:
        for row in rows:
            client_id, namespace = row[:2]
            self._lost.pop(client_id, None)
            if namespace is None:
                for table in (self._clients, self._replies, self._taken):
                    table.pop(client_id, None)
            else:
                self._clients[client_id] = namespace, self._began(row, 2)

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

    def _take_values(self, stored: _Stored, rows: list[Any], number: int) -> None:
        for key, value, lease_id in rows:
            if value is None:
                stored.values.pop(key, None)
                stored.homes.pop(key, None)
            else:
                stored.values[key] = value, lease_id
                stored.homes[key] = number
            stored.pieces.pop(key, None)

    def _take_pieces(self, stored: _Stored, rows: list[Any], number: int) -> None:
        for key, start, piece in rows:
            _append(stored, key, start, piece)

    def _take_queues(self, stored: _Stored, rows: list[Any], number: int) -> None:
        for key, head, tail in rows:
            if head < tail:
                stored.bounds[key] = head, tail
            else:
                stored.bounds.pop(key, None)
                stored.items.pop(key, None)

    def _take_queued(self, stored: _Stored, rows: list[Any], number: int) -> None:
        for key, position, item in rows:
            stored.items.setdefault(key, {})[position] = item

    def _take_events(self, stored: _Stored, rows: list[Any], number: int) -> None:
        for prefix, *event in rows:
            stored.events.setdefault(prefix, {})[event[0]] = tuple(event)

    def _take_holds(self, stored: _Stored, rows: list[Any], number: int) -> None:
        for row in rows:
            prefix, linger_s, holders, job = row[:4]
            if linger_s is None:
                for table in (stored.lingering, stored.holds, stored.holders):
                    table.pop(prefix, None)
                continue
            stored.lingering[prefix] = self._began(row, 4)
            stored.holds[prefix] = linger_s, job
            if holders is not None:
                stored.holders[prefix] = set(holders)

    def _take_holders(self, stored: _Stored, rows: list[Any], number: int) -> None:
        for prefix, lease_id, holds in rows:
            known = stored.holders.setdefault(prefix, set())
            (known.add if holds else known.discard)(lease_id)
            stored.lingering[prefix] = None, len(self._starts)

    def _take_leases(self, stored: _Stored, rows: list[Any], number: int) -> None:
        for row in rows:
            if row[1] is None:
                stored.leases.pop(row[0], None)
            else:
                stored.leases[row[0]] = row[1], row[2], self._began(row, 3)

    def _take_histories(self, stored: _Stored, rows: list[Any], number: int) -> None:
        for row in rows:
            if row[1] is None:
                stored.histories.pop(row[0], None)
                stored.events.pop(row[0], None)
            else:
                stored.histories[row[0]] = row[1], self._unwatched(row)

    _TAKE: ClassVar[Mapping[int, Callable[[Replay, _Stored, list[Any], int], None]]] = {
        VALUES: _take_values,
        PIECES: _take_pieces,
        QUEUES: _take_queues,
        ITEMS: _take_queued,
        EVENTS: _take_events,
        HOLDS: _take_holds,
        HOLDERS: _take_holders,
        LEASES: _take_leases,
        HISTORIES: _take_histories,
    }
    """By the kind of a section of a namespace."""

    def _unwatched(self, row: tuple[Any, ...]) -> _Began:
        if self._aged:
            return self._began(row, 2)
        steps = row[2] if len(row) > 2 else 0
        return (-steps * STEP_S if steps else None), 0  # the store's age is 0 as long as nothing says it

    # ---- back into an engine

    def restore(self, engine: StoreEngine, changes: ChangeLog, maker: BatchMaker, now: float) -> None:
        """Fill an engine without clients, and what is to be known of the journal."""
        self.fill(engine, now)
        maker.start(self.age)
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
        clients = [(self._since(began), client_id) for client_id, (_, began) in self._clients.items()]
        for since, client_id in sorted(clients, key=operator.itemgetter(0)):
            changes.known.add(client_id)
            replies, taken = self._replies.get(client_id, {}), self._taken.get(client_id, {})
            engine.restore_client(client_id, self._clients[client_id][0], replies, taken, since, now)
        for client_id in self._lost:
            engine.give_up(client_id)
        for written in self._batches:
            maker.recall(written)

    def fill(self, engine: StoreEngine, now: float) -> None:
        """Put all that lives in namespaces into an engine."""
        state = engine.state
        state.now = now
        state.age_offset_s = self.age - now
        state.revision = max(state.revision, self.revision)
        for name, stored in self._namespaces.items():
            self._restore_namespace(engine, name, stored, now)
        engine.renew_leases(now)

    def _restore_namespace(self, engine: StoreEngine, name: str, stored: _Stored, now: float) -> None:
        state = engine.state
        if not (stored.values or stored.bounds or stored.leases or stored.holds or stored.histories):
            return
        namespace = engine.restore_namespace(name)
        for lease_id, (ttl_s, owner, began) in stored.leases.items():
            _restore_lease(state, namespace, lease_id, ttl_s, owner, self._since(began))
        for key, (value, lease_id) in stored.values.items():
            if key in stored.pieces:
                value = b"".join((value, *stored.pieces[key]))
            state.memory_bytes += namespace.growth_by_value(key, value)
            namespace.values[key] = value
            namespace.key_came(key)
            if lease_id in namespace.leases:
                state.leases.attach(namespace.leases[lease_id], key)
        for key, (head, tail) in stored.bounds.items():
            items = stored.items[key]
            for number in range(head, tail):
                state.memory_bytes += namespace.growth_by_item(key, items[number])
                namespace.push_item(key, items[number], at_head=False)
        for prefix, (floor, began) in stored.histories.items():
            history = _restore_history(state, namespace, prefix, floor, stored.events.get(prefix, {}))
            history.resume(self._since(began), now)
        for prefix, (linger_s, job) in stored.holds.items():
            hold = _restore_hold(state, namespace, prefix, linger_s, stored.holders.get(prefix, set()))
            if not hold.leases:
                hold.idle_since = self._since(stored.lingering[prefix])
                hold.linger(now)
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


def _restore_lease(
    state: StoreState, namespace: Namespace, lease_id: int, ttl_s: float, owner: bytes | None, since: float
) -> None:
    lease = Lease(state, namespace, lease_id, ttl_s, owner)
    lease.idle_since = since
    namespace.leases[lease_id] = lease
    state.memory_bytes += LEASE_BYTES
    state.leases.count += 1
    if owner is not None:
        namespace.bound.setdefault(owner, {})[lease] = None


def _restore_history(
    state: StoreState, namespace: Namespace, prefix: bytes, floor: int, events: dict[int, Event]
) -> History:
    history = state.recorder.begin(namespace, prefix)
    history.floor = floor
    for revision in sorted(events):
        if revision > floor:
            history.append(events[revision])
    return history


def _restore_hold(state: StoreState, namespace: Namespace, prefix: bytes, linger_s: float, lease_ids: set[int]) -> Hold:
    hold = namespace.holds[prefix] = Hold(state, namespace, prefix)
    state.memory_bytes += HOLD_BYTES + len(prefix)
    hold.linger_s = linger_s
    for lease_id in lease_ids:
        lease = namespace.leases[lease_id]
        hold.leases.add(lease)
        lease.holds[hold] = None
    return hold


def _restore_job(state: StoreState, namespace: Namespace, prefix: bytes, name: bytes, least: int, most: int) -> None:
    job = find_job(state, namespace, name)
    if isinstance(job, Job):  # else there is no room; the next join makes it
        job.least, job.most = least, most
        namespace.holds[prefix].job = job
