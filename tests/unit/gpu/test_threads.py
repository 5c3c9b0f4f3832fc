"""Threads for calls that may block: which device is current there."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncdist import blocking
from asyncdist.gpu.threads import Helpers, in_thread, made_in_thread, stay_on
from asyncdist.testing.fake_cuda import FakeRuntime, fake_cuda
from asyncdist.threads.thread import acquire, release

PATIENCE_S = 60.0


async def test_the_device_is_current_in_the_thread() -> None:
    """A fresh thread's is the first one, whichever the caller's is."""
    runtime = FakeRuntime(3)
    loop = asyncio.get_running_loop()
    assert await in_thread(loop, runtime.current_device, on=(runtime, 2)) == 2
    seen: list[int] = []
    helpers = Helpers(loop, (runtime, 1))
    helpers.start(lambda: seen.append(runtime.current_device()))
    await helpers.wait(60)
    assert seen == [1]
    assert runtime.current_device() == 0
    runtime.close()


async def test_what_is_kept_alive_until_a_call_returns_that_nobody_waits_for() -> None:
    """The GPU may write into arrays as long as an abort has not returned."""

    class Kept:
        pass

    runtime, leave, kept = FakeRuntime(1), threading.Event(), Kept()
    alive = weakref.ref(kept)
    helpers = Helpers(asyncio.get_running_loop(), (runtime, 0))
    helpers.start(leave.wait, PATIENCE_S, keep_alive=[kept])
    del kept
    await helpers.wait(0.01)
    await asyncio.sleep(0)
    gc.collect()
    assert alive() is not None
    leave.set()
    async with asyncio.timeout(PATIENCE_S):
        while alive() is not None:
            gc.collect()
            await asyncio.sleep(0.001)
    runtime.close()


class Made:
    """What a thread makes, once it may."""

    def __init__(self) -> None:
        self.runtime = FakeRuntime(1)
        self.entered, self.go_on, self.discarded = threading.Event(), threading.Event(), threading.Event()

    def make(self) -> Made:
        self.entered.set()
        assert self.go_on.wait(PATIENCE_S)
        return self

    async def wanted(self, loop: Any) -> Made:
        return await made_in_thread(loop, self.make, on=(self.runtime, 0), discard=Made.discard)

    def discard(self) -> None:
        self.discarded.set()


class HandingOver:
    """The loop, and `then` is called once it was handed what a thread has made."""

    def __init__(self, loop: asyncio.AbstractEventLoop, then: Callable[[], object]) -> None:
        self._loop = loop
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_soon_threadsafe(self, *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(*arguments)
        self._then()


@pytest.mark.parametrize("when", ["before", "handed over", "never"])
async def test_what_a_thread_makes_for_one_who_is_cancelled_is_discarded(when: str) -> None:
    """Also if it is there, and only the waiter's turn has not come."""
    made, loop = Made(), asyncio.get_running_loop()
    handed_over = threading.Event()
    task = asyncio.create_task(made.wanted(HandingOver(loop, handed_over.set)))
    await asyncio.to_thread(made.entered.wait, PATIENCE_S)
    if when == "before":
        task.cancel()
        await asyncio.wait([task])
    made.go_on.set()
    if when == "handed over":
        assert handed_over.wait(PATIENCE_S)
        loop.call_soon_threadsafe(task.cancel)  # behind that, and before the task is woken
        await asyncio.wait([task])
    if when == "never":
        assert await task is made
        await asyncio.sleep(0.01)
        assert not made.discarded.is_set()
    else:
        await asyncio.wait([task])
        assert task.cancelled()
        assert await asyncio.to_thread(made.discarded.wait, PATIENCE_S)
    made.runtime.close()


@pytest.mark.parametrize("when", ["made", "handed over"])
def test_what_a_thread_makes_for_a_loop_that_closes_is_discarded(when: str) -> None:
    made, loop = Made(), asyncio.new_event_loop()
    handed_over = threading.Event()
    task = loop.create_task(made.wanted(HandingOver(loop, handed_over.set)))
    loop.run_until_complete(asyncio.to_thread(made.entered.wait, PATIENCE_S))
    loop.run_until_complete(loop.shutdown_default_executor())
    if when == "handed over":
        made.go_on.set()
        assert handed_over.wait(PATIENCE_S)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    made.go_on.set()
    assert made.discarded.wait(PATIENCE_S)
    made.runtime.close()


def test_only_threads_of_ours_stay_on_a_device() -> None:
    runtime = FakeRuntime(3)
    seen: list[int] = []

    def use() -> None:
        stay_on(runtime, 2)
        seen.append(runtime.current_device())

    for name in ("asyncdist communication", "somebody's"):
        thread = threading.Thread(target=use, name=name)
        thread.start()
        thread.join()
    assert seen == [2, 0]
    runtime.close()


@pytest.mark.parametrize("way", ["collective", "message"])
def test_the_communication_thread_stays_on_the_gpu_of_its_arrays(way: str) -> None:
    """Each call there puts the current device back, and CUDA opens a context on what is put back."""
    with fake_cuda(2, mode="threads") as cuda:
        blocking.init_process_group(store=blocking.HashStore(), rank=0, world_size=1)
        try:
            there = acquire()
            devices: queue.Queue[int] = queue.Queue()
            there.submit(lambda: devices.put(cuda.runtime.current_device()))
            assert devices.get() == 0
            x = cuda.runtime.array(np.ones(4, np.float32), 1)
            if way == "collective":
                blocking.all_reduce(x)
            else:
                work = blocking.isend(x, 0)
                blocking.recv(x, 0)
                work.wait()
            there.submit(lambda: devices.put(cuda.runtime.current_device()))
            assert devices.get() == 1
            assert cuda.runtime.current_device() == 0
            release(there)
        finally:
            blocking.destroy_process_group()
