"""Messages between two ranks, timed alike for every library.

* ``ping_pong``: half a round trip; each side's next receive is posted before it sends.
* ``one_way``: rank 1 posts its receive, an untimed barrier, rank 0 sends; from before the send to the receiver's
  completion (one clock serves the whole machine).
* ``window``: as OSU's bandwidth test, 64 sends outstanding, then one word back; rank 0's time.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from bench.adapters.base import Adapter
from bench.cases import Case, Record
from bench.verify import Array, MessagePattern

OPERATIONS: Final = frozenset({"ping_pong", "one_way", "window"})
WINDOW: Final = 64
"""Messages outstanding, as in OSU's bandwidth test."""


async def measure(adapter: Adapter, case: Case, rank: int) -> Record:
    """Run a case of ``OPERATIONS``."""
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


def _array(adapter: Adapter, pattern: MessagePattern) -> Array:
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
    out, back = _array(adapter, pattern), _array(adapter, pattern)
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
    buffers = [adapter.message(_array(adapter, pattern)) for _ in range(2)]
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
    array = _array(adapter, pattern)
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
    array = _array(adapter, pattern)
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
    array, word = _array(adapter, pattern), np.zeros(1, np.float32)
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
