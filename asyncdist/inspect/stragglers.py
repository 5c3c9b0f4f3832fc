"""Who comes last to collectives, how often, and how long the others wait for it.

    for straggler in stragglers(documents):  # `dumps.document` of all ranks, or read from files
        print(straggler)
        straggler.rank, straggler.last, straggler.operations, straggler.waited_s, straggler.span_s

Only collectives count that every rank of the group has issued whose document is there. A rank comes last where another
one waits for it, and where the clocks of their hosts are known well enough to say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncdist.inspect.job import Document
from asyncdist.inspect.timeline import Clock, clocks, collectives, group_ranks

FROM_ROOT: Final = frozenset({"broadcast", "scatter"})
"""Here all wait for the root, and for nobody else."""


@dataclass
class Straggler:
    """A rank that came last to collectives of one kind."""

    group: str
    group_id: str
    operation: str
    rank: int
    last: int = 0
    """To how many of these `operations` it came last."""
    operations: int = 0
    waited_s: float = 0.0
    """How long another rank waited for it, in all: the mean of those that did."""
    longest_s: float = 0.0
    """The longest that one of them waited for it at once."""
    span_s: float = 0.0
    """From the first call of the operations to the last."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} came last to {self.last} of {self.operations} {self.operation} of group {self.group}: "
            f"the others waited {self.waited_s:.3g} of {self.span_s:.3g} s for it, {self.longest_s:.3g} s at most"
        )


def stragglers(documents: Sequence[Document]) -> list[Straggler]:
    """Those for whom others have waited, by group and operation; for whom they waited longest comes first."""
    clock = clocks(documents)
    groups = group_ranks(documents)
    issued: dict[tuple[str, str], list[float]] = {}
    latest: dict[tuple[str, str], float] = {}
    found: dict[tuple[str, str, int], Straggler] = {}
    for (group_id, _, _), entries in collectives(documents).items():
        if len(entries) < 2 or any(rank in clock and rank not in entries for rank in groups.get(group_id, ())):
            continue
        one = next(iter(entries.values()))
        kind = group_id, one["operation"]
        issued_s = {rank: entry["issued"] - clock[rank].ahead_s for rank, entry in entries.items()}
        issued.setdefault(kind, []).append(min(issued_s.values()))
        latest[kind] = max(latest.get(kind, 0.0), *issued_s.values())
        last = _last(one, issued_s, clock)
        waits = [] if last is None else _waits_for(last, entries, issued_s, clock)
        if last is not None and waits:
            straggler = found.setdefault((*kind, last), Straggler(one["group"], *kind, last))
            straggler.last += 1
            straggler.waited_s += sum(waits) / len(waits)
            straggler.longest_s = max(straggler.longest_s, *waits)
    for (group_id, operation, _), straggler in found.items():
        first_s = issued[group_id, operation]
        straggler.operations, straggler.span_s = len(first_s), latest[group_id, operation] - min(first_s)
    return sorted(found.values(), key=lambda one: -one.waited_s)


def _last(one: Mapping[str, Any], issued_s: Mapping[int, float], clock: Mapping[int, Clock]) -> int | None:
    """For whom the others wait, if that is not in doubt."""
    if one["collective"] in FROM_ROOT:
        root: int = one.get("root", -1)
        return root if root in issued_s else None
    last = max(issued_s, key=issued_s.__getitem__)
    early_s = ((issued_s[last] - at_s, rank) for rank, at_s in issued_s.items() if rank != last)
    return last if all(lead_s > clock[rank].doubt_s(clock[last]) for lead_s, rank in early_s) else None


def _waits_for(
    last: int, entries: Mapping[int, Mapping[str, Any]], issued_s: Mapping[int, float], clock: Mapping[int, Clock]
) -> list[float]:
    """How long each rank waited for `last` that did: a sender in a gather may have ended long before."""
    waits = []
    for rank, entry in entries.items():
        lead_s = issued_s[last] - issued_s[rank]
        if lead_s > clock[rank].doubt_s(clock[last]) and entry.get("ended", math.inf) - entry["issued"] >= lead_s:
            waits.append(lead_s)
    return waits
