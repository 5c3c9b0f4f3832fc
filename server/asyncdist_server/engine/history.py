"""What happened to the keys of one prefix lately, and which watches wait for more. No clock and no I/O.

A history begins with the first watch of its prefix, and ends when it has had no watch for a while. Only keys under a
watched prefix are recorded, for each prefix apart: other keys cost nothing and push no events out. The watches of a
prefix share its history. A slow one keeps nothing alive here: it finds that events which it has not read are gone.
"""

from __future__ import annotations

import bisect
import operator
from collections import deque
from typing import TYPE_CHECKING, Final

from asyncdist_server.engine.timers import Timed, left_s
from asyncdist_server.wire.messages import OK

if TYPE_CHECKING:
    from asyncdist_server.engine.namespace import Namespace
    from asyncdist_server.engine.state import StoreState

Event = tuple[int, int, bytes, bytes]
"""Revision, kind, key and (of a set) value."""

HISTORY_EVENTS: Final = 16_384
"""Most events remembered for a prefix: a rank of each of the largest jobs may come and go between two reads."""
HISTORY_BYTES: Final = 8 * 1024 * 1024
"""Most bytes of events remembered for a prefix; the newest stays whatever its size."""
HISTORY_LINGER_S: Final = 120.0
"""How long a prefix without a watch is still recorded: as long as a client that went away is remembered."""
NOTED_S: Final = 15.0
"""After so much of that time the journal is told when it began; without that, a restart begins it anew."""
HISTORY_OVERHEAD_BYTES: Final = 1500
"""What a history costs besides its events: the object, a deque's first block, its places in tables (measured)."""
EVENT_BYTES: Final = 160
"""What an event costs besides key and value: the tuple, its revision, its place in the queue (measured)."""
REPLY_EVENTS: Final = 1024
"""Most events in one answer; the next one carries on."""
REPLY_BYTES: Final = 256 * 1024
"""An answer holds no more than this, unless a single event does."""


class Recorder:
    """The histories of all namespaces, and which watches wait for more of them."""

    __slots__ = ("_histories", "_state", "filled")

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._histories: dict[History, None] = {}
        self.filled: dict[History, None] = {}
        """Those with events: a full store that refuses a thousand requests must not look through all each time."""

    def cost(self, prefix: bytes) -> int:
        """Return what it costs to begin a history."""
        return HISTORY_OVERHEAD_BYTES + len(prefix)

    def history(self, namespace: Namespace, prefix: bytes) -> History:
        """Return the history of `prefix`, which begins now if there is none."""
        history = namespace.histories.get(prefix)
        if history is None:
            history = self.begin(namespace, prefix)
            if namespace.changes is not None:
                namespace.changes.history(prefix)
        history.seen()
        return history

    def begin(self, namespace: Namespace, prefix: bytes) -> History:
        """Begin a history, whose time is still to be set."""
        history = namespace.histories[prefix] = History(self._state, namespace, prefix)
        self._histories[history] = None
        namespace.prefix_lengths[len(prefix)] = namespace.prefix_lengths.get(len(prefix), 0) + 1
        self._state.record_bytes(history.bytes)
        return history

    def end(self, history: History) -> None:
        """Record nothing more for a prefix without a watch."""
        self._state.timers.end(history)
        namespace, length = history.namespace, len(history.prefix)
        del namespace.histories[history.prefix]
        if namespace.changes is not None:
            namespace.changes.history(history.prefix)
        del self._histories[history]
        self.filled.pop(history, None)
        namespace.prefix_lengths[length] -= 1
        if not namespace.prefix_lengths[length]:
            del namespace.prefix_lengths[length]
        self._state.record_bytes(-history.bytes)

    def record(self, namespace: Namespace, kind: int, key: bytes, value: bytes) -> None:
        """Remember what happened to `key` for every prefix that is watched, and tell the watches that wait for it."""
        state = self._state
        state.revision += 1
        event: Event = (state.revision, kind, key, value)
        for length in list(namespace.prefix_lengths):
            prefix = key[:length]
            history = namespace.histories.get(prefix)
            if history is None or len(prefix) < length:
                continue
            history.append(event)
            if namespace.changes is not None:
                namespace.changes.event(prefix, event)
            if prefix in namespace.watchers:
                history.tell(event)

    def record_all(self, namespace: Namespace, kind: int, keys: list[bytes]) -> None:
        """Do for `keys`, which have no values any more, what `record` does for each."""
        first = self._state.revision + 1
        self._state.revision += len(keys)
        found: dict[History, list[Event]] = {}
        for length in namespace.prefix_lengths:
            for revision, key in enumerate(keys, first):
                history = namespace.histories.get(key[:length])
                if history is not None and len(history.prefix) == length:
                    found.setdefault(history, []).append((revision, kind, key, b""))
        for history, events in found.items():
            history.extend(events)

    def spare(self, late_s: float, now: float) -> None:
        """End nothing for as long as the daemon did not run, up to the whole time: a watch may want to go on."""
        for history in self._histories:
            history.seen_at = max(history.seen_at, now - HISTORY_LINGER_S + min(late_s, HISTORY_LINGER_S))

    def make_room(self, needed_bytes: int) -> None:
        """Forget events worth `needed_bytes`: what happened is worth less than what happens."""
        limit = self._state.memory_bytes - needed_bytes
        while self.filled and self._state.memory_bytes > limit:
            history = next(iter(self.filled))
            while history.events and self._state.memory_bytes > limit:
                history.drop_oldest()


