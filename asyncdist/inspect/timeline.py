"""Dumps of all ranks beside each other: how their clocks differ, and which of their entries are one operation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeAlias

Document: TypeAlias = Mapping[str, Any]
"""What `dumps.document` returns, or was read of a file."""


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
        for one in document.get("clock", {}).get("compared", ()):
            other = hosts.get(one["rank"], own)
            compared[own].append((one["bound_s"], one["ahead_s"], other))
            compared[other].append((one["bound_s"], -one["ahead_s"], own))
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
    return str(document.get("clock", {}).get("host") or document["host"])


Place: TypeAlias = tuple[str, int, int]
"""A group's id, tag and sequence number: the same operation on all ranks."""


def collectives(documents: Iterable[Document]) -> dict[Place, dict[int, Mapping[str, Any]]]:
    """The entry that each rank has of each collective."""
    found: dict[Place, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for document in documents:
        for entry in document["entries"]:
            if entry["kind"] == "collective":
                found[entry["group_id"], entry["tag"], entry["sequence"]][document["rank"]] = entry
    return found


def group_ranks(documents: Iterable[Document]) -> dict[str, list[int]]:
    """The ranks of each group, by its id."""
    return {group["id"]: group["ranks"] for document in documents for group in document["groups"]}
