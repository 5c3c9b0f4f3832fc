"""Tasks that watch over something while a block runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

__all__ = ["beside"]


@asynccontextmanager
async def beside(*watches: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `watches` while inside and cancel them at its end; what one of them has raised is raised there."""
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):  # a bug or a foreign record, not the cancellation
                raise outcome
