"""Sliced: work on memory in slices between which the event loop runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

__all__ = ["SLICE_BYTES", "run_sliced"]

SLICE_BYTES: Final = 1 << 20
"""Bytes of one uninterrupted copy or reduction: about 0.3 ms, so that no callback holds the loop for a millisecond."""


def run_sliced(
    loop: asyncio.AbstractEventLoop,
    total: int,
    itemsize: int,
    action: Callable[[int, int], object],
    then: Callable[[], object],
) -> None:
    """Call `action(start, stop)` over `total` elements, at most SLICE_BYTES at a time, letting the loop run between.

    `then` is called once all is done: within this call when one slice is enough.
    """
    _run_slice(loop, 0, total, max(1, SLICE_BYTES // itemsize), action, then)


def _run_slice(
    loop: asyncio.AbstractEventLoop,
    start: int,
    total: int,
    step: int,
    action: Callable[[int, int], object],
    then: Callable[[], object],
) -> None:
    # No closure, as one that schedules itself refers to itself, and arrays would wait for the garbage collector.
    stop = min(start + step, total)
    action(start, stop)
    if stop >= total:
        then()
    else:
        loop.call_soon(_run_slice, loop, stop, total, step, action, then)
