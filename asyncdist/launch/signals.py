"""The launcher's signals, turned into calls on the event loop for as long as a job runs."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

__all__ = ["ENDING", "PASSING", "handle_signals", "parse_signals"]

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a job, unless the user says which do."""

PASSING: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that mean something to the workers only (checkpoint now, preemption is near), unless they end the job."""

_NOT_TO_HANDLE: Final = frozenset({"SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"})
"""Those that the kernel lets no process handle, those that a process causes itself, and that of a child's end."""


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Parse `SIGTERM,SIGUSR1`. Raises ValueError for a name that is none, and for a signal that cannot be handled."""
    found: list[signal.Signals] = []
    for name in (each.strip() for each in text.split(",")):
        if name not in signal.Signals.__members__ or name in _NOT_TO_HANDLE:
            raise ValueError(f"{name!r} is not a signal that can be handled (SIGTERM, SIGINT, SIGUSR1, ...)")
        found.append(signal.Signals[name])
    return tuple(dict.fromkeys(found))


@contextmanager
def handle_signals(
    on_ending: Callable[[int], None], on_passing: Callable[[int], None], ending: Iterable[signal.Signals] = ENDING
) -> Iterator[None]:
    """Call back on the running loop for each signal, and restore the previous handlers afterwards.

    `ending` are those that end the job; of `PASSING` the others are passed on.

    A signal that was ignored when we came (nohup, a shell's background job) stays ignored. Outside the main thread,
    where Python allows no handlers, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
    try:
        callbacks = dict.fromkeys(PASSING, on_passing) | dict.fromkeys(ending, on_ending)
        for signum, callback in callbacks.items():
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
