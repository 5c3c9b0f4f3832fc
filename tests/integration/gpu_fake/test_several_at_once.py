"""Several tags and groups on one device at once, debugging switched on, waiting that is cancelled, groups that end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import GpuRank, equal, failure_of, run_gpu
from waiting import eventually

import asyncdist as dist
from asyncdist.concurrency import trace as events
from asyncdist.errors import CollectiveMismatchError, GroupAbortedError
from asyncdist.gpu.ipc import scratch as ipc_scratch
from asyncdist.gpu.staged import pipeline as staged_pipeline

PATHS = ["nccl", "ipc", "staged"]
TURNS = [0, 1, 3, 13, *(pytest.param(turns, marks=pytest.mark.thorough) for turns in (2, 5, 8, 30, 100))]
"""Of the loop, after which the waiting is cancelled."""

every_path = pytest.mark.parametrize("path", PATHS)


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_scratch, "LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(ipc_scratch, "OTHER_TAGS_LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(staged_pipeline, "BUFFER_BYTES", 1 << 16)


@pytest.fixture
def take(path: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ranks that take `path`."""
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    def run(size: int, main: Any, **options: Any) -> Any:
        return run_gpu(size, main, devices=size if path == "nccl" else 1, **options)

    return run


@pytest.fixture
def traced(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What ASYNCDIST_DEBUG=TRACE says."""
    logger = logging.getLogger("asyncdist")
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    logger.handlers[:] = [caplog.handler]  # configuring adds none where there is one
    events.configure_logging("TRACE")
    yield caplog
    events.configure_logging("OFF")
    logger.setLevel(level)
    logger.handlers[:], logger.propagate = handlers, propagate


def array(at: GpuRank, path: str, values: Any) -> Any:
    return at.cuda.runtime.array(values, at.rank if path == "nccl" else 0)


@every_path
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_tags_in_different_orders(path: str, take: Any, loop: str) -> None:
    """Of all sizes, each rank with an order of its own, the very first operations included."""

    async def main(at: GpuRank) -> None:
        tags = list(range(6))
        counts = [1, 3000, 0, 40_000, 17, 100_000]
        for turn in range(4):
            generator = np.random.default_rng([at.rank, turn])
            generator.shuffle(tags)
            arrays = {tag: array(at, path, np.full(counts[tag], at.rank + tag, np.float32)) for tag in tags}
            works = [at.group.all_reduce(arrays[tag], tag=tag) for tag in tags]
            more = [at.group.broadcast(arrays[tag], 2, tag=tag) for tag in reversed(tags)] if path == "nccl" else []
            await asyncio.gather(*works, *more)
            for tag, x in arrays.items():
                assert equal(x, np.full(counts[tag], 3 + 3 * tag)), tag

    take(3, main, loop=loop)


@every_path
def test_every_collective_is_compared(path: str, take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ASYNCDIST_CHECK=full: nothing is said where all is well, and what no message shows is found."""

    async def main(at: GpuRank) -> None:
        at.group.world.options["check"] = "full"
        group = dist.new_group(timeout=60.0)
        x = array(at, path, np.ones(5, np.float32))
        for _ in range(3):
            await dist.all_reduce(x, group=group)
            await dist.broadcast(x, 1, group)
            await dist.all_gather([array(at, path, np.zeros(5, np.float32)) for _ in range(2)], x, group)
            await dist.all_reduce_coalesced([x, array(at, path, np.zeros(0, np.float32))], group=group)
        assert equal(x, np.full(5, 64))
        empty = array(at, path, np.zeros(0, np.float32))
        host = np.zeros(0, np.float32)
        works = [dist.all_reduce(empty if at.rank else host, group=group)]  # no message is sent for nothing
        works.append(dist.all_reduce(x, group=group))
        await eventually(lambda: "aborted" in repr(group))
        said = str(await failure_of(again(group)))
        assert "ranks differ" in said
        assert "GPUs" in said
        assert "test_several_at_once.py" in said
        await asyncio.gather(*works, return_exceptions=True)

    async def again(group: dist.ProcessGroup) -> None:
        await dist.barrier(group)

    take(2, main, may_differ=True)


@every_path
def test_everything_is_traced(path: str, take: Any, traced: pytest.LogCaptureFixture) -> None:
    """With GPU arrays, too; and it says which path they take."""

    async def main(at: GpuRank) -> None:
        x = array(at, path, np.ones(50_000, np.float32))
        await dist.all_reduce(x)
        await dist.all_gather_into_tensor(array(at, path, np.zeros(100_000, np.float32)), x)
        sent, y = dist.isend(x, 1 - at.rank), array(at, path, np.zeros(50_000, np.float32))
        await dist.recv(y, 1 - at.rank)
        await sent
        assert equal(y, np.full(50_000, 2))

    take(2, main)
    assert f"GPU arrays take path {path}" in traced.text


@every_path
@pytest.mark.parametrize("turns", TURNS)
def test_waiting_that_is_cancelled_at_any_time(path: str, take: Any, turns: int) -> None:
    """From the first exchange to the end: the operation goes on, and so does what comes after it."""

    async def main(at: GpuRank) -> None:
        x = array(at, path, np.full(30_000, at.rank + 1, np.float32))
        work = dist.all_reduce(x)
        waiters = [asyncio.ensure_future(wait(work)) for _ in range(2)]
        waiters.append(asyncio.ensure_future(work.enqueued()))
        for _ in range(turns):
            await asyncio.sleep(0)
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)
        y = array(at, path, np.ones(7, np.float32))
        await dist.all_reduce(y)
        await work
        assert equal(x, np.full(30_000, 6))
        assert equal(y, np.full(7, 3))

    async def wait(work: Any) -> None:
        await work

    take(3, main)


