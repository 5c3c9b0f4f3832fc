"""Patience: what somebody who waits for others is told when that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["PATIENCE_S", "telling"]

PATIENCE_S: Final = 15.0
"""Processes that are started together are there sooner, also when each imports a large library first."""


@contextmanager
def telling(tell: Callable[[], Coroutine[Any, Any, None]], after_s: float | None = None) -> Iterator[None]:
    """Run `tell` once if what is inside takes longer than `after_s` (PATIENCE_S); it is cancelled when that ends."""
    after_s = PATIENCE_S if after_s is None else after_s
    loop = asyncio.get_running_loop()
    tellers: list[asyncio.Task[None]] = []
    # A timer and no task, and nothing awaited at the end: who cancels what is inside waits for nothing more.
    timer = loop.call_later(after_s, lambda: tellers.append(loop.create_task(tell(), name="tells what is waited for")))
    try:
        yield
    finally:
        timer.cancel()
        for teller in tellers:
            teller.cancel()
