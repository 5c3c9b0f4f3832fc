"""The timeline of a job as a trace that Perfetto (ui.perfetto.dev) opens, from the documents of its ranks.

Each rank has a track, and below it one for each group and tag, one for messages of each, one for what it waits for in
the store, and a counter of the bytes under way. Arrows lead from each send to where the message is received, and from
rank to rank through a collective, in the order in which they came to it. All times are those of the lowest rank's
clock. The file is a sequence of protobuf's `TracePacket`, of which few fields are needed: they are written here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from heapq import heappush, heapreplace
from itertools import count
from typing import Any, Final

from asyncdist.inspect.job import Document
from asyncdist.inspect.timeline import Clock, clocks, collectives, messages

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
_LAST_S: Final = 1e10
"""What is later is no time, but something else in a broken dump."""
_NOT_SHOWN: Final = frozenset({"kind", "operation", "issued", "ended"})
_BYTES: Final = 3
_ORDERED: Final = 3


def trace(documents: Sequence[Document]) -> Iterator[bytes]:
    """The parts of the file."""
    clock = clocks(documents)
    leaves: dict[int, int] = {}
    arrives: dict[int, int] = {}
    flows = count(1)
    for entries in collectives(documents).values():
        leaves |= dict.fromkeys(map(id, entries.values()), next(flows))
    for sent, received in messages(documents, clock):
        leaves[id(sent)] = arrives[id(received)] = next(flows)
    numbers = count(1)
    width = len(str(max(clock, default=0)))
    for document in sorted(documents, key=lambda one: int(one["rank"])):
        rank = document["rank"]
        yield from _Rank(f"rank {rank:0{width}}", document, clock[rank], numbers).packets(leaves, arrives)


class _Rank:
    def __init__(self, name: str, document: Document, clock: Clock, numbers: Iterator[int]) -> None:
        self._document = document
        self._ahead_s = clock.ahead_s
        self._numbers = numbers
        self._track = next(numbers)
        doubt = "" if not clock.bound_s else f", clock within {clock.bound_s * 1e6:.0f} us"
        doubt = doubt if clock.bound_s < 1e9 else ", clock not compared"
        self._name = f"{name} ({document.get('host', '')}{doubt})"
        self._lanes: dict[str, list[tuple[float, int]]] = defaultdict(list)
        """By name, until when each track of that name is taken, as a heap: operations that overlap need several."""

    def packets(self, leaves: Mapping[int, int], arrives: Mapping[int, int]) -> Iterator[bytes]:
        """`leaves` and `arrives` are the arrows at the beginning and end of entries, by their `id`."""
        yield _packet(60, _field(1, self._track) + _field(2, self._name) + _field(11, _ORDERED))
        changes: list[tuple[float, int]] = []
        timely = [
            one for one in self._document["entries"] if 0 <= one["issued"] <= one.get("ended", _LAST_S) <= _LAST_S
        ]
        for entry in sorted(timely, key=lambda one: float(one["issued"])):
            begin_s, end_s = entry["issued"] - self._ahead_s, entry.get("ended", _LAST_S) - self._ahead_s
            what = _field(23, entry["operation"]) + b"".join(_arguments(entry))
            if entry["kind"] == "event":
                yield _event(self._track, INSTANT, begin_s, what)
                continue
            track = yield from self._lane(_track_name(entry), begin_s, end_s)
            if id(entry) in leaves:
                what += _fixed64(47, leaves[id(entry)])
            yield _event(track, BEGIN, begin_s, what)
            if id(entry) in arrives:
                here = _field(23, f"from rank {entry['peer']}") + _fixed64(48, arrives[id(entry)])
                yield _event(track, INSTANT, end_s, here)
            changes.append((begin_s, entry.get("bytes", 0)))
            if "ended" in entry:
                yield _event(track, END, end_s)
                changes.append((end_s, -entry.get("bytes", 0)))
        track = next(self._numbers)
        counter = _field(1, track) + _field(5, self._track) + _field(2, "bytes under way")
        yield _packet(60, counter + _field(8, _field(3, _BYTES)))
        total = 0
        for at_s, change in sorted(changes):
            total += change
            if change:
                yield _event(track, COUNTER, at_s, _field(30, total))

    def _lane(self, name: str, begin_s: float, end_s: float) -> Generator[bytes, None, int]:
        """Returns a track of that name which is free; Perfetto shows tracks of one name as one."""
        lanes = self._lanes[name]
        if lanes and lanes[0][0] <= begin_s:
            return heapreplace(lanes, (end_s, lanes[0][1]))[1]
        track = next(self._numbers)
        heappush(lanes, (end_s, track))
        yield _packet(60, _field(1, track) + _field(5, self._track) + _field(2, name))
        return track


def _track_name(entry: Mapping[str, Any]) -> str:
    if entry["kind"] == "store":
        return "store"
    messages = " messages" if entry["kind"] == "message" else ""
    return f"{entry['group']}{messages}" + (f" tag {entry['tag']}" if entry["tag"] else "")


def _arguments(entry: Mapping[str, Any]) -> Iterator[bytes]:
    for name, value in entry.items():
        if name not in _NOT_SHOWN:
            shown = _field(4, value) if type(value) is int and abs(value) < 1 << 63 else _field(6, str(value))
            yield _field(4, _field(10, name) + shown)


def _event(track: int, kind: int, at_s: float, what: bytes = b"") -> bytes:
    return _packet(11, _field(9, kind) + _field(11, track) + what, _field(8, round(at_s * 1e9)))


def _packet(number: int, content: bytes, more: bytes = b"") -> bytes:
    """A `TracePacket` of a trace. All are of one sequence."""
    return _field(1, more + _field(10, 1) + _field(number, content))


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of a protobuf message: a number, or a text or message with its length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value & (1 << 64) - 1)
    data = value.encode(errors="backslashreplace") if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _fixed64(number: int, value: int) -> bytes:
    return _varint(number << 3 | 1) + value.to_bytes(8, "little")


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
