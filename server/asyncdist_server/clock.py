"""What time it is now, as opposed to when the loop last looked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

SAME_CLOCK_S: Final = 60.0
"""Clocks that differ by more do not count from the same instant."""


def exact_clock(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return a clock that is never behind `loop.time()`, counts as it does, and does not stand still.

    uvloop's time is in whole milliseconds, and that at which the present turn began: others may have needed long. All
    other loops tell the time, simulated ones that of their simulation.
    """
    if type(loop).__module__.partition(".")[0] == "uvloop" and abs(time.monotonic() - loop.time()) < SAME_CLOCK_S:
        return time.monotonic
    return loop.time
