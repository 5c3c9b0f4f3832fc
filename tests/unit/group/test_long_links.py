"""Links on which bytes are long under way, in virtual time: what crosses them is there in few latencies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncdist as dist
from asyncdist.testing import run_world

LATENCY_S = 0.02
SIZE = 4
ELEMENTS = 1 << 20
"""4 MiB, of which a link here takes 2 MiB at a time, as a socket does: half of them are there after two latencies."""

MOST: dict[str, int] = {"all_reduce": 8, "reduce_scatter_tensor": 5, "broadcast": 9, "reduce": 8}
"""Latencies, one more than measured. With four chunks on their way they were 21, 12, 19 and 18."""


def call_of(name: str, x: np.ndarray[Any, Any]) -> Callable[[], dist.Work[Any]]:
    if name == "reduce_scatter_tensor":
        return lambda: dist.reduce_scatter_tensor(x[: len(x) // SIZE].copy(), x)
    if name == "all_reduce":
        return lambda: dist.all_reduce(x, dist.ReduceOp.MAX)
    return lambda: dist.broadcast(x, 0) if name == "broadcast" else dist.reduce(x, 0, dist.ReduceOp.MAX)


@pytest.mark.parametrize("name", MOST)
def test_a_large_collective_takes_few_latencies(name):
    async def main(_group: dist.ProcessGroup) -> float:
        call = call_of(name, np.ones(ELEMENTS, np.float32))
        await call()  # everybody is connected
        await dist.barrier()
        began_s = asyncio.get_running_loop().time()
        await call()
        return asyncio.get_running_loop().time() - began_s

    assert max(run_world(SIZE, main, latency_s=LATENCY_S)) < (MOST[name] + 0.5) * LATENCY_S