class History(Timed):
    """The events of one prefix, oldest first. Those up to `floor` are not all here."""

    __slots__ = ("_state", "bytes", "events", "floor", "idle_since", "pinned", "prefix", "seen_at")

    def __init__(self, state: StoreState, namespace: Namespace, prefix: bytes) -> None:
        super().__init__(namespace)
        self._state = state
        self.prefix = prefix
        self.events: deque[Event] = deque()
        self.floor = state.revision
        self.bytes = HISTORY_OVERHEAD_BYTES + len(prefix)
        self.pinned = False  # a job needs it
        self.seen_at = 0.0  # when a watch asked last
        self.idle_since: float | None = None  # how old the store was then, once the journal is to know it

    def seen(self) -> None:
        """Note that there is a watch, or was one until now."""
        self.seen_at = self._state.now
        if self.idle_since is not None:
            self.idle_since = None
            self._changed()
        if self.deadline is None:
            self.deadline = self.seen_at + NOTED_S
            self._state.timers.arm(self)

    def resume(self, since: float, now: float) -> None:
        """Go on without a watch since the store's age was `since`."""
        self.idle_since = since
        self.seen_at = now - HISTORY_LINGER_S + left_s(HISTORY_LINGER_S, since, self._state.age_at(now))
        self.deadline = self.seen_at + HISTORY_LINGER_S
        self._state.timers.arm(self)

    def _changed(self) -> None:
        if self.namespace.changes is not None:
            self.namespace.changes.history(self.prefix)

    def append(self, event: Event) -> None:
        """Remember `event`, and forget the oldest ones where the bounds say so."""
        size = EVENT_BYTES + len(event[2]) + len(event[3])
        if not self.events:
            self._state.recorder.filled[self] = None
        self.events.append(event)
        self.bytes += size
        self._state.record_bytes(size)
        while len(self.events) > HISTORY_EVENTS or (self.bytes > HISTORY_BYTES and len(self.events) > 1):
            self.drop_oldest()

    def extend(self, events: list[Event]) -> None:
        """Remember `events`, or as many of the last of them as may be, and tell the watches that wait for one."""
        kept = events[-HISTORY_EVENTS:]
        if len(kept) < len(events):
            while self.events:
                self.drop_oldest()
            self.floor = kept[0][0] - 1
            self._changed()
        for event in kept:
            self.append(event)
        if self.namespace.changes is not None:
            for event in self.events:
                if event[0] >= kept[0][0]:
                    self.namespace.changes.event(self.prefix, event)
        if self.prefix in self.namespace.watchers:
            self.tell(events[0])

    def tell(self, event: Event) -> None:
        """Answer the watches that wait for more with `event`."""
        state = self._state
        answer = (event[0] + 1, [event])
        for waiter in self.namespace.watchers.take_all(self.prefix):
            state.finish(waiter, (waiter.request_id, OK, answer))

    def drop_oldest(self) -> None:
        """Forget one event; watchers that have not read it will be told that something is missing."""
        revision, _, key, value = self.events.popleft()
        if not self.events:
            del self._state.recorder.filled[self]
        size = EVENT_BYTES + len(key) + len(value)
        self.floor = revision
        self._changed()
        self.bytes -= size
        self._state.record_bytes(-size)

    def find(self, revision: int) -> Event | None:
        """Return the event of that revision, if it is remembered."""
        position = bisect.bisect_left(self.events, revision, key=operator.itemgetter(0))
        if position < len(self.events) and self.events[position][0] == revision:
            return self.events[position]
        return None

    def since(self, revision: int) -> list[Event]:
        """Return the oldest events that are not before `revision`, as many as one answer should hold."""
        found: list[Event] = []
        size = 0
        # From the end: a watch that keeps up has read nearly all of them.
        newest_first = []
        for event in reversed(self.events):
            if event[0] < revision:
                break
            newest_first.append(event)
        for event in reversed(newest_first):
            size += len(event[2]) + len(event[3]) + EVENT_BYTES
            if found and (size > REPLY_BYTES or len(found) == REPLY_EVENTS):
                break
            found.append(event)
        return found

    def fire(self, now: float) -> None:
        """End the history when no watch has waited for more of it for long enough."""
        if self.pinned or self.prefix in self.namespace.watchers:
            self.seen()
        ends_at = self.seen_at + HISTORY_LINGER_S
        if ends_at <= now:
            self._state.recorder.end(self)
            return
        if self.idle_since is None and self.seen_at + NOTED_S <= now:
            self.idle_since = self._state.age_at(self.seen_at)
            self._changed()
        self.deadline = self.seen_at + NOTED_S if self.idle_since is None else ends_at
        self._state.timers.arm(self)
