"""The measuring loop that every library is timed by: an untimed barrier, then one operation.

`AdapterRank` is the process's side: it makes the adapter its candidate names and runs a case's operation through it.
Messages are in `bench.messages`, many operations at once in `bench.bursts`, objects in `bench.object_calls`.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from bench import bursts, messages, object_calls
from bench.adapters.base import Adapter, Start
from bench.cases import Case, Rank, RankContext, Record
from bench.operations import Buffers, make_buffers
from bench.stall import run_timed, watch
from bench.usage import PeakMemory, own_segment_bytes

SMALL_BYTES = 1 << 10
"""An operation of this size goes first where memory is measured: connections and their buffers are there then."""
KEPT_BYTES = 64 << 20
"""Arrays of larger cases are not kept while others measure: every rank of every candidate would hold its own."""


class AdapterRank(Rank):
    """One measuring process of a library. Options: ``adapter`` (module:Class), ``timed_loop`` (see `bench.stall`)."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        module, _, name = context.options["adapter"].partition(":")
        self._adapter: Adapter = getattr(importlib.import_module(module), name)(context)
        self._last: tuple[str, int, Buffers, Start] | None = None
        runner = run_timed if context.options.get("timed_loop") else getattr(self._adapter, "run", None)
        if runner is not None:
            self.run = runner

    async def open(self) -> None:
        await self._adapter.open()

    async def close(self) -> None:
        await self._adapter.close()

    async def measure(self, case: Case) -> Record:
        await self._adapter.pass_barrier()
        if case.operation in messages.OPERATIONS:
            return await messages.measure(self._adapter, case, self._context.rank)
        if case.operation in bursts.OPERATIONS:
            return await bursts.measure(self._adapter, case, self._context)
        if case.operation in object_calls.OPERATIONS:
            return await object_calls.measure(self._adapter, case, self._context)
        return await self._collective(case)

    def _buffers(self, operation: str, nbytes: int) -> Buffers:
        adapter, context = self._adapter, self._context
        return make_buffers(
            operation, nbytes, context.rank, context.world_size, adapter.allocate, in_place=adapter.in_place
        )

    def _prepared(self, case: Case) -> tuple[Buffers, Start]:
        """Return the arrays of the last run if it was of the same case: new ones take longer than a run."""
        if self._last is None or self._last[:2] != (case.operation, case.nbytes):
            self._last = None  # gives the memory back first
            buffers = self._buffers(case.operation, case.nbytes)
            self._last = (case.operation, case.nbytes, buffers, self._adapter.prepare(case.operation, buffers))
        buffers, start = self._last[2:]
        if case.nbytes > KEPT_BYTES:
            self._last = None
        return buffers, start

    async def _collective(self, case: Case) -> Record:
        adapter = self._adapter
        buffers, start = self._prepared(case)
        record = Record()
        if case.memory:
            record.extra = await self._memory(case, buffers, start)
        await _samples(adapter, case, buffers, start, record)
        if case.stall_samples:
            record.extra |= await watch(start, adapter.pass_barrier, case.stall_samples)
        return record

    async def _memory(self, case: Case, buffers: Buffers, start: Start) -> dict[str, float]:
        """Return what the first operation of this size takes: peak memory beyond arrays and warm connections."""
        small = self._buffers(case.operation, min(case.nbytes, SMALL_BYTES))
        buffers.fill(0)
        buffers.is_right(0)  # touches what the checks need
        for once in (self._adapter.prepare(case.operation, small), self._adapter.barrier):
            work = once()
            if work is not None:
                await work
        peak = PeakMemory()
        work = start()
        if work is not None:
            await work
        await self._adapter.pass_barrier()
        return {"memory_bytes": float(peak.growth_bytes()), "segment_bytes": float(own_segment_bytes())}


async def _samples(adapter: Adapter, case: Case, buffers: Buffers, start: Start, record: Record) -> None:
    """Take the case's samples. Everything that is not the operation lies outside the clock's two readings."""
    total = case.warmup + case.samples
    for number in range(total):
        buffers.fill(number)
        await adapter.pass_barrier()
        cpu_ns = time.process_time_ns()
        start_ns = time.perf_counter_ns()
        work: Any = start()
        if work is not None:
            await work
        end_ns = time.perf_counter_ns()
        cpu_ns = time.process_time_ns() - cpu_ns
        if adapter.verifies:
            record.wrong += not buffers.is_right(number, whole=number == total - 1)
        if number >= case.warmup:
            record.add(start_ns, end_ns, cpu_ns)
