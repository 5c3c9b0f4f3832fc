"""The measuring loops that every library is timed by: an untimed barrier, then one operation.

`AdapterRank` is the process's side: it makes the adapter that its candidate names and runs a case's operation through
that adapter. Every result of every sample is verified. Where a sample is no collective, it is one of these:

* ``ping_pong``: half a round trip; each side's next receive is posted before it sends.
* ``one_way``: rank 1 posts its receive, an untimed barrier, rank 0 sends; from before the send to the receiver's
  completion (one clock serves the whole machine).
* ``window``: as OSU's bandwidth test, 64 sends outstanding, then one word back; rank 0's time.
* ``in flight``: ``case.operations`` all_reduces of as many arrays are issued, then all are awaited.
* ``one by one``: the same, each awaited before the next is issued.
* ``groups``: as many groups of all ranks, one all_reduce in flight in each.
* a collective of objects: each object is a dict with a name, numbers and an array of ``case.nbytes``. Each library
  serializes as it does: asyncdist by msgpack, the others by pickle.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from bench.adapters import Adapter, Start
from bench.model import Case, Rank, RankContext, Record
from bench.operations import ITEM_BYTES, PERIOD, Array, Buffers, MessagePattern, make_buffers
from bench.process import PeakMemory, own_segment_bytes
from bench.stall import run_timed, watch

MESSAGES: Final = frozenset({"ping_pong", "one_way", "window"})

WINDOW: Final = 64
"""Messages outstanding, as in OSU's bandwidth test."""


IN_FLIGHT: Final = "in flight"

ONE_BY_ONE: Final = "one by one"

GROUPS: Final = "groups"

BURSTS: Final = frozenset({IN_FLIGHT, ONE_BY_ONE, GROUPS})


OBJECTS: Final = ("all_gather_object", "broadcast_object", "gather_object", "scatter_object")
"""The root is rank 0."""

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
        if case.operation in MESSAGES:
            return await measure_messages(self._adapter, case, self._context.rank)
        if case.operation in BURSTS:
            return await measure_burst(self._adapter, case, self._context)
        if case.operation in OBJECTS:
            return await measure_objects(self._adapter, case, self._context)
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


async def measure_messages(adapter: Adapter, case: Case, rank: int) -> Record:
    """Run a case of ``MESSAGES``."""
    record = Record()
    if rank > 1:
        return record
    if case.operation == "ping_pong":
        await (_ping(adapter, case, record) if rank == 0 else _pong(adapter, case))
    elif case.operation == "one_way":
        await (_one_way_out(adapter, case, record) if rank == 0 else _one_way_in(adapter, case, record))
    else:
        await _window(adapter, case, rank, record)
    return record


def _message_array(adapter: Adapter, pattern: MessagePattern) -> Array:
    array = adapter.allocate(pattern.base.size)
    array.fill(-1.0)
    return array


async def _finish(adapter: Adapter, handle: Any) -> None:
    """Wait for a handle outside the timed part."""
    if handle is not None:
        if adapter.wait is None:
            await handle
        else:
            adapter.wait(handle)


async def _ping(adapter: Adapter, case: Case, record: Record) -> None:
    wait, pattern = adapter.wait, MessagePattern(case.nbytes)
    out, back = _message_array(adapter, pattern), _message_array(adapter, pattern)
    out_message, back_message = adapter.message(out), adapter.message(back)
    for number in range(case.warmup + case.samples):
        pattern.fill(out, number)
        arrived = adapter.receive(back_message, 1)
        cpu_ns = time.process_time_ns()
        start_ns = time.perf_counter_ns()
        sent = adapter.send(out_message, 1)
        if wait is None:
            await arrived
        else:
            wait(arrived)
        end_ns = time.perf_counter_ns()
        cpu_ns = time.process_time_ns() - cpu_ns
        await _finish(adapter, sent)
        record.wrong += adapter.verifies and not pattern.is_right(back, number)
        if number >= case.warmup:
            record.add(start_ns, end_ns, cpu_ns)


async def _pong(adapter: Adapter, case: Case) -> None:
    wait, pattern = adapter.wait, MessagePattern(case.nbytes)
    buffers = [adapter.message(_message_array(adapter, pattern)) for _ in range(2)]
    total = case.warmup + case.samples
    arrived = adapter.receive(buffers[0], 0)
    for number in range(total):
        if wait is None:
            await arrived
        else:
            wait(arrived)
        if number + 1 < total:
            arrived = adapter.receive(buffers[(number + 1) % 2], 0)
        sent = adapter.send(buffers[number % 2], 0)
        if sent is not None:
            if wait is None:
                await sent
            else:
                wait(sent)


async def _one_way_out(adapter: Adapter, case: Case, record: Record) -> None:
    pattern = MessagePattern(case.nbytes)
    array = _message_array(adapter, pattern)
    message = adapter.message(array)
    for number in range(case.warmup + case.samples):
        pattern.fill(array, number)
        await adapter.pass_barrier()
        cpu_ns = time.process_time_ns()
        start_ns = time.perf_counter_ns()
        await _finish(adapter, adapter.send(message, 1))
        end_ns = time.perf_counter_ns()
        if number >= case.warmup:
            record.add(start_ns, end_ns, time.process_time_ns() - cpu_ns)


