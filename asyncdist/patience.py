"""Patience: what somebody who waits for others is told when that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

__all__ = ["PATIENCE_S", "telling"]

PATIENCE_S: Final = 15.0
"""Processes that are started together are there sooner, also when each imports a large library first."""


@asynccontextmanager
async def telling(tell: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call `tell` once if what is inside takes longer than `PATIENCE_S`; it is cancelled when that ends."""

    async def wait_and_tell() -> None:
        await asyncio.sleep(PATIENCE_S)
        await tell()

    teller = asyncio.create_task(wait_and_tell(), name="tells what is waited for")
    try:
        yield
    finally:
        teller.cancel()
        await asyncio.gather(teller, return_exceptions=True)
