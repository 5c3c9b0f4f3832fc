"""All collectives through the host and through shared device memory, on a fake GPU, beside numpy."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import uvloop
from device_paths_kit import Driver, PathRank, run_ranks
from device_workout import CHECKS, Check, at_once
from differential import DTYPES, ops_of

from asyncdist.gpu import cuda_events
from asyncdist.gpu.ipc import scratch as ipc_scratch
from asyncdist.gpu.ipc.path import CudaIpcPath
from asyncdist.gpu.path import DevicePath
from asyncdist.gpu.staged import pipeline as staged_pipeline
from asyncdist.gpu.staged.path import StagedPath
from asyncdist.testing.fake_cuda import FakeRuntime

PATHS = (StagedPath, CudaIpcPath)
PATHS_AND_DTYPES = [
    pytest.param(path, dtype, marks=[pytest.mark.thorough] * ((place + number) % len(PATHS)))
    for number, dtype in enumerate(DTYPES)
    for place, path in enumerate(PATHS)
]
"""Paths by turns, and the other one for .ci/run."""

COUNTS = (0, 1, 7, 400, 3000)
"""Nothing, less than a rank's share each, and one and many chunks of the slots below."""


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_scratch, "SMALL_BYTES", 1 << 11)
    monkeypatch.setattr(ipc_scratch, "LARGE_BYTES", 1 << 12)
    monkeypatch.setattr(staged_pipeline, "SMALL_BUFFER_BYTES", 1 << 10)
    monkeypatch.setattr(staged_pipeline, "BUFFER_BYTES", 1 << 12)


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    yield made
    made.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sizes(runtime: FakeRuntime, path: type[DevicePath], size: int, check: Check) -> None:
    async def main(rank: PathRank) -> None:
        for count in COUNTS:
            await check(rank, count, np.float32, "SUM")

    run_ranks(size, path, main, runtime)


@pytest.mark.parametrize(("path", "dtype"), PATHS_AND_DTYPES, ids=str)
def test_dtypes_and_reductions(runtime: FakeRuntime, path: type[DevicePath], dtype: Any) -> None:
    async def main(rank: PathRank) -> None:
        for op in ops_of(dtype):
            for check in CHECKS:
                if check.__name__ in ("all_reduce", "reduce", "reduce_scatter", "coalesced") or op == "SUM":
                    await check(rank, 300, dtype, op)

    run_ranks(3, path, main, runtime)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", range(12))
def test_any_stream_may_run_first(path: type[DevicePath], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which a GPU gets through its streams, nothing is read or written too early or too late."""
    monkeypatch.setattr(cuda_events, "POLL_S", math.inf)  # no thread waits: what happens is the seed's alone
    runtime = FakeRuntime(mode="manual")
    driver: list[Driver] = []

    async def main(rank: PathRank) -> None:
        if not driver:
            driver.append(Driver(runtime, seed))
        checks = random.Random(seed).sample(CHECKS, len(CHECKS))
        await at_once(rank, checks, (5, 700)[seed % 2], np.float32, "SUM")

    try:
        run_ranks(2 + seed % 3, path, main, runtime)
    finally:
        for one in driver:
            one.stop()
        runtime.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_work_takes_time(path: type[DevicePath], loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    runtime = FakeRuntime(mode="threads")

    async def main(rank: PathRank) -> None:
        for check in CHECKS:
            await check(rank, 700, np.float64, "MAX")

    try:
        run_ranks(3, path, main, runtime, loop_factory=loop_factory)
    finally:
        runtime.close()
