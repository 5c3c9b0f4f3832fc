"""The daemon's metrics, as numbers: what there is, what it means, and what it is now. `http` gives them to Prometheus.

Nothing here runs before a scrape: the daemon counts in `counters`, the rest is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from asyncdist_server.engine.counters import RESULT_NAMES, Histogram
from asyncdist_server.serving.daemon import not_served, version
from asyncdist_server.wire.messages import OPERATION_NAMES

if TYPE_CHECKING:
    from asyncdist_server.serving.daemon import StoreServer

PREFIX: Final = "asyncdist_store_"


class Metric(NamedTuple):
    """One metric; its name is without `PREFIX`, and a counter's without ``_total``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    labels: tuple[str, ...] = ()


Value = float | Histogram
Samples = Sequence[tuple[tuple[str, ...], Value]]

BUILD_INFO: Final = Metric("build_info", "gauge", "Always 1: what runs here.", ("version", "durability"))
OPERATIONS: Final = Metric("operations", "counter", "Requests answered.", ("operation", "result"))
OPERATION_SECONDS: Final = Metric(
    "operation_seconds",
    "histogram",
    "From the arrival of a request to its reply's way out, if it was answered at once; of samples.",
    ("operation",),
)
BLOCKED_SECONDS: Final = Metric(
    "blocked_seconds", "histogram", "How long requests waited that could not be answered at once.", ("operation",)
)
READY: Final = Metric("ready", "gauge", "1 while clients are served, 0 while starting, recovering or draining.")
CONNECTIONS: Final = Metric("connections", "gauge", "Connections that have proven themselves.", ("protocol",))
HALF_OPEN: Final = Metric("connections_half_open", "gauge", "Connections that have not proven themselves yet.")
CONNECTION_LIMIT: Final = Metric("connection_limit", "gauge", "Connections allowed at a time.")
OPENED: Final = Metric("connections_opened", "counter", "Connections that have proven themselves.", ("protocol",))
REFUSED: Final = Metric("connections_refused", "counter", "Connections refused before they were open.", ("reason",))
DROPPED: Final = Metric("connections_dropped", "counter", "Open connections that the daemon ended.", ("reason",))
CLIENTS: Final = Metric("clients", "gauge", "Clients that are connected.")
CLIENTS_AWAY: Final = Metric("clients_away", "gauge", "Clients that may come back and retry.")
WAITERS: Final = Metric("waiters", "gauge", "Blocked requests.")
WAITER_LIMIT: Final = Metric("waiter_limit", "gauge", "Blocked requests allowed.")
OLDEST_WAIT: Final = Metric("oldest_wait_seconds", "gauge", "Age of the oldest blocked get, wait or multi_get.")
NAMESPACES: Final = Metric("namespaces", "gauge", "Jobs that have clients or keys.")
KEYS: Final = Metric("keys", "gauge", "Keys of all namespaces.")
QUEUES: Final = Metric("queues", "gauge", "Queues that hold something.")
LEASES: Final = Metric("leases", "gauge", "Leases.")
MEMORY: Final = Metric("memory_bytes", "gauge", "Memory charged.", ("kind",))
MEMORY_LIMIT: Final = Metric("memory_limit_bytes", "gauge", "Memory that may be charged.")
OUTPUT_WAITING: Final = Metric(
    "output_waiting_connections", "gauge", "Connections whose replies wait for the client to read."
)
COMMITS: Final = Metric("journal_commits", "counter", "Commits to the journal.")
COMMIT_SECONDS: Final = Metric("journal_commit_seconds", "histogram", "How long a commit took.")
COMMIT_BYTES: Final = Metric("journal_commit_bytes", "histogram", "How much a commit wrote.")
JOURNAL_BYTES: Final = Metric("journal_bytes", "gauge", "Size of what the journal holds.")
JOURNAL_WAITING: Final = Metric("journal_waiting_connections", "gauge", "Connections whose replies wait for a commit.")
JOURNAL_STUCK: Final = Metric(
    "journal_stuck_seconds", "gauge", "How long a commit has taken that takes more than a second, 0 if none does."
)
JOURNAL_FAILED: Final = Metric(
    "journal_failed", "gauge", "1 once the journal cannot be written; nothing is served then."
)

