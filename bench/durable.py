"""Subject durable: 64 concurrent writers of a store that has every acknowledged write on its disk.

Each writer sets its own key, and the next value once the last one was acknowledged; a sample is ten sets of each,
read back and compared afterwards. ``asyncdist``: tasks that share one client, as the tasks of a process do; ``64
connections``: a client each. Redis runs with ``appendfsync always``, redis-py's asyncio client has a connection for
each task; redis-benchmark is Redis' own C client with 64 connections, it verifies nothing. ``memory``: asyncdist
without a disk.
"""

from __future__ import annotations

import asyncio
import importlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from bench import store
from bench.model import Candidate, Case, Profile, Rank, RankContext, Record, Subject
from bench.process import Child
from bench.servers import ServerProcess, asyncdist_server, redis_server
from bench.store import (
    asyncdist_run,
    host_and_port,
    missing_redis,
    missing_redis_benchmark,
    missing_store,
    value_of,
)

WRITERS = 64
SETS = 10
"""Sets of each writer in a sample."""
OPERATION = "durable set"


class ServerWithDirectory:
    """A server process and the directory of its data, which goes with it."""

    def __init__(self, server: ServerProcess, directory: tempfile.TemporaryDirectory[str]) -> None:
        self._server = server
        self._directory = directory
        self.address = server.address
        self.child: Child = server.child

    def close(self) -> None:
        """End the process and remove its data."""
        self._server.close()
        self._directory.cleanup()


def durable_server(core: int | None) -> ServerWithDirectory:
    """Start asyncdist's daemon in durable mode, its data where temporary files are."""
    directory = tempfile.TemporaryDirectory(prefix="bench-durable-", ignore_cleanup_errors=True)
    return ServerWithDirectory(
        asyncdist_server(core, "--durability", "durable", "--data-dir", directory.name), directory
    )


def durable_redis(core: int | None) -> ServerWithDirectory:
    """Start Redis so that it acknowledges what is on its disk."""
    directory = tempfile.TemporaryDirectory(prefix="bench-durable-", ignore_cleanup_errors=True)
    durable = ("--appendonly", "yes", "--appendfsync", "always", "--dir", directory.name)
    return ServerWithDirectory(redis_server(core, *durable), directory)


class WritersRank(Rank):
    """What the two kinds of client share: 64 tasks, and reading back."""

    async def measure(self, case: Case) -> Record:
        record = Record()
        for number in range(case.warmup + case.samples):
            start_ns = time.perf_counter_ns()
            await asyncio.gather(*(self._write(writer, number) for writer in range(WRITERS)))
            end_ns = time.perf_counter_ns()
            last = value_of(number * SETS + SETS - 1)
            record.wrong += sum(value != last for value in await self.read())
            if number >= case.warmup:
                record.add(start_ns, end_ns)
        return record

    async def _write(self, writer: int, number: int) -> None:
        for count in range(SETS):
            await self.set(writer, value_of(number * SETS + count))

    async def set(self, writer: int, value: bytes) -> None:
        """Set the key of a writer."""
        raise NotImplementedError

    async def read(self) -> list[bytes]:
        """Return what all writers' keys hold."""
        raise NotImplementedError


class AsyncdistRank(WritersRank):
    """asyncdist's client; option ``connections`` says how many of them there are."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._connections = int(context.options["connections"])
        self._stores: list[Any] = []
        self.run = asyncdist_run()

    async def open(self) -> None:
        store_class: Any = importlib.import_module("asyncdist.store").TCPStore
        self._stores = [store_class(*host_and_port(self._context.address)) for _ in range(self._connections)]
        await asyncio.gather(*(store.check([]) for store in self._stores))

    async def close(self) -> None:
        await asyncio.gather(*(store.close() for store in self._stores))

    async def set(self, writer: int, value: bytes) -> None:
        await self._stores[writer % self._connections].set(f"writer/{writer}", value)

    async def read(self) -> list[bytes]:
        values: list[bytes] = await self._stores[0].multi_get([f"writer/{writer}" for writer in range(WRITERS)])
        return values


class RedisRank(store.RedisAsyncClient, WritersRank):
    """redis-py with asyncio: a connection for each task that waits."""

    async def set(self, writer: int, value: bytes) -> None:
        await self._client.set(f"writer/{writer}", value)

    async def read(self) -> list[bytes]:
        values: list[bytes] = await self._client.mget([f"writer/{writer}" for writer in range(WRITERS)])
        return values


class RedisBenchmarkRank(store.RedisBenchmarkRank):
    """redis-benchmark with 64 connections. One run gives one rate; it verifies nothing."""

    async def measure(self, case: Case) -> Record:
        """Set; every sample is the run's mean time for ``case.operations``."""
        count = str(case.operations * case.samples)
        return self._run(case, "-c", str(WRITERS), "-n", count, "-r", str(WRITERS), "-t", "set")


def cases(profile: Profile) -> Sequence[Case]:
    """Return the cells of a profile."""
    samples, warmup = profile.samples(large=False)
    title = f"durable set 8 B, {WRITERS} writers"
    return [Case(OPERATION, 8, samples, warmup, operations=WRITERS * SETS, title=title)]


def _ours(name: str, connections: int, server: Any) -> Candidate:
    return Candidate(
        name,
        "bench.durable:AsyncdistRank",
        frozenset({OPERATION}),
        missing=missing_store,
        server=server,
        options={"connections": connections},
        own=True,
    )


CANDIDATES = (
    _ours("asyncdist", 1, durable_server),
    _ours(f"asyncdist, {WRITERS} connections", WRITERS, durable_server),
    _ours("asyncdist, memory", 1, asyncdist_server),
    Candidate(
        "redis asyncio",
        "bench.durable:RedisRank",
        frozenset({OPERATION}),
        missing=missing_redis,
        server=durable_redis,
    ),
    Candidate(
        "redis-benchmark",
        "bench.durable:RedisBenchmarkRank",
        frozenset({OPERATION}),
        missing=missing_redis_benchmark,
        server=durable_redis,
    ),
)
SUBJECT = Subject("durable", "Writes that are on disk when acknowledged", (1,), cases, CANDIDATES)
