"""Collectives of objects: what travels is a dict with a name, numbers and an array of ``case.nbytes``.

Each library serializes as it does: asyncdist by msgpack, the others by pickle. A sample is one operation, from the
objects on the ranks that have them to those on the ranks that get them; every result of every sample is verified.
"""

from __future__ import annotations

import inspect
import time
from typing import Any, Final

import numpy as np

from bench.adapters.base import Adapter
from bench.cases import Case, RankContext, Record

OPERATIONS: Final = ("all_gather_object", "broadcast_object", "gather_object", "scatter_object")
"""The root is rank 0."""


def thing(rank: int, number: int, nbytes: int) -> dict[str, Any]:
    """What ``rank`` has in sample ``number``."""
    return {
        "name": f"rank {rank}",
        "number": number,
        "loss": 0.5,
        "array": np.full(nbytes // 4, number + rank, np.float32),
    }


async def measure(adapter: Adapter, case: Case, context: RankContext) -> Record:
    """Run a case of ``OPERATIONS``."""
    record, rank, ranks = Record(), context.rank, context.world_size
    call = adapter.objects(case.operation)
    root = rank == 0
    for number in range(case.warmup + case.samples):
        every = [thing(peer, number, case.nbytes) for peer in range(ranks)]
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