METRICS: Final = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""


def collect(server: StoreServer, now: float) -> Iterator[tuple[Metric, Samples]]:
    """Give every metric with what it is at this moment, `now` on the loop's clock; what does not apply is left out."""
    yield BUILD_INFO, [((version(), server.config.durability.name), 1.0)]
    yield from _of_requests(server)
    yield from _of_connections(server)
    yield from _of_contents(server, now)
    yield from _of_journal(server)


def _of_requests(server: StoreServer) -> Iterator[tuple[Metric, Samples]]:
    counters = server.engine.counters
    yield (
        OPERATIONS,
        [
            ((OPERATION_NAMES[operation], RESULT_NAMES.get(code, str(code))), count)
            for operation, counts in counters.results.items()
            for code, count in enumerate(counts)
            if count
        ],
    )
    for metric, histograms in ((OPERATION_SECONDS, counters.latencies), (BLOCKED_SECONDS, counters.blocked)):
        yield metric, _histograms(histograms)


def _histograms(histograms: Mapping[int, Histogram]) -> Samples:
    return [((OPERATION_NAMES[operation],), found) for operation, found in histograms.items() if any(found.counts)]


def _of_connections(server: StoreServer) -> Iterator[tuple[Metric, Samples]]:
    counters = server.engine.counters
    yield READY, [((), float(not not_served(server)))]
    yield CONNECTIONS, [((name,), count - counters.closed.get(name, 0)) for name, count in counters.opened.items()]
    yield HALF_OPEN, [((), server.half_open_count)]
    yield CONNECTION_LIMIT, [((), server.config.limits.connections)]
    for metric, counts in ((OPENED, counters.opened), (REFUSED, counters.refused), (DROPPED, counters.dropped)):
        yield metric, [((name,), count) for name, count in counts.items()]


def _of_contents(server: StoreServer, now: float) -> Iterator[tuple[Metric, Samples]]:
    engine, limits = server.engine, server.config.limits
    held = engine.statistics()
    waiter_bytes, remembered_bytes = engine.state.waiter_bytes, engine.state.remembered_bytes
    oldest = next(iter(engine.state.key_waits), None)
    yield OLDEST_WAIT, [((), 0.0 if oldest is None else max(0.0, now - oldest.since))]
    for metric, name in (
        (CLIENTS, "clients"),
        (CLIENTS_AWAY, "clients_away"),
        (WAITERS, "waiters"),
        (NAMESPACES, "namespaces"),
        (KEYS, "keys"),
        (QUEUES, "queues"),
        (LEASES, "leases"),
    ):
        yield metric, [((), held[name])]
    event_bytes = engine.state.event_bytes
    data_bytes = held["memory_bytes"] - waiter_bytes - remembered_bytes - event_bytes
    kinds = {
        "data": data_bytes,
        "waiters": waiter_bytes,
        "replies": remembered_bytes,
        "events": event_bytes,
        "input": server.inbound_bytes,
    }
    yield MEMORY, [((kind,), size) for kind, size in kinds.items()]
    yield MEMORY_LIMIT, [((), limits.memory_bytes)]
    yield OUTPUT_WAITING, [((), server.unsaid.waiting_count)]
    yield WAITER_LIMIT, [((), limits.waiters)]


def _of_journal(server: StoreServer) -> Iterator[tuple[Metric, Samples]]:
    gate = server.gate
    if gate is None:
        return
    statistics = gate.statistics
    yield COMMITS, [((), statistics.commits)]
    yield COMMIT_SECONDS, [((), statistics.durations)]
    yield COMMIT_BYTES, [((), statistics.sizes)]
    yield JOURNAL_BYTES, [((), gate.journal_bytes)]
    yield JOURNAL_WAITING, [((), gate.waiting_count)]
    yield JOURNAL_STUCK, [((), gate.stuck_s)]
    yield JOURNAL_FAILED, [((), float(server.failure is not None))]
