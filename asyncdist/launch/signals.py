"""The launcher's signals, turned into calls on the event loop for as long as a job runs."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

__all__ = ["ENDING", "PASSING", "handle_signals"]

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a job."""

PASSING: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that mean something to the workers only (checkpoint now, preemption is near)."""


@contextmanager
def handle_signals(on_ending: Callable[[int], None], on_passing: Callable[[int], None]) -> Iterator[None]:
    """Call back on the running loop for each signal, and restore the previous handlers afterwards.

    A signal that was ignored when we came (nohup, a shell's background job) stays ignored. Outside the main thread,
    where Python allows no handlers, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
    try:
        for signum, callback in [*((s, on_ending) for s in ENDING), *((s, on_passing) for s in PASSING)]:
            handler = signal.getsignal(signum)
            if handler is not signal.SIG_IGN:
                previous[signum] = handler
                loop.add_signal_handler(signum, callback, int(signum))
        yield
    finally:
        for signum, handler in previous.items():
            loop.remove_signal_handler(signum)
            if handler is not None:  # None: it was not installed from Python
                signal.signal(signum, handler)
