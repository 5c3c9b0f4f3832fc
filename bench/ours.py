"""asyncdist's own side of the message and all_reduce subjects, written as a user would write it."""

from __future__ import annotations

import importlib
import time
from typing import Any

from bench.baselines import ALL_REDUCE_OPERATIONS, MESSAGE_OPERATIONS, missing_module
from bench.cases import Case, RankContext, Record
from bench.runner import Candidate
from bench.verify import MessagePattern, SumPattern


def missing_asyncdist() -> str | None:
    """Why asyncdist cannot be measured, or None."""
    failure = missing_module("asyncdist")
    if failure is None and not hasattr(importlib.import_module("asyncdist"), "init_process_group"):
        failure = "not available: asyncdist.init_process_group"
    return failure


class AsyncdistRank:
    """One rank of asyncdist; the transport comes from ASYNCDIST_TRANSPORT."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._rank = context.rank
        self._dist: Any = importlib.import_module("asyncdist")
        self._group: Any = None
        self.run = self._dist.run

    async def open(self) -> None:
        """Join the world; rank 0 hosts the store."""
        self._group = self._dist.init_process_group(
            init_method=f"tcp://{self._context.address}",
            rank=self._rank,
            world_size=self._context.world_size,
        )
        await self._group.__aenter__()
        await self._dist.barrier()

    async def close(self) -> None:
        """Leave the world."""
        await self._group.__aexit__(None, None, None)

    async def measure(self, case: Case) -> Record:
        """Run one case."""
        await self._dist.barrier()
        if case.operation == "ping_pong":
            return await self._ping_pong(case)
        if case.operation == "one_way":
            return await self._one_way(case)
        return await self._all_reduce(case)

    async def _ping_pong(self, case: Case) -> Record:
        """Each side posts its next receive before it sends; half of rank 0's round trip is the sample."""
        dist, record, pattern = self._dist, Record(), MessagePattern(case.nbytes)
        total = case.warmup + case.samples
        if self._rank == 0:
            ping, pong = pattern.empty(), pattern.empty()
            for number in range(total):
                pattern.fill(ping, number)
                arrived = dist.irecv(pong, 1)
                start_ns = time.perf_counter_ns()
                sent = dist.isend(ping, 1)
                await arrived
                end_ns = time.perf_counter_ns()
                await sent
                record.wrong += not pattern.is_right(pong, number)
                if number >= case.warmup:
                    record.add(start_ns, end_ns)
            return record
        buffers = [pattern.empty() for _ in range(2)]
        arrived = dist.irecv(buffers[0], 0)
        for number in range(total):
            await arrived
            if number + 1 < total:
                arrived = dist.irecv(buffers[(number + 1) % 2], 0)
            await dist.isend(buffers[number % 2], 0)
        return record

    async def _one_way(self, case: Case) -> Record:
        """Rank 1 posts, barrier, rank 0 sends: from before isend to the receiver's Work done."""
        dist, record, pattern = self._dist, Record(), MessagePattern(case.nbytes)
        array = pattern.empty()
        for number in range(case.warmup + case.samples):
            if self._rank == 0:
                pattern.fill(array, number)
                await dist.barrier()
                start_ns = time.perf_counter_ns()
                await dist.isend(array, 1)
            else:
                arrived = dist.irecv(array, 0)
                await dist.barrier()
                start_ns = time.perf_counter_ns()
                await arrived
            end_ns = time.perf_counter_ns()
            if self._rank == 1:
                record.wrong += not pattern.is_right(array, number)
            if number >= case.warmup:
                record.add(start_ns, end_ns)
        return record

    async def _all_reduce(self, case: Case) -> Record:
        dist, record = self._dist, Record()
        pattern = SumPattern(case.nbytes, self._rank, self._context.world_size)
        array = pattern.empty()
        for number in range(case.warmup + case.samples):
            pattern.fill(array, number)
            await dist.barrier()
            start_ns = time.perf_counter_ns()
            await dist.all_reduce(array)
            end_ns = time.perf_counter_ns()
            record.wrong += not pattern.is_right(array, number)
            if number >= case.warmup:
                record.add(start_ns, end_ns)
        return record


def _candidate(name: str, transport: str) -> Candidate:
    return Candidate(
        name,
        "bench.ours:AsyncdistRank",
        MESSAGE_OPERATIONS | ALL_REDUCE_OPERATIONS,
        missing=missing_asyncdist,
        environment={"ASYNCDIST_TRANSPORT": transport, "OMP_NUM_THREADS": "1"},
        own=True,
    )


ASYNCDIST_TCP = _candidate("asyncdist", "tcp")
ASYNCDIST_UNIX = _candidate("asyncdist unix", "unix")
