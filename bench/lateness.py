"""How long an event loop keeps others waiting, measured from outside of it.

A loop's own timers cannot tell a millisecond: asyncio rounds what is left up to the next whole one whenever something
else woke it meanwhile. So a thread hands the loop a callback every millisecond, and notes how late each is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Final

__all__ = ["PERIOD_S", "Lateness", "share"]

PERIOD_S: Final = 1e-3


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


def share(late_s: list[float], part: float) -> float:
    """What `part` of the callbacks, 0 to 1, was not later than; infinity where there were none."""
    return late_s[min(int(len(late_s) * part), len(late_s) - 1)] if late_s else float("inf")