async def _one_way_in(adapter: Adapter, case: Case, record: Record) -> None:
    wait, pattern = adapter.wait, MessagePattern(case.nbytes)
    array = _message_array(adapter, pattern)
    message = adapter.message(array)
    for number in range(case.warmup + case.samples):
        arrived = adapter.receive(message, 0)
        await adapter.pass_barrier()
        cpu_ns = time.process_time_ns()
        start_ns = time.perf_counter_ns()
        if wait is None:
            await arrived
        else:
            wait(arrived)
        end_ns = time.perf_counter_ns()
        cpu_ns = time.process_time_ns() - cpu_ns
        record.wrong += adapter.verifies and not pattern.is_right(array, number)
        if number >= case.warmup:
            record.add(start_ns, end_ns, cpu_ns)


async def _window(adapter: Adapter, case: Case, rank: int, record: Record) -> None:
    """All messages of a window use one array on each side, as OSU's do."""
    pattern = MessagePattern(case.nbytes)
    array, word = _message_array(adapter, pattern), np.zeros(1, np.float32)
    message, reply = adapter.message(array), adapter.message(word)
    for number in range(case.warmup + case.samples):
        if rank == 0:
            pattern.fill(array, number)
        await adapter.pass_barrier()
        cpu_ns = time.process_time_ns()
        start_ns = time.perf_counter_ns()
        if rank == 0:
            answered = adapter.receive(reply, 1)
            for handle in [adapter.send(message, 1) for _ in range(case.operations)]:
                await _finish(adapter, handle)
            await _finish(adapter, answered)
        else:
            for handle in [adapter.receive(message, 0) for _ in range(case.operations)]:
                await _finish(adapter, handle)
            await _finish(adapter, adapter.send(reply, 0))
        end_ns = time.perf_counter_ns()
        if number >= case.warmup:
            record.add(start_ns, end_ns, time.process_time_ns() - cpu_ns)
        if rank == 1:
            record.wrong += adapter.verifies and not pattern.is_right(array, number)


async def _all_at_once(adapter: Adapter, issues: list[Callable[[Any], Any]], arrays: list[Any]) -> None:
    handles = [issue(array) for issue, array in zip(issues, arrays, strict=True)]
    for handle in handles:
        if adapter.wait is None:
            await handle
        else:
            adapter.wait(handle)


async def _one_by_one(adapter: Adapter, arrays: list[Any]) -> None:
    for array in arrays:
        handle = adapter.issue(array)
        if adapter.wait is None:
            await handle
        else:
            adapter.wait(handle)


async def measure_burst(adapter: Adapter, case: Case, context: RankContext) -> Record:
    """Run a case of ``BURSTS``."""
    record, ranks = Record(), context.world_size
    whole = np.zeros((case.operations, max(1, case.nbytes // ITEM_BYTES)), np.float32)
    arrays = [adapter.message(row) for row in whole]
    # Row i holds its own pattern, so that two operations that met the wrong partner show.
    base = np.resize(np.arange(PERIOD, dtype=np.float32), whole.shape)
    total = base * np.float32(ranks)
    issues: list[Callable[[Any], Any]] = [adapter.issue] * case.operations
    if case.operation == GROUPS:
        issues = adapter.sub_worlds(case.operations)
    for number in range(case.warmup + case.samples):
        np.add(base, np.float32(number + context.rank), out=whole)
        await adapter.pass_barrier()
        cpu_ns = time.process_time_ns()
        start_ns = time.perf_counter_ns()
        await (_one_by_one(adapter, arrays) if case.operation == ONE_BY_ONE else _all_at_once(adapter, issues, arrays))
        end_ns = time.perf_counter_ns()
        cpu_ns = time.process_time_ns() - cpu_ns
        record.wrong += _wrong_rows(whole, total, number * ranks + ranks * (ranks - 1) // 2)
        if number >= case.warmup:
            record.add(start_ns, end_ns, cpu_ns)
    return record


def _wrong_rows(whole: Array, total: Array, constant: int) -> int:
    return int(np.any(whole != total + np.float32(constant), axis=1).sum())


def example_object(rank: int, number: int, nbytes: int) -> dict[str, Any]:
    """What ``rank`` has in sample ``number``."""
    return {
        "name": f"rank {rank}",
        "number": number,
        "loss": 0.5,
        "array": np.full(nbytes // 4, number + rank, np.float32),
    }


async def measure_objects(adapter: Adapter, case: Case, context: RankContext) -> Record:
    """Run a case of ``OBJECTS``."""
    record, rank, ranks = Record(), context.rank, context.world_size
    call = adapter.objects(case.operation)
    root = rank == 0
    for number in range(case.warmup + case.samples):
        every = [example_object(peer, number, case.nbytes) for peer in range(ranks)]
        given: Any = every if case.operation == "scatter_object" and root else every[rank]
        expected = {
            "all_gather_object": every,
            "broadcast_object": every[:1],
            "gather_object": every if root else [],
            "scatter_object": every[rank : rank + 1],
        }[case.operation]
        await adapter.pass_barrier()
        cpu_ns = time.process_time_ns()
        start_ns = time.perf_counter_ns()
        got = call(given)
        if inspect.isawaitable(got):
            got = await got
        end_ns = time.perf_counter_ns()
        cpu_ns = time.process_time_ns() - cpu_ns
        record.wrong += not _alike(got, expected)
        if number >= case.warmup:
            record.add(start_ns, end_ns, cpu_ns)
    return record


def _alike(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return len(got) == len(expected) and all(
        one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in other)
        for one, other in zip(got, expected, strict=True)
    )
