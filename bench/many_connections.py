"""Subject many-connections: four processes with 2,500 connections each, each of which waits for one key, then one set.

A sample is the time from the set to the last wake-up in any process, on the connections of the whole run. Connections
that are refused, lost or not woken count as wrong. ``connection_bytes`` is how much larger the server's resident memory
is while all of them wait than before the first one came, divided by their number; ``connect_s`` is what opening them
took. Redis has no waiting for a key: there everybody subscribes to a channel. torch's server is measured with a tenth
of the connections: it looks up the name of each client's host, one after the other, so that ten thousand would take
minutes to come in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.cases import Case, Rank, RankContext, Record
from bench.missing import missing_module, missing_torch
from bench.model import Candidate, Profile, Subject
from bench.process import raise_file_limit
from bench.servers import ServerProcess, asyncdist_server, asyncdist_torch_server, redis_server, torch_store_server
from bench.store import host_and_port, missing_redis
from bench.usage import status_bytes
from bench.waiting import WIRES, Fleet, WaitingClient

RANKS: Final = 4
CONNECTIONS: Final = 10_000
FEW_CONNECTIONS: Final = 1_000
SMOKE_CONNECTIONS: Final = 200
SAMPLES: Final = 3
OPENING: Final = 64
"""Connections that a process has on their way at a time: all processes together stay below what kernels queue."""
STEP_TIMEOUT_S: Final = 30.0
"""How long opening, waiting and waking may take before what is missing counts as lost."""
POLL_S: Final = 0.002


class WaitingRank(Rank):
    """One process with its share of the connections."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._wire = WIRES[context.options["wire"]]
        self._server_pid: int = context.options["server_pid"]
        self._clients: list[WaitingClient] = []
        self._setter: WaitingClient | None = None
        self._fleet = Fleet(0)
        self._bytes_before = 0
        self._run = 0

    async def open(self) -> None:
        """Look how large the server is while nobody is connected; the first process connects to set the key later."""
        raise_file_limit()
        self._bytes_before = status_bytes("VmRSS", self._server_pid)
        if self._context.rank == 0:
            self._setter = await self._connect(fleet := Fleet(1))
            if not await fleet.until("opened", 1, STEP_TIMEOUT_S):
                raise ConnectionError("the server lets nobody in")

    async def close(self) -> None:
        for client in (*self._clients, *([self._setter] if self._setter else [])):
            client.close()

    async def measure(self, case: Case) -> Record:
        """Wait on every connection, set once, and again."""
        record = Record()
        self._run += 1
        count = case.operations // self._context.world_size
        if len(self._clients) < count:
            record.extra["connect_s"] = await self._open_up_to(count)
        for number in range(case.samples):
            await self._sample(f"go-{self._run}-{number}", record)
        return record

    async def _open_up_to(self, count: int) -> float:
        began_s = time.perf_counter()
        self._fleet.size = count
        while len(self._clients) < count:
            chunk = [self._connect(self._fleet) for _ in range(min(OPENING, count - len(self._clients)))]
            self._clients += await asyncio.gather(*chunk)
            await self._fleet.until("opened", len(self._clients), STEP_TIMEOUT_S)
        return time.perf_counter() - began_s

    async def _connect(self, fleet: Fleet) -> WaitingClient:
        host, port = host_and_port(self._context.address)
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: self._wire(fleet), host, port))[1]

    async def _sample(self, key: str, record: Record) -> None:
        fleet = self._fleet
        fleet.armed = fleet.woken = 0
        for client in self._clients:
            if not client.gone:
                client.arm(key.encode())
        await fleet.until("armed", fleet.size, STEP_TIMEOUT_S)
        await self._meet(key)
        start_ns = time.perf_counter_ns()
        if self._setter is not None:
            grown = status_bytes("VmRSS", self._server_pid) - self._bytes_before
            record.extra["connection_bytes"] = grown / (fleet.size * self._context.world_size)
            start_ns = time.perf_counter_ns()
            self._setter.set(key.encode())
        await fleet.until("woken", fleet.size, STEP_TIMEOUT_S)
        end_ns = max(fleet.last_woken_ns, start_ns + 1)
        record.add(start_ns if self._setter is not None else end_ns - 1, end_ns)
        record.wrong += fleet.size - min(fleet.woken, fleet.size - fleet.lost)

    async def _meet(self, name: str) -> None:
        """Wait until every process waits on all its connections; the setter goes on when the last one is there."""
        directory = Path(self._context.directory)
        (directory / f"{name}.{self._context.rank}").touch()
        if self._context.rank:
            return
        while len(list(directory.glob(f"{name}.*"))) < self._context.world_size:  # noqa: ASYNC110, ASYNC240 - files
            await asyncio.sleep(POLL_S)  # of other processes set no event, and nothing else is to be done here


def redis_for_many(core: int | None) -> ServerProcess:
    """Start Redis with room for all: it allows 10,000 by itself, which does not leave one for the setter."""
    return redis_server(core, "--maxclients", str(CONNECTIONS + 100))


def cases(profile: Profile) -> Sequence[Case]:
    """Return the cells: few connections, then many, which the few are part of."""
    if not profile.neighbors:
        return [_case("wake few", SMOKE_CONNECTIONS)]
    return [_case("wake few", FEW_CONNECTIONS), _case("wake many", CONNECTIONS)]


def _case(operation: str, count: int) -> Case:
    title = f"{count:,} connections woken by one set"
    timeout_s = 2 * STEP_TIMEOUT_S * (SAMPLES + count // OPENING)
    return Case(operation, 0, SAMPLES, 0, "span", operations=count, timeout_s=timeout_s, title=title)


FEW: Final = frozenset({"wake few"})
ALL: Final = FEW | {"wake many"}
ENTRY: Final = "bench.many_connections:WaitingRank"
ASYNCDIST = Candidate(
    "asyncdist",
    ENTRY,
    ALL,
    missing=lambda: missing_module("asyncdist_server"),
    server=asyncdist_server,
    options={"wire": "native"},
    own=True,
)
ASYNCDIST_TORCH = Candidate(
    "asyncdist, torch's protocol",
    ENTRY,
    ALL,
    missing=lambda: missing_module("asyncdist_server"),
    server=asyncdist_torch_server,
    options={"wire": "torch"},
    own=True,
)
TORCH = Candidate("torch", ENTRY, FEW, missing=missing_torch, server=torch_store_server, options={"wire": "torch"})
REDIS = Candidate("redis", ENTRY, ALL, missing=missing_redis, server=redis_for_many, options={"wire": "redis"})
SUBJECT = Subject(
    "many-connections",
    "Many connections that wait for one key",
    (RANKS,),
    cases,
    (ASYNCDIST, ASYNCDIST_TORCH, TORCH, REDIS),
    modes=("free",),
)
