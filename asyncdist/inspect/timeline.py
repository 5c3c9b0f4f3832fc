"""Dumps of all ranks beside each other: how their clocks differ, and which of their entries are one operation."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeAlias

from asyncdist.inspect.job import Document, is_send


class Clock(NamedTuple):
    """That of a rank beside that of the lowest rank."""

    host: str
    """All ranks of a host have one clock."""
    ahead_s: float
    """What is to be taken from the rank's times, within `bound_s`; 0 within infinity if nobody has compared them."""
    bound_s: float

    def doubt_s(self, other: Clock) -> float:
        """How wrong a difference between times of the two ranks may be."""
        return 0.0 if self.host == other.host else self.bound_s + other.bound_s


def clocks(documents: Sequence[Document]) -> dict[int, Clock]:
    """The clock of each rank, along those comparisons that are least in doubt."""
    hosts = {document["rank"]: _host(document) for document in documents}
    compared: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for document in documents:
        own = _host(document)
        for told in document.get("clock", {}).get("compared", ()):
            other, ahead_s, bound_s = hosts.get(told["rank"], own), told["ahead_s"], abs(told["bound_s"])
            compared[own].append((bound_s, ahead_s, other))
            compared[other].append((bound_s, -ahead_s, own))
    found: dict[str, tuple[float, float]] = {}
    nearest = [(0.0, 0.0, hosts[min(hosts)])] if hosts else []
    while nearest:
        bound_s, ahead_s, host = heappop(nearest)
        if host not in found:
            found[host] = ahead_s, bound_s
            for more_s, further_s, other in compared[host]:
                heappush(nearest, (bound_s + more_s, ahead_s + further_s, other))
    return {rank: Clock(host, *found.get(host, (0.0, math.inf))) for rank, host in hosts.items()}


def _host(document: Document) -> str:
    """Containers of a host have names of their own, and one clock."""
    return str(document.get("clock", {}).get("host") or document.get("host"))


Entry: TypeAlias = Mapping[str, Any]
"""One of a document's, as dumps describe it."""
Pairs: TypeAlias = tuple[Sequence[Entry], Sequence[Entry]]
Place: TypeAlias = tuple[str, int, int]
"""A group's id, tag and sequence number: the same operation on all ranks."""


def collectives(documents: Iterable[Document]) -> dict[Place, dict[int, Entry]]:
    """The entry that each rank has of each collective."""
    found: dict[Place, dict[int, Entry]] = defaultdict(dict)
    for document in documents:
        for entry in document["entries"]:
            if entry["kind"] == "collective":
                found[entry["group_id"], entry["tag"], entry["sequence"]][document["rank"]] = entry
    return found


def group_ranks(documents: Iterable[Document]) -> dict[str, list[int]]:
    """The ranks of each group, by its id."""
    return {group["id"]: group["ranks"] for document in documents for group in document["groups"]}


def messages(documents: Sequence[Document], clock: Mapping[int, Clock]) -> Iterator[tuple[Entry, Entry]]:
    """The entries of sender and receiver of each message.

    Messages of one tag overtake none between two ranks, so those are counted from the beginning of the group. Where a
    ring no longer reaches back so far, they are counted so that each was sent as late as it can have been: that is
    right where a receive has ever waited for its message, and others are left out.
    """
    sent: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    received: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    whole: set[tuple[str, int]] = set()
    for document in documents:
        rank = document["rank"]
        for entry in document["entries"]:
            if entry["kind"] == "event" and entry["operation"].endswith(" made"):
                whole.add((entry["group_id"], rank))
            elif entry["kind"] == "message" and "error" not in entry:
                if is_send(entry):
                    sent[entry["group_id"], entry["tag"], rank, entry["peer"]].append(entry)
                elif "ended" in entry:
                    received[entry["group_id"], entry["tag"], entry["peer"], rank].append(entry)
    for key, receives in received.items():
        group_id, _, sender, receiver = key
        if sender not in clock:  # it has not been heard
            continue
        pairs: Pairs = sent[key], receives
        if not {(group_id, sender), (group_id, receiver)} <= whole:
            later_s = clock[sender].ahead_s - clock[receiver].ahead_s + clock[sender].doubt_s(clock[receiver])
            pairs = _aligned(*pairs, later_s)
        yield from zip(*pairs, strict=False)


def _aligned(sends: Sequence[Entry], receives: Sequence[Entry], later_s: float) -> Pairs:
    """Sends and receives that belong together; `later_s` is added to times of the receiver to compare them."""
    issued_s = [send["issued"] for send in sends]
    first = min((bisect_right(issued_s, one["ended"] + later_s) - 1 - i for i, one in enumerate(receives)), default=0)
    while first > -len(receives):  # the place of the first receive among the sends
        pairs = sends[max(first, 0) :], receives[max(-first, 0) :]
        if all(sent.get("bytes") == got.get("bytes") for sent, got in zip(*pairs, strict=False)):
            waited = any(got["issued"] + later_s < sent["issued"] for sent, got in zip(*pairs, strict=False))
            return pairs if waited else ((), ())
        first -= 1
    return (), ()
