"""Order between streams, what is kept alive, how many can be under way, and that the loop is never blocked."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import GpuRank, equal, failure_of, run_gpu
from punctual import assert_within, punctual
from waiting import eventually

import asyncdist as dist
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.gpu.nccl import channel as nccl_channel

LONG_S = 0.05
"""How long the fake's slow kernels take."""


def write_late(at: GpuRank, array: Any, value: float, stream: Any = None) -> None:
    """Queue a slow kernel and then a write of `value` into `array`, on a stream or the current one."""
    runtime = at.cuda.runtime
    with runtime.use(stream or runtime.current_stream(at.device)):
        runtime.compute(LONG_S, runtime.current_stream(at.device))
        array.set(value)


def held(at: GpuRank, array: Any, value: float) -> Any:
    """As `write_late` on the current stream, but as late as the test likes: when it opens the gate that it gets."""
    gate = at.cuda.runtime.hold(at.cuda.runtime.current_stream(at.device))
    array.set(value)
    return gate


async def sum_of_what_is_written_late(at: GpuRank) -> Any:
    x = at.zeros(4)
    await dist.all_reduce(at.zeros(1), group=at.group)
    write_late(at, x, at.rank + 1)
    await dist.all_reduce(x, group=at.group)
    return x.get().tolist()


def test_operations_wait_for_what_was_queued_before_the_call() -> None:
    assert run_gpu(2, sum_of_what_is_written_late) == [[3, 3, 3, 3]] * 2


