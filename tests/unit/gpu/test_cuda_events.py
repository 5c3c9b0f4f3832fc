"""Completions: the loop looks, then a thread waits; nothing is told twice, and nothing out of order."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
from waiting import eventually

from asyncdist.errors import DistBackendError
from asyncdist.gpu import cuda_events
from asyncdist.gpu.cuda_events import Completions
from asyncdist.testing.fake_cuda import fake_cuda

PATIENCE_S = 60.0


@pytest.fixture(name="cuda")
def a_fake_gpu() -> Any:
    with fake_cuda(1, mode="threads") as cuda:
        yield cuda


def waiting_threads() -> int:
    return sum(thread.name == "asyncdist gpu waiter" for thread in threading.enumerate())


class Line:
    """A stream and what has ended on it."""

    def __init__(self, cuda: Any, completions: Completions) -> None:
        self.runtime = cuda.runtime
        self.stream = self.runtime.new_stream(0)
        self.completions = completions
        self.ended: list[Any] = []
        self.changed = asyncio.Event()

    def add(self, name: Any, keep_alive: object = None) -> Any:
        event = self.runtime.new_event(0)
        event.record(self.stream)
        self.completions.add(self, (event,), lambda error: self.told(name, error), keep_alive)
        return event

    def told(self, name: Any, error: BaseException | None) -> None:
        self.ended.append(name if error is None else error)
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.ended) < count:
                self.changed.clear()
                await self.changed.wait()


async def test_what_is_short_is_found_by_the_loop(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_events, "POLL_S", PATIENCE_S)
    line = Line(cuda, Completions(asyncio.get_running_loop(), cuda.runtime.set_device))
    before = waiting_threads()
    for number in range(100):
        line.add(number)
    assert line.completions.pending == 100
    await line.until(100)
    assert line.ended == list(range(100))
    assert waiting_threads() == before
    assert not line.completions.pending


@pytest.mark.parametrize("poll_s", [0.0, 100e-6])
async def test_what_is_long_is_waited_for_by_a_thread(
    cuda: Any, poll_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_events, "POLL_S", poll_s)
    line = Line(cuda, Completions(asyncio.get_running_loop(), cuda.runtime.set_device))
    for turn in range(3):
        gate = cuda.runtime.hold(line.stream)
        for number in range(50):
            line.add((turn, number))
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.sleep(0.002)
        assert len(line.ended) == 50 * turn
        gate.open()
        await line.until(50 * (turn + 1))
    assert line.ended == [(turn, number) for turn in range(3) for number in range(50)]
    line.completions.close()


@pytest.mark.parametrize("soon", [True, False])
async def test_the_loop_looks_for_longer_where_a_thread_had_to_wait_for_little(
    cuda: Any, soon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_events, "LONGER_POLL_S", PATIENCE_S if soon else 0.0)
    line = Line(cuda, Completions(asyncio.get_running_loop(), cuda.runtime.set_device))
    for turn in range(2):
        gate = cuda.runtime.hold(line.stream)
        line.add(turn)
        await asyncio.sleep(0.002)
        waits = line.completions._queues[line].waiting
        assert waits is (not turn or not soon)
        gate.open()
        await line.until(turn + 1)
    line.completions.close()


async def test_streams_do_not_wait_for_each_other(cuda: Any) -> None:
    completions = Completions(asyncio.get_running_loop(), cuda.runtime.set_device)
    slow, quick = Line(cuda, completions), Line(cuda, completions)
    gate = cuda.runtime.hold(slow.stream)
    slow.add("slow")
    await asyncio.sleep(0.002)
    quick.add("quick")
    await quick.until(1)
    assert not slow.ended
    gate.open()
    await slow.until(1)
    completions.close()


async def test_what_is_kept_alive_and_until_when(cuda: Any) -> None:
    class Kept:
        pass

    line = Line(cuda, Completions(asyncio.get_running_loop(), cuda.runtime.set_device))
    for long in (False, True):
        kept = Kept()
        alive = weakref.ref(kept)
        gate = cuda.runtime.hold(line.stream)
        line.add("x", kept)
        del kept
        if long:
            await asyncio.sleep(0.005)
        gc.collect()
        assert alive() is not None
        count = len(line.ended)
        gate.open()
        await line.until(count + 1)
        async with asyncio.timeout(PATIENCE_S):
            while alive() is not None:  # a thread that told may have to end its turn first
                await asyncio.sleep(0.001)
                gc.collect()
    line.completions.close()


@pytest.mark.parametrize("wait_s", [0.0, 0.005])
async def test_a_dropped_line_is_told_nothing(cuda: Any, wait_s: float) -> None:
    """What it kept alive is, until the GPU is through with it; then the event is closed."""
    line = Line(cuda, Completions(asyncio.get_running_loop(), cuda.runtime.set_device))
    gate = cuda.runtime.hold(line.stream)
    kept = cuda.runtime.array([1])
    alive = weakref.ref(kept)
    event = line.add("never", kept)
    del kept
    await asyncio.sleep(wait_s)
    line.completions.drop(line)
    await asyncio.sleep(0.002)
    gc.collect()
    assert alive() is not None
    assert not event._closed
    gate.open()
    await eventually(lambda: event._closed)
    await eventually(lambda: alive() is None)
    assert not line.ended
    line.completions.drop(line)


async def test_a_callback_may_drop_and_add(cuda: Any) -> None:
    line = Line(cuda, Completions(asyncio.get_running_loop(), cuda.runtime.set_device))
    event = cuda.runtime.new_event(0)
    event.record(line.stream)

    def first(error: BaseException | None) -> None:
        line.completions.drop(line)
        line.add("after")

    line.completions.add(line, (event,), first)
    line.add("never")
    await line.until(1)
    await asyncio.sleep(0.002)
    assert line.ended == ["after"]


@pytest.mark.parametrize("poll_s", [0.0, PATIENCE_S])
async def test_failures_are_told(cuda: Any, poll_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_events, "POLL_S", poll_s)
    line = Line(cuda, Completions(asyncio.get_running_loop(), cuda.runtime.set_device))
    gate = cuda.runtime.hold(line.stream)
    event = line.add("first")
    line.add("second")
    await asyncio.sleep(0.002)
    if poll_s:
        event.close()  # asking for it fails from now on
    gate.open()
    await line.until(2)
    if poll_s:
        assert isinstance(line.ended[0], DistBackendError)
    assert line.ended[1] == "second"
    line.completions.close()


async def test_a_waiting_thread_is_on_the_streams_gpu() -> None:
    """Otherwise CUDA opens a context on the first one, in every process."""
    with fake_cuda(2, mode="threads") as cuda:
        chosen: list[tuple[str, int]] = []

        def set_device(device: int) -> None:
            chosen.append((threading.current_thread().name, device))
            raise DistBackendError("no such device")  # which waiting for the event would say, too

        completions = Completions(asyncio.get_running_loop(), set_device)
        stream, event, ended = cuda.runtime.new_stream(1), cuda.runtime.new_event(1), asyncio.Event()
        gate = cuda.runtime.hold(stream)
        event.record(stream)
        completions.add(stream, (event,), lambda error: ended.set())
        async with asyncio.timeout(PATIENCE_S):
            while not chosen:  # noqa: ASYNC110 - of what threads do there is no event
                await asyncio.sleep(0.001)
            gate.open()
            await ended.wait()
        completions.close()
        assert chosen == [("asyncdist gpu waiter", 1)]


@pytest.mark.parametrize("broken", [False, True])
async def test_closing_keeps_alive_what_the_gpu_still_uses(
    cuda: Any, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of the caller's may hold operations up for as long as they like."""

    class Kept:
        pass

    kept = Kept()
    alive = weakref.ref(kept)
    completions = Completions(asyncio.get_running_loop(), cuda.runtime.set_device)
    stream, event = cuda.runtime.new_stream(0), cuda.runtime.new_event(0)
    gate = cuda.runtime.hold(stream)
    event.record(stream)
    if broken:

        def failing() -> None:
            raise DistBackendError("the GPU is broken")

        monkeypatch.setattr(event, "synchronize", failing)
    completions.add(stream, (event,), lambda error: None, kept)
    del kept
    completions.close()
    assert not completions.pending
    await asyncio.sleep(0)
    gc.collect()
    assert broken or alive() is not None
    gate.open()
    async with asyncio.timeout(PATIENCE_S):
        while alive() is not None:
            gc.collect()
            await asyncio.sleep(0.001)