@every_path
@pytest.mark.parametrize("turns", TURNS)
def test_a_receive_that_is_cancelled_at_any_time(path: str, take: Any, turns: int) -> None:
    """Withdrawn, or too late for that: then only the pair's message is lost, and nobody hangs."""

    async def main(at: GpuRank) -> None:
        x = array(at, path, np.full(30_000, at.rank + 1, np.float32))
        if at.rank == 0:
            sent = dist.isend(x, 1)
            await outcome(sent)
            return
        receiving = asyncio.ensure_future(outcome(dist.recv(x, 0)))
        for _ in range(turns):
            await asyncio.sleep(0)
        receiving.cancel()
        said = (await asyncio.gather(receiving, return_exceptions=True))[0]
        if isinstance(said, asyncio.CancelledError):
            y = array(at, path, np.zeros(30_000, np.float32))
            said = await outcome(dist.recv(y, 0, timeout=10.0))
            if said == "done":
                assert equal(y, np.ones(30_000))
        assert said in ("done", "PeerLostError", "ClosedError", "DistError"), said

    async def outcome(work: Any) -> str:
        try:
            await work
        except dist.DistError as error:
            return type(error).__name__
        return "done"

    take(2, main, may_differ=True)


@every_path
@pytest.mark.parametrize("under_way", [False, True])
def test_a_group_that_is_aborted_leaves_another_alone(path: str, take: Any, under_way: bool) -> None:
    async def main(at: GpuRank) -> None:
        doomed, other = dist.new_group(timeout=60.0), dist.new_group(timeout=60.0)
        runtime, device = at.cuda.runtime, at.rank if path == "nccl" else 0
        x, y = array(at, path, np.ones(20_000, np.float32)), array(at, path, np.ones(20_000, np.float32))
        await asyncio.gather(dist.all_reduce(y, group=doomed), dist.all_reduce(x, group=other))
        stream = runtime.new_stream(device)
        with runtime.use(stream):
            gate = runtime.hold(stream) if at.rank == 0 and under_way else None
            held = dist.all_reduce(y, group=doomed)
        works = [dist.all_reduce(x, group=other) for _ in range(3 if path == "nccl" else 1)]
        await dist.barrier()
        if at.rank == 0:
            doomed.abort("enough")
        if under_way:
            assert isinstance(await failure_of(held), GroupAbortedError)
        await asyncio.gather(*works)
        if gate is not None:
            gate.open()
        assert equal(x, np.full(20_000, 2.0 ** (1 + len(works))))
        z = array(at, path, np.ones(5, np.float32))
        await dist.all_reduce(z, group=other)
        assert equal(z, [2] * 5)
        await asyncio.gather(held, return_exceptions=True)

    take(2, main)


