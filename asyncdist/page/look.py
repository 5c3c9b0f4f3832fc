"""What the page shows of a store's clients, and of the documents of a job's ranks: one look, as JSON has it.

Times are seconds since 1970, rates bytes a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from asyncdist.inspect.job import Document, Job, is_send
from asyncdist.inspect.stragglers import stragglers
from asyncdist.inspect.why import Why
from asyncdist.store.request_store import StoreClient, WaitingClient

WINDOW_S: Final = 10.0
"""What has ended within it counts for throughput."""
SHOWN: Final = 20
"""Stragglers, links and errors: the worst, the busiest, the last."""
CLIENTS: Final = 100


def clients_now(clients: Iterable[StoreClient], waits: Iterable[WaitingClient]) -> list[dict[str, Any]]:
    """Those that have lost their connection, and those that wait for a key, come first."""
    longest = {
        (wait.namespace, wait.client, wait.address): {"waits_for": ", ".join(wait.keys), "since_s": wait.waited}
        for wait in sorted(waits, key=lambda wait: wait.waited)
        if wait.for_keys
    }
    rows = [asdict(each) | longest.get((each.namespace, each.client, each.address), {}) for each in clients]
    return sorted(
        rows,
        key=lambda row: (not row["away"], -row.get("since_s", 0), row["namespace"], row["rank"] or 0, row["client"]),
    )[:CLIENTS]


def look_now(job: Job) -> dict[str, Any]:
    """What the ranks do, of what is under way."""
    why = Why(job)
    verdict = why.verdict()
    rows = [{"waits_for": (), **row, "missing": row["rank"] in job.missing} for row in why.rows()]
    return {
        "size": job.size,
        "verdict": verdict.kind,
        "sentence": verdict.sentence,
        "ranks": rows,
    }


def look_back(job: Job, now_s: float) -> dict[str, Any]:
    """What the ranks did, of all that they remember."""
    documents = list(job.documents.values())
    recent = [
        (document["rank"], entry)
        for document in documents
        for entry in document.get("entries", ())
        if now_s - WINDOW_S <= entry.get("ended", 0.0) <= now_s and "error" not in entry
    ]
    return {
        "back_to": now_s,
        "stragglers": [
            {
                "rank": one.rank,
                "operation": one.operation,
                "group": one.group,
                "last": one.last,
                "operations": one.operations,
                "waited_s": one.waited_s,
            }
            for one in stragglers([document for document in documents if "entries" in document])[:SHOWN]
        ],
        "bytes_per_s": sum(entry.get("bytes", 0) for _, entry in recent) / WINDOW_S,
        "links": _links(recent),
        "errors": sorted(_errors(documents), key=lambda one: -one["time"])[:SHOWN],
    }


def _links(recent: Iterable[tuple[int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Messages between two ranks, as the senders tell of them; the busiest first."""
    sums: defaultdict[tuple[int, int, str], int] = defaultdict(int)
    for rank, entry in recent:
        if entry["kind"] == "message" and is_send(entry):
            sums[rank, entry["peer"], entry.get("transport", "")] += entry.get("bytes", 0)
    busiest = sorted(sums.items(), key=lambda item: -item[1])[:SHOWN]
    return [
        {"from": sender, "to": receiver, "transport": transport, "bytes_per_s": nbytes / WINDOW_S}
        for (sender, receiver, transport), nbytes in busiest
    ]


def _errors(documents: Iterable[Document]) -> Iterator[dict[str, Any]]:
    for document in documents:
        for entry in document.get("entries", ()):
            if "error" in entry:
                when = entry.get("ended", entry["issued"])
                yield {"rank": document["rank"], "time": when, "operation": entry["operation"], "error": entry["error"]}
