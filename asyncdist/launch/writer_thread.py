"""A thread that writes what the event loop hands it: a slow disk or a stopped terminal never blocks the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["HIGH_WATER_BYTES", "WriterThread"]

HIGH_WATER_BYTES: Final = 4 * 1024 * 1024
"""Output waiting for the thread; above it the producers should stop."""

Write = Callable[[bytes], object]


class WriterThread:
    """Calls `write(data)` for everything that was `put`, in order for each `write`, and neighbors joined."""

    def __init__(self, name: str, high_water_bytes: int = HIGH_WATER_BYTES) -> None:
        self._high_water_bytes = high_water_bytes
        self._loop = asyncio.get_running_loop()
        self._condition = threading.Condition()
        self._waiting: dict[Write, list[bytes]] = {}
        self._buffered_bytes = 0
        self._closing = False
        self._finished = asyncio.Event()
        self._when_drained: list[Callable[[], None]] = []
        # A daemon thread: a write that blocks for ever must not keep a launcher alive that was told to go.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, write: Write, data: bytes) -> None:
        """Let the thread call `write(data)`, which must not raise."""
        if not self._closing:
            with self._condition:
                self._waiting.setdefault(write, []).append(data)
                self._buffered_bytes += len(data)
                self._condition.notify()

    @property
    def is_full(self) -> bool:
        """Whether producers should wait for `when_drained`."""
        return self._buffered_bytes > self._high_water_bytes

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when there is room again."""
        with self._condition:  # else the thread could drain between the question and the entry
            if self.is_full:
                self._when_drained.append(callback)
                return
        self._loop.call_soon(callback)

    def tell_loop(self, callback: Callable[[], object]) -> None:
        """From the thread: run `callback` on the event loop, unless that has gone."""
        with contextlib.suppress(RuntimeError):  # the loop was closed while a write was blocked
            self._loop.call_soon_threadsafe(callback)

    async def close(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued is written, at most `timeout_s`; return whether it was."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._finished.wait()
        if self._finished.is_set():
            self._thread.join()
        return self._finished.is_set()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._closing:
                    self._condition.wait()
                if not self._waiting:
                    break
                waiting, self._waiting = self._waiting, {}
            for write, chunks in waiting.items():
                data = b"".join(chunks)
                write(data)
                with self._condition:
                    was_full = self.is_full
                    self._buffered_bytes -= len(data)
                if was_full:
                    self.tell_loop(self._drained)
        self.tell_loop(self._finished.set)

    def _drained(self) -> None:
        if not self.is_full:
            callbacks, self._when_drained = self._when_drained, []
            for callback in callbacks:
                callback()