@every_path
def test_a_group_waits_for_what_is_under_way_when_it_is_closed(path: str, take: Any) -> None:
    async def main(at: GpuRank) -> None:
        group = dist.new_group(timeout=60.0)
        arrays = [array(at, path, np.full(5000, number, np.float32)) for number in range(20)]
        runtime, device = at.cuda.runtime, at.rank if path == "nccl" else 0
        gate = runtime.hold(runtime.current_stream(device))
        works = [dist.all_reduce(x, group=group) for x in arrays]
        closing = asyncio.ensure_future(dist.destroy_process_group(group))
        await asyncio.sleep(0.02)
        assert not closing.done()
        gate.open()
        await closing
        assert all(work.done() for work in works)
        for number, x in enumerate(arrays):
            assert equal(x, np.full(5000, 2 * number))

    take(2, main)


@every_path
def test_groups_leave_nothing_behind(path: str, take: Any) -> None:
    """One group after the other: no memory of the device, no thread and no descriptor more than after a few."""
    rounds, between = 16, 3
    counted: list[tuple[int, int, int, int]] = []

    async def main(at: GpuRank) -> None:
        for number in range(rounds):
            group = dist.new_group(timeout=60.0)
            x = array(at, path, np.ones(3000, np.float32))
            await dist.all_reduce(x, group=group)
            if number % 2:
                sent, y = dist.isend(x, 1 - at.rank, group), array(at, path, np.zeros(3000, np.float32))
                await dist.recv(y, 1 - at.rank, group)
                await sent
            await dist.barrier()
            if number % between == 2:
                group.abort("enough")
            await asyncio.gather(dist.destroy_process_group(group), return_exceptions=True)
            del x, group
            await dist.barrier()
            if number % between == 0 and at.rank == 0:
                await eventually(lambda: threads_of_ours() <= 4)
                gc.collect()
                counted.append(count(at))
            await dist.barrier()

    def threads_of_ours() -> int:
        return sum(thread.name.startswith("asyncdist gpu") for thread in threading.enumerate())

    def count(at: GpuRank) -> tuple[int, int, int, int]:
        at.cuda.runtime._collect()
        blocks = list(at.cuda.runtime.memory.blocks())
        opened = 0 if at.cuda.nccl is None else sum(one.state == "open" for one in at.cuda.nccl.communicators)
        return len(blocks), threads_of_ours(), len(os.listdir("/proc/self/fd")), opened

    take(2, main)
    for column, what in enumerate(("blocks of memory", "threads", "descriptors", "communicators")):
        numbers = [row[column] for row in counted]
        assert max(numbers[-3:]) <= max(numbers[1:4]) + 2, (what, numbers)


def test_ranks_that_differ_in_one_group_do_not_end_another() -> None:
    async def main(at: GpuRank) -> None:
        one, other = dist.new_group(timeout=60.0), dist.new_group(timeout=60.0)
        x = at.array(np.ones(3, np.float32))
        wrong = dist.all_reduce(x if at.rank else np.ones(3, np.float32), group=one)
        for _ in range(5):
            await dist.all_reduce(at.array(np.ones(3, np.float32)), group=other)
        assert isinstance(await failure_of(wrong), CollectiveMismatchError)
        y = at.array(np.ones(3, np.float32))
        await dist.all_reduce(y, group=other)
        assert equal(y, [2] * 3)

    run_gpu(2, main, may_differ=True)
