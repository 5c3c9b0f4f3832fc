"""Waiting, in tests, for what sets no event: what other threads do, or the far end of a socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""Far more than anything here takes; a test that waits this long has failed."""


async def eventually(condition: Callable[[], object], what: str = "") -> None:
    """Wait until `condition()` is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what or condition}"
        await asyncio.sleep(0.001)
