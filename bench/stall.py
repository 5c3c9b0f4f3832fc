"""How long an event loop is kept from its other work.

* `StallMonitor` reschedules a callback every millisecond and notes how late each call comes: that is what a timer or an
  HTTP request on this loop would have to wait. Lateness counts everything that held the processor, other processes too.
* `TimedLoop` measures the thread's processor time within each callback of the loop.
* `Lateness` looks from outside of the loop: a thread hands the loop a callback every millisecond and notes how late
  each is called. A loop's own timers cannot tell a millisecond, as asyncio rounds what is left up to the next whole one
  whenever something else woke the loop meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from bench.model import percentile

__all__ = ["PERIOD_S", "Lateness", "late_share"]

PERIOD_S: Final = 1e-3


def _loop_class() -> Any:
    """Return the class of the loop that `asyncdist.run` would use."""
    try:
        return importlib.import_module("uvloop").Loop
    except ImportError:
        return asyncio.SelectorEventLoop


_Loop: Any = _loop_class()


class StallMonitor:
    """Notes how late a callback rescheduled every millisecond is called."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due_s = 0.0
        self._handle: asyncio.TimerHandle | None = None
        self.late_s: list[float] = []

    def start(self) -> None:
        self._schedule()

    def stop(self) -> None:
        """End; a call that is due and was not made yet counts."""
        assert self._handle is not None
        self._handle.cancel()
        late_s = time.perf_counter() - self._due_s
        if late_s > 0:
            self.late_s.append(late_s)

    def _schedule(self) -> None:
        self._due_s = time.perf_counter() + PERIOD_S
        self._handle = self._loop.call_later(PERIOD_S, self._call)

    def _call(self) -> None:
        self.late_s.append(time.perf_counter() - self._due_s)
        self._schedule()


class TimedLoop(_Loop):  # type: ignore[misc]
    """uvloop's loop that notes, while asked to, how much processor time of its thread each callback takes.

    Tasks count by their steps, which are callbacks like all others.
    """

    callbacks_s: list[float] | None = None

    def _timed(self, callback: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: Any) -> object:
            if self.callbacks_s is None:
                return callback(*args)
            began_ns = time.thread_time_ns()
            try:
                return callback(*args)
            finally:
                found = self.callbacks_s
                if found is not None:
                    found.append((time.thread_time_ns() - began_ns) / 1e9)

        return timed

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        return super().call_soon(self._timed(callback), *args, context=context)

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        return super().call_soon_threadsafe(self._timed(callback), *args, context=context)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        return super().call_later(delay, self._timed(callback), *args, context=context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        return super().call_at(when, self._timed(callback), *args, context=context)

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        super().add_reader(fd, self._timed(callback), *args)

    def add_writer(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        super().add_writer(fd, self._timed(callback), *args)


def run_timed(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` on a `TimedLoop`."""
    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        runner.run(main)


async def watch(
    operation: Callable[[], Any], before: Callable[[], Coroutine[Any, Any, None]], count: int
) -> dict[str, float]:
    """Watch the loop during ``count`` operations, each after ``before``; return the figures by name.

    ``stall_p99_s`` and ``stall_max_s`` are of the callback's lateness; ``callback_p99_s`` and ``callback_max_s`` of the
    processor time within one callback, where the loop measures it.
    """
    loop = asyncio.get_running_loop()
    late_s: list[float] = []
    callbacks_s: list[float] = []
    for _ in range(count):
        await before()
        monitor = StallMonitor(loop)
        monitor.start()
        if isinstance(loop, TimedLoop):
            loop.callbacks_s = callbacks_s
        await asyncio.sleep(0)
        work = operation()
        if work is not None:
            await work
        if isinstance(loop, TimedLoop):
            await asyncio.sleep(0)  # the step that is running ends, and is counted
            loop.callbacks_s = None
        monitor.stop()
        late_s += monitor.late_s or [0.0]
    found = {"stall_p99_s": percentile(late_s, 0.99), "stall_max_s": max(late_s)}
    if callbacks_s:
        found |= {"callback_p99_s": percentile(callbacks_s, 0.99), "callback_max_s": max(callbacks_s)}
    return found


class Lateness:
    """Of the loop that runs now: `start`, and later `stop` for the lateness of every callback, in seconds, sorted."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._late_s: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lateness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[float]:
        """End; what is not called yet is left out."""
        self._stopped.set()
        self._thread.join()
        return sorted(self._late_s)

    def _run(self) -> None:
        due_s = time.perf_counter()
        while True:
            due_s = max(due_s, time.perf_counter()) + PERIOD_S
            if self._stopped.wait(due_s - time.perf_counter()):
                return
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._note, due_s)

    def _note(self, due_s: float) -> None:
        self._late_s.append(time.perf_counter() - due_s)


def late_share(late_s: list[float], part: float) -> float:
    """What `part` of the callbacks, 0 to 1, was not later than; infinity where there were none."""
    return late_s[min(int(len(late_s) * part), len(late_s) - 1)] if late_s else float("inf")
