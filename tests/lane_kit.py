"""Ranks of one process that share memory as if they were several, and their lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any

from group_kit import Group

import asyncdist as dist
from asyncdist.backend.aio import AioBackend
from asyncdist.executor.shared_lane import SharedLane

LIMIT_S = 60.0


async def run_ranks(size: int, main: Callable[[Group], Awaitable[Any]], **options: Any) -> list[Any]:
    """Run `main(group)` on `size` ranks that share memory."""
    store = dist.HashStore()

    async def rank_main(rank: int) -> Any:
        opening = dist.init_process_group(store=store.clone(), rank=rank, world_size=size, timeout=LIMIT_S, **options)
        async with opening as group:
            return await main(group)

    tasks = [asyncio.create_task(rank_main(rank), context=Context()) for rank in range(size)]
    try:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def lane_of(group: Group, tag: int = 0) -> SharedLane | None:
    backend = group._backend
    assert isinstance(backend, AioBackend)
    return None if backend._lanes is None else backend._lanes.lane(tag)
