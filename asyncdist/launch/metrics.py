"""Metrics of a node: what the ranks of this launcher have done, for Prometheus. Nothing is asked before a scrape."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from asyncdist.errors import LaunchError
from asyncdist.inspect.ask import ask_all, endpoints_here
from asyncdist.inspect.counts import SECONDS
from asyncdist.inspect.endpoint import NOW
from asyncdist.launch.config import Endpoint
from asyncdist_server.engine.counters import Histogram
from asyncdist_server.ops.metrics import Metric, Samples

if TYPE_CHECKING:
    from aiohttp import web

PREFIX: Final = "asyncdist_"
MISSING: Final = "--metrics-port needs aiohttp and prometheus-client: pip install 'asyncdist[server]'"

OPERATION_SECONDS: Final = Metric(
    "operation_seconds", "histogram", "From the call of an operation to its end.", ("operation", "size")
)
OPERATION_BYTES: Final = Metric(
    "operation_bytes", "counter", "Bytes of the operations that ended well.", ("operation", "size")
)
OPERATIONS_FAILED: Final = Metric("operations_failed", "counter", "Operations that failed.", ("operation", "size"))
WAITED_FOR: Final = Metric("waited_for", "counter", "Collectives here that waited for this rank last.", ("rank",))
MESSAGE_BYTES: Final = Metric("message_bytes", "counter", "Bytes of messages.", ("peer", "direction"))
RANKS_LOST: Final = Metric("ranks_lost", "gauge", "Ranks that ranks here have lost.")
RANK_ANSWERS: Final = Metric("rank_answers", "gauge", "1 where the rank answers, with a world that is open.", ("rank",))
RANK_OPERATIONS: Final = Metric("rank_operations", "counter", "Operations of the rank that have ended.", ("rank",))
RANK_SECONDS: Final = Metric("rank_operation_seconds", "counter", "What they took, added up.", ("rank",))
RANK_OLDEST: Final = Metric("rank_oldest_operation_seconds", "gauge", "Age of the oldest under way.", ("rank",))
RANK_LATE: Final = Metric("rank_loop_late_seconds", "gauge", "How late the event loop of the rank is.", ("rank",))

METRICS: Final = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""

Documents = Sequence[Mapping[str, Any]]
ASK_EVERY_S: Final = 1.0
"""The same answers are told to all who read within it."""


class NodeMetrics:
    """What is known of the ranks of this node. `ask` gives the documents of those that answer."""

    def __init__(self, ask: Callable[[], Awaitable[Documents]]) -> None:
        self._ask = ask
        self._counts: dict[int, Mapping[str, Any]] = {}
        self._ranks: Sequence[int] = ()
        self._asking: asyncio.Future[Documents] | None = None
        self._asked_s = 0.0

    def begin(self, ranks: Sequence[int]) -> None:
        """Another attempt begins, with these ranks on this node."""
        self._counts.clear()
        self._asking = None
        self._ranks = ranks

    async def collect(self) -> Iterator[tuple[Metric, Samples]]:
        """Ask the ranks, and give every metric. Of a rank that does not answer counts what it has said before."""
        documents = {said["rank"]: said for said in await self._asked() if said["rank"] in self._ranks}
        self._counts |= {
            rank: said["counts"] for rank, said in documents.items() if said.get("counts") and _adds_up(said["counts"])
        }
        return self._samples(documents)

    async def _asked(self) -> Documents:
        """Ask for all who want to know within a second: readers of this port are not to keep the ranks busy."""
        if self._asking is None or (self._asking.done() and time.monotonic() >= self._asked_s + ASK_EVERY_S):
            self._asking, self._asked_s = asyncio.ensure_future(self._ask()), time.monotonic()
        return await asyncio.shield(self._asking)

    def _samples(self, documents: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[Metric, Samples]]:
        yield from _sums(self._counts.values())
        yield RANK_ANSWERS, [((str(rank),), float(rank in documents)) for rank in self._ranks]
        operations = {rank: said["operations"] for rank, said in self._counts.items()}
        for metric, total in (
            (RANK_OPERATIONS, lambda one: sum(one["within"])),
            (RANK_SECONDS, lambda one: one["seconds"]),
        ):
            yield metric, [((str(rank),), sum(map(total, each))) for rank, each in operations.items()]
        oldest = {
            rank: max((said["time"] - one["issued"] for one in said["entries"] if "ended" not in one), default=0.0)
            for rank, said in documents.items()
        }
        yield RANK_OLDEST, [((str(rank),), age_s) for rank, age_s in oldest.items()]
        yield RANK_LATE, [((str(rank),), said["loop_late"]) for rank, said in documents.items()]


async def documents_of(pids: Collection[int], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Ask the ranks that run in the sessions of these workers."""
    endpoints = [each for each in endpoints_here(environ.get("ASYNCDIST_SOCKET_DIR", "")) if _session(each.pid) in pids]
    answers = await ask_all(endpoints, None, NOW)
    return [said for answer in answers.values() for said in answer.documents]


def _adds_up(counts: Any) -> bool:
    """Whether what a rank says can be added up: a rank that says nonsense does not end the metrics of the others."""
    from asyncdist_server.ops.http import metrics_text

    try:
        return bool(metrics_text(PREFIX, _sums([counts])))
    except Exception:  # it may be anything
        return False


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended
        return 0


def _sums(counts: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Metric, Samples]]:
    """What holds of all ranks together."""
    seconds: dict[tuple[str, str], Histogram] = {}
    nbytes, failed, waited_for, moved = (Counter[tuple[str, ...]]() for _ in range(4))
    lost: set[int] = set()
    for said in counts:
        for one in said["operations"]:
            key = one["operation"], one["size"]
            sums = seconds.setdefault(key, Histogram(SECONDS))
            sums.sum += one["seconds"]
            sums.counts = [sum(both) for both in zip(sums.counts, one["within"], strict=True)]
            nbytes[key] += one["bytes"]
            failed[key] += one["failed"]
        for one in said["waited_for"]:
            waited_for[(str(one["rank"]),)] += one["times"]
        for one in said["peers"]:
            for direction in ("sent", "received"):
                moved[str(one["rank"]), direction] += one[direction]
        lost.update(said["lost"])
    yield OPERATION_SECONDS, list(seconds.items())
    for metric, sums_of in (
        (OPERATION_BYTES, nbytes),
        (OPERATIONS_FAILED, failed),
        (WAITED_FOR, waited_for),
        (MESSAGE_BYTES, moved),
    ):
        yield metric, list(sums_of.items())
    yield RANKS_LOST, [((), len(lost))]


@contextlib.asynccontextmanager
async def serve_metrics(metrics: NodeMetrics, endpoint: Endpoint) -> AsyncIterator[str]:
    """Serve /metrics while the block runs; gives the address. Raises LaunchError, and OSError if it is taken."""
    try:
        from aiohttp import web
        from prometheus_client import generate_latest as _  # noqa: F401
    except ImportError as error:
        raise LaunchError(MISSING) from error
    from asyncdist_server.ops.http import METRICS_TYPE, metrics_text, serve_routes

    async def answer(request: web.Request) -> web.Response:
        text = metrics_text(PREFIX, await metrics.collect())
        return web.Response(body=text, headers={"Content-Type": METRICS_TYPE})

    logger = logging.getLogger("asyncdist.launch.metrics")  # nonsense that was sent does not concern the job
    logger.setLevel(logging.CRITICAL)
    async with serve_routes({"/metrics": answer}, endpoint.host, endpoint.port, logger) as address:
        yield address
