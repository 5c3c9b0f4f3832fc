"""Watchers under load: what they were told, in which stretches without gaps, and what is wrong with that."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from linearizability import UNKNOWN, Operation

from asyncdist.errors import WatchCompactedError
from asyncdist.store import TCPStore
from asyncdist.store.watch import WatchEvent

SENTINEL = "sentinel"


@dataclass
class Stretch:
    """Events between the start of a watch and its end, or the error that says that something is missing."""

    entered_at: float
    first_revision: int
    events: list[WatchEvent] = field(default_factory=list)
    received_at: list[float] = field(default_factory=list)
    complete: bool = False
    """Whether it goes on to the sentinel, the last change of all."""


class Watcher:
    """Watches a prefix to the sentinel; a stretch that ends with `WatchCompactedError` is followed by a new one."""

    def __init__(self, store: TCPStore, prefix: str) -> None:
        self.stretches: list[Stretch] = []
        self.entered = asyncio.Event()
        self._store = store
        self._prefix = prefix

    async def run(self) -> None:
        """Watch until the sentinel comes, or is found to be there when a watch has to begin anew."""
        over = False
        while not over:
            try:
                async with self._store.watch(self._prefix) as watch:
                    assert watch.revision is not None
                    stretch = Stretch(time.monotonic(), watch.revision)
                    self.stretches.append(stretch)
                    self.entered.set()
                    over = await self._store.check([self._prefix + SENTINEL])
                    while not over:
                        event = await anext(watch)
                        stretch.events.append(event)
                        stretch.received_at.append(time.monotonic())
                        over = stretch.complete = event.key == self._prefix + SENTINEL
            except WatchCompactedError:
                continue


def problems_of(watchers: Iterable[Watcher], operations: list[Operation], prefix: str) -> list[str]:
    """Return what the watchers were told wrongly, given all operations on the keys under `prefix`."""
    found: list[str] = []
    for watcher in watchers:
        events = [event for stretch in watcher.stretches for event in stretch.events]
        for one, other in itertools.pairwise(event.revision for event in events):
            if other <= one:
                found.append(f"revision {other} was told after {one}")
        for stretch in watcher.stretches:
            found += _gaps(stretch, prefix)
            found += _compared(stretch, operations, prefix)
    found += _starts([stretch for watcher in watchers for stretch in watcher.stretches])
    return found


def _starts(stretches: list[Stretch]) -> list[str]:
    """A watch never begins before what somebody has been told already."""
    told = sorted(
        (at, event.revision)
        for stretch in stretches
        for at, event in zip(stretch.received_at, stretch.events, strict=True)
    )
    found, newest, index = [], 0, 0
    for stretch in sorted(stretches, key=lambda stretch: stretch.entered_at):
        # When it was asked is not known, only when it was answered: what came since the stretch before is left out.
        while index < len(told) and told[index][0] < stretch.entered_at - 5.0:
            newest = max(newest, told[index][1])
            index += 1
        if stretch.first_revision <= newest:
            found.append(f"a watch began at revision {stretch.first_revision} after {newest} was told")
    return found


def _gaps(stretch: Stretch, prefix: str) -> list[str]:
    """Each value of a counter and of a log shows whether the change before it was told."""
    found: list[str] = []
    values: dict[str, bytes] = {}
    for event in stretch.events:
        name = event.key.removeprefix(prefix)
        before = values.get(name)
        if event.kind == "set":
            values[name] = event.value
        if before is None or name[0] not in "nl":
            continue
        if name[0] == "n" and int(event.value) != int(before) + 1:
            found.append(f"counter {name} went from {before!r} to {event.value!r}")
        elif name[0] == "l" and not (event.value.startswith(before) and event.value[len(before) :].count(b",") == 1):
            found.append(f"log {name} grew by {event.value[len(before) :]!r} at revision {event.revision}")
    return found


def _compared(stretch: Stretch, operations: list[Operation], prefix: str) -> list[str]:
    """Every change asked in the stretch and acknowledged was told once, in an order that fits calls and returns."""
    seen: dict[tuple[str, bytes], int] = {}
    for position, event in enumerate(stretch.events):
        name = event.key.removeprefix(prefix)
        mark = _mark(name, event.value) if event.kind == "set" else None
        if mark is not None and seen.setdefault(mark, position) != position:
            found = f"{mark} was told twice, at revisions {stretch.events[seen[mark]].revision} and {event.revision}"
            return [found]
    changes: list[tuple[int, Operation]] = []
    for operation in operations:
        marks = [mark for mark in marks_of(operation) if mark is not None]
        places = [seen[mark] for mark in marks if mark in seen]
        changes += [(place, operation) for place in places]
        due = stretch.complete and operation.called_at > stretch.entered_at and operation.result is not UNKNOWN
        if due and len(places) < len(marks):
            return [f"{operation} was never told"]
    changes.sort(key=lambda change: change[0])
    latest = -math.inf
    for _, operation in changes:
        if operation.returned_at < latest:
            return [f"{operation} was told after a change that began when it had returned"]
        latest = max(latest, operation.called_at)
    return []


def _mark(name: str, value: bytes) -> tuple[str, bytes] | None:
    """What identifies a change by its event: of a log what was appended, of others the value. No two are alike."""
    if name.startswith("l"):
        return name, value.removesuffix(b",").rpartition(b",")[2] + b","
    if name.startswith(("n", "p")):
        return name, value
    return None


def marks_of(operation: Operation) -> list[tuple[str, bytes] | None]:
    """The marks of the events that a change must cause, as far as they identify it."""
    key = str(operation.key)
    if key.startswith("l") and operation.name == "append":
        return [(key, operation.arguments[0])]
    if key.startswith("n") and operation.name == "add" and isinstance(operation.result, int):
        return [(key, b"%d" % operation.result)]
    if key == "p" and operation.name == "set":
        return [("p/1", operation.arguments[0][0]), ("p/2", operation.arguments[0][1])]
    return []
