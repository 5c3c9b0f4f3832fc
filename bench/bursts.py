"""Many all_reduces: in flight at once, one after the other, and in many groups at once.

* ``in flight``: ``case.operations`` all_reduces of as many arrays are issued, then all are awaited.
* ``one by one``: the same, each awaited before the next is issued.
* ``groups``: as many groups of all ranks, one all_reduce in flight in each.

A sample is the time of them all; every result of every sample is verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from bench.adapters.base import Adapter
from bench.cases import Case, RankContext, Record
from bench.operations import ITEM_BYTES
from bench.verify import PERIOD, Array

IN_FLIGHT: Final = "in flight"
ONE_BY_ONE: Final = "one by one"
GROUPS: Final = "groups"
OPERATIONS: Final = frozenset({IN_FLIGHT, ONE_BY_ONE, GROUPS})


async def _all(adapter: Adapter, issues: list[Callable[[Any], Any]], arrays: list[Any]) -> None:
    handles = [issue(array) for issue, array in zip(issues, arrays, strict=True)]
    for handle in handles:
        if adapter.wait is None:
            await handle
        else:
            adapter.wait(handle)


async def _each(adapter: Adapter, arrays: list[Any]) -> None:
    for array in arrays:
        handle = adapter.issue(array)
        if adapter.wait is None:
            await handle
        else:
            adapter.wait(handle)


async def measure(adapter: Adapter, case: Case, context: RankContext) -> Record:
    """Run a case of ``OPERATIONS``."""
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
        await (_each(adapter, arrays) if case.operation == ONE_BY_ONE else _all(adapter, issues, arrays))
        end_ns = time.perf_counter_ns()
        cpu_ns = time.process_time_ns() - cpu_ns
        record.wrong += _wrong_rows(whole, total, number * ranks + ranks * (ranks - 1) // 2)
        if number >= case.warmup:
            record.add(start_ns, end_ns, cpu_ns)
    return record


def _wrong_rows(whole: Array, total: Array, constant: int) -> int:
    return int(np.any(whole != total + np.float32(constant), axis=1).sum())
