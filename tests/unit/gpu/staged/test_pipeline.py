"""The pipeline through the host's memory: what overlaps, and the bounds of its buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from device_paths_kit import PATIENCE_S, PathRank, everybody, run_ranks, values

from asyncdist.arrays.device import DeviceArray
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.collectives.arguments import call as calls
from asyncdist.errors import DistBackendError
from asyncdist.gpu.staged import pipeline as staged_pipeline
from asyncdist.gpu.staged.path import StagedPath
from asyncdist.gpu.staged.pipeline import BUFFER_BYTES, BUFFERS, SMALL_BUFFER_BYTES, PinnedSlots, StagedPipeline
from asyncdist.gpu.staged.plan import portions
from asyncdist.gpu.threads import Helpers
from asyncdist.testing.fake_cuda import FakeRuntime


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    made = FakeRuntime(mode="threads")
    yield made
    made.close()


def test_copies_and_communication_overlap(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a portion is on the network, others are copied out; they come in before the last has gone out."""
    trace: list[tuple[str, int]] = []
    buffer_bytes = 1 << 16
    monkeypatch.setattr(staged_pipeline, "BUFFER_BYTES", buffer_bytes)
    for name, mark in (("_copy", ""), ("_exchange", "host")):
        monkeypatch.setattr(StagedPipeline, name, traced(getattr(StagedPipeline, name), mark, trace))

    async def main(rank: PathRank) -> None:
        count = 12 * buffer_bytes // 8
        stream = runtime.new_stream(0)
        gate = runtime.hold(stream) if rank.rank else None  # rank 1 comes late
        with runtime.use(stream):
            x = rank.array(values(rank.rank, count, np.int64))
            work = rank.start(calls.all_reduce(x, ReduceOp.SUM))
        async with asyncio.timeout(PATIENCE_S):
            while len(trace) < 2 * BUFFERS:  # noqa: ASYNC110 - of what threads do there is no event
                await asyncio.sleep(0.001)
            if gate is not None:
                gate.open()
            await work
        np.testing.assert_array_equal(x._array, sum(everybody(2, count, np.int64)))

    run_ranks(2, StagedPath, main, runtime)
    at = {entry: index for index, entry in enumerate(trace)}
    assert len(trace) == len(at) == 3 * 12
    ahead = [at[step, number] for step in ("out", "host") for number in range(BUFFERS)]
    assert max(ahead) < at["in", 0], "while one is on the network, others are copied out and follow it"
    assert at["in", 0] < at["out", BUFFERS], "and there are no more than there are buffers"
    assert at["in", 0] < at["out", 11], "results come in before all has gone out"


def traced(function: Callable[..., Any], mark: str, trace: list[tuple[str, int]]) -> Callable[..., Any]:
    def wrapper(self: StagedPipeline, operation: Any, portion: Any, *arguments: Any) -> Any:
        if self._around.rank == 0:
            trace.append((mark or ("out" if arguments[0] is self._out else "in"), portion.number))
        return function(self, operation, portion, *arguments)

    return wrapper


@pytest.mark.parametrize(("more", "count"), [(0, 1), (1, 2)])
def test_a_portion_fills_a_buffer(more: int, count: int) -> None:
    array = DeviceArray(1 << 20, (BUFFER_BYTES + more,), np.dtype(np.uint8), 0)
    assert len(list(portions(calls.all_reduce(array, ReduceOp.SUM), 0, 2, BUFFER_BYTES))) == count


@pytest.mark.parametrize(("more", "small"), [(0, True), (1, False)])
def test_small_operations_take_small_buffers(more: int, small: bool) -> None:
    array = DeviceArray(1 << 20, (SMALL_BUFFER_BYTES // 4 + more,), np.dtype(np.uint8), 0)
    assert staged_pipeline._is_small(calls.all_reduce(array, ReduceOp.SUM), 2) == small


async def test_buffers_are_bounded(runtime: FakeRuntime) -> None:
    asked: list[BaseException | None] = []
    news = asyncio.Event()

    def available(error: BaseException | None) -> None:
        asked.append(error)
        news.set()

    loop = asyncio.get_running_loop()
    helpers = Helpers(loop, (runtime, 0))
    slots = PinnedSlots(helpers, 1000, BUFFERS, available)
    taken = []
    while len(taken) < BUFFERS:
        buffer = slots.take()
        if buffer is not None:
            taken.append(buffer)
            continue
        await asyncio.wait_for(news.wait(), 60)
        news.clear()
    assert len({buffer.pointer for buffer in taken}) == BUFFERS == slots.taken
    assert slots.take() is None
    await asyncio.sleep(0)
    assert slots.take() is None, "there is one more than allowed"
    slots.give(taken[2])
    assert slots.take() is taken[2]
    slots.give(taken[1])
    assert {buffer.pointer for buffer in slots.close()} == {buffer.pointer for buffer in taken}, "in use or not"
    slots.give(taken[2])
    assert slots.take() is None
    assert slots.close() == []


async def test_without_pinned_memory_operations_fail(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> Any:
        raise DistBackendError("out of memory")

    monkeypatch.setattr(runtime, "pinned", refuse)
    errors: list[BaseException | None] = []
    loop = asyncio.get_running_loop()
    slots = PinnedSlots(Helpers(loop, (runtime, 0)), 1000, 2, errors.append)
    assert slots.take() is None
    async with asyncio.timeout(60):
        while not errors:  # noqa: ASYNC110 - of what threads do there is no event
            await asyncio.sleep(0.001)
    assert isinstance(errors[0], DistBackendError)
    monkeypatch.undo()
    assert slots.take() is None  # it tries again
    async with asyncio.timeout(60):
        while len(errors) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert errors[1] is None
    assert slots.take() is not None
