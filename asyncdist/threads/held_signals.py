"""Signal handlers that are put off while the main thread runs the loop of the communication thread.

What a handler raises, KeyboardInterrupt perhaps, would leave the world half changed. A signal stops the loop instead,
and its handler is called when the thread has given the progress lock back.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # which is `signal` without its enumerations
import contextlib
import os
import signal
from collections import deque
from typing import Any, Final

HELD: Final = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
"""Signals whose handlers in Python are put off. All others' are called as they come: they must not raise."""


class HeldSignals:
    """Handlers of signals, put off. Of the main thread."""

    def __init__(self, loop: Any) -> None:
        self.came: deque[tuple[int, Any, int]] = deque()
        self.holds = False
        self._loop = loop
        self._own = self._come
        self._handlers: dict[int, Any] = {}
        """Those that were put off last. Where one that was put back raised, others may still stand here alone."""

    def hold(self) -> None:
        """Call no handler until `release`. Raises what a handler raises now."""
        own = self._own
        try:
            for number in HELD:
                handler = _signal.getsignal(number)
                if callable(handler) and handler is not own:
                    self._handlers[number] = handler
                    _signal.signal(number, own)
        except BaseException:
            self.put_back()
            raise
        self.holds = True

    def _come(self, number: int, frame: Any) -> None:
        if not self.holds:
            self._handlers[number](number, frame)
            return
        self.came.append((number, frame, _wakeup_fd()))
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.wake(self._loop.stop)

    def put_back(self) -> None:
        """Have handlers called as signals come. Raises what a handler raises now."""
        self.holds = False
        for number in reversed(self._handlers):  # Ctrl-C's last: it may come at once
            if _signal.getsignal(number) is self._own:
                _signal.signal(number, self._handlers[number])

    def release(self) -> None:
        """Call handlers as signals come, and now those of the signals that came; raises what they raise."""
        try:
            self.put_back()
        finally:
            self._call()

    def _call(self) -> None:
        if self.came:
            number, frame, heard_by = self.came.popleft()
            try:
                self._handlers[number](number, frame)
                listening = _wakeup_fd()
                if listening not in (-1, heard_by):  # our loop was told in the place of the one below it
                    with contextlib.suppress(OSError):
                        os.write(listening, bytes((number,)))
            finally:
                self._call()


def _wakeup_fd() -> int:
    """Where the interpreter tells an event loop of signals, -1 for nowhere."""
    descriptor = _signal.set_wakeup_fd(-1)
    _signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    return int(descriptor)