def test_without_waiting_the_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test before this one can fail."""
    monkeypatch.setattr("asyncdist.gpu.backend.ready_for", lambda *_: ())

    async def main(at: GpuRank) -> None:
        x = at.zeros(4)
        await dist.all_reduce(at.zeros(1), group=at.group)
        gate = held(at, x, 1)
        await dist.all_reduce(x, group=at.group)
        gate.open()
        assert equal(x, [1, 1, 1, 1])  # what is written late over the sum of what was there before

    run_gpu(2, main)


def test_the_stream_that_an_array_names_is_waited_for() -> None:
    async def main(at: GpuRank) -> None:
        await dist.all_reduce(at.zeros(1), group=at.group)
        stream, x = at.stream(), at.zeros(4)
        write_late(at, x, 1, stream)
        interface = {**x.__cuda_array_interface__, "stream": stream.handle}

        class Named:
            __cuda_array_interface__ = interface
            dtype = x.dtype

            class device:
                id = at.device

        await dist.all_reduce(Named(), group=at.group)
        assert equal(x, [2, 2, 2, 2])

    run_gpu(2, main)


def test_a_stream_can_wait_instead_of_the_caller() -> None:
    async def main(at: GpuRank) -> None:
        runtime = at.cuda.runtime
        await dist.all_reduce(at.zeros(1), group=at.group)
        x, copy, stream = at.zeros(4), at.zeros(4), at.stream()
        gate = held(at, x, 1)
        work = dist.all_reduce(x, group=at.group)
        work.wait_stream(stream)
        runtime.copy(copy.data.ptr, x.data.ptr, x.nbytes, stream)
        assert not work.done()
        gate.open()
        done = runtime.new_event(at.device)
        done.record(stream)
        await asyncio.to_thread(done.synchronize)
        assert equal(copy, [2, 2, 2, 2])
        await work
        work.wait_stream()  # it is done: nothing to wait for

    run_gpu(2, main)


def test_a_stream_cannot_wait_for_what_is_not_queued() -> None:
    async def main(at: GpuRank) -> None:
        work = dist.all_reduce(at.zeros(1), group=at.group)  # opens the communicators first
        with pytest.raises(asyncio.InvalidStateError, match="enqueued"):
            work.wait_stream()
        await work.enqueued()
        work.wait_stream()
        with pytest.raises(TypeError, match="CUDA stream"):
            dist.all_reduce(at.zeros(1), group=at.group).wait_stream("default")
        on_host = dist.all_reduce(np.zeros(1), group=at.group)
        if not on_host.done():
            with pytest.raises(RuntimeError, match="no operation on GPU arrays"):
                on_host.wait_stream()
        await on_host
        await on_host.enqueued()

    run_gpu(2, main)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_thousand_in_flight(loop: str) -> None:
    async def main(at: GpuRank) -> None:
        await dist.all_reduce(at.zeros(1), group=at.group)
        gate = at.cuda.runtime.hold(at.cuda.runtime.current_stream(at.device))
        arrays = [at.array(np.full(3, number, np.float32)) for number in range(1000)]
        works = [dist.all_reduce(x, group=at.group) for x in arrays]
        await asyncio.sleep(0.01)
        assert not any(work.done() for work in works)
        communicators = [one for one in at.cuda.nccl.communicators if one.rank == at.rank]  # type: ignore[union-attr]
        assert sum(one.pending for one in communicators) <= nccl_channel.MAX_LAUNCHED
        gate.open()
        for number, (work, x) in enumerate(zip(works, arrays, strict=True)):
            await work
            assert equal(x, [2 * number] * 3)

    run_gpu(2, main, loop=loop)


def test_arrays_live_until_the_gpu_is_through_with_them() -> None:
    async def main(at: GpuRank) -> None:
        await dist.all_reduce(at.zeros(1), group=at.group)
        gate = at.cuda.runtime.hold(at.cuda.runtime.current_stream(at.device))
        x = at.zeros(1000)
        alive = weakref.ref(x)
        work = dist.all_reduce(x, group=at.group)
        gone = asyncio.Event()
        work.add_done_callback(lambda _work: gone.set())
        del x, work
        await asyncio.sleep(0.01)
        gc.collect()
        assert alive() is not None
        gate.open()
        await gone.wait()

        def is_gone() -> bool:
            gc.collect()
            return alive() is None

        await eventually(is_gone)  # a thread that told of the end may have to end its turn first

    run_gpu(2, main)


@punctual
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_slow_kernels_do_not_block_the_loop(loop: str) -> None:
    """Where the loop waits for a kernel, one of its turns lasts as long as the kernel."""

    kernels = 5

    async def main(at: GpuRank) -> float:
        await dist.all_reduce(at.zeros(1), group=at.group)
        event_loop, turns, before = asyncio.get_running_loop(), [0.0], [time.perf_counter()]
        stopped = False

        def turn() -> None:
            now = time.perf_counter()
            turns.append(now - before[0])
            before[0] = now
            if not stopped:
                event_loop.call_soon(turn)

        event_loop.call_soon(turn)
        for _ in range(kernels):
            write_late(at, x := at.zeros(4), 1)
            await dist.all_reduce(x, group=at.group)
        stopped = True
        return sorted(turns)[-kernels]

    (turn_s,) = run_gpu(1, main, loop=loop)
    assert_within(LONG_S, turn_s)  # other processes may hold a core for as long, but hardly five times


def test_two_tasks_with_tags_of_their_own() -> None:
    async def main(at: GpuRank) -> None:
        async def task(tag: int) -> None:
            for number in range(20):
                x = at.array(np.full(2, number * tag, np.float32))
                await at.group.all_reduce(x, tag=tag)
                assert equal(x, [2 * number * tag] * 2)
                if (number + at.rank + tag) % 3 == 0:
                    await asyncio.sleep(0)

        await asyncio.gather(task(1), task(2), task(3))

    run_gpu(2, main)


def test_groups_of_groups() -> None:
    async def main(at: GpuRank) -> None:
        mine, groups = dist.new_subgroups(2, at.group)
        x = at.array(np.ones(2, np.float32))
        await dist.all_reduce(x, group=mine)
        assert equal(x, [2, 2])
        halves = dist.split_group(at.group, [[0, 2], [1, 3]])
        await dist.all_reduce(x, group=halves)
        assert equal(x, [4, 4])
        if at.rank != 1:
            left = dist.shrink_group([1], at.group)
            await dist.all_reduce(x, ReduceOp.MAX, left)
            assert equal(x, [4, 4])
        for group in groups:
            await group.close()
        await dist.all_reduce(x, group=at.group)

    run_gpu(4, main)


@pytest.mark.parametrize("turns", range(6))
def test_cancelling_at_any_await_ends_only_the_waiting(turns: int) -> None:
    async def main(at: GpuRank) -> None:
        x = at.array(np.ones(2, np.float32))

        works: list[Any] = []

        async def waiter() -> None:
            works.append(dist.all_reduce(x, group=at.group))
            await works[0]

        task = asyncio.create_task(waiter())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        cancelled = (await asyncio.gather(task, return_exceptions=True))[0]
        if turns:  # else it never issued anything
            assert isinstance(cancelled, asyncio.CancelledError)
            y = at.array(np.ones(2, np.float32))
            await at.group.all_reduce(y, tag=1)
            assert equal(y, [2, 2])
            await works[0]
            assert equal(x, [2, 2])

    run_gpu(2, main)


def test_a_barrier_of_a_gpu_group_waits_for_the_gpu() -> None:
    async def main(at: GpuRank) -> None:
        await dist.all_reduce(at.zeros(1), group=at.group)
        write_late(at, x := at.zeros(2), 1)
        work = dist.all_reduce(x, group=at.group)
        await dist.barrier(at.group)
        assert work.done()

    run_gpu(2, main, backend="nccl")


def test_timeouts_of_waiting_leave_the_operation() -> None:
    async def main(at: GpuRank) -> None:
        await dist.all_reduce(at.zeros(1), group=at.group)
        gate = held(at, x := at.zeros(2), 1)
        work = dist.all_reduce(x, group=at.group)
        assert isinstance(await failure_of(work.wait(0.001)), TimeoutError)
        gate.open()
        await work
        assert equal(x, [2, 2])

    run_gpu(2, main)
