"""Ranks of one process over real sockets and shared memory, each with a context of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import Context
from typing import Any

import asyncdist as dist
from asyncdist.store import HashStore

__all__ = ["LIMIT_S", "descriptors", "run_ranks", "socket_world", "turns"]

LIMIT_S = 60.0
"""What nothing here takes unless something hangs."""


async def run_ranks(size: int, main: Callable[[Any], Awaitable[Any]], **options: Any) -> list[Any]:
    """Run `main(group)` on `size` ranks, each a task; gives what each returned, or raises what the first raised."""
    store = HashStore()

    async def rank_main(rank: int) -> Any:
        opening = dist.init_process_group(
            store=store.clone(), rank=rank, world_size=size, **{"timeout": LIMIT_S, **options}
        )
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


@contextlib.asynccontextmanager
async def socket_world(
    size: int, make_store: Callable[[], dist.Store] = HashStore, **options: Any
) -> AsyncIterator[list[dist.ProcessGroup]]:
    """The world groups of `size` ranks; closed at the end, whatever became of them."""
    store = make_store()

    async def join(rank: int) -> dist.ProcessGroup:
        return await dist.init_process_group(store=store, rank=rank, world_size=size, timeout=LIMIT_S, **options)

    groups = await asyncio.gather(*(asyncio.create_task(join(rank)) for rank in range(size)))
    try:
        yield list(groups)
    finally:
        await asyncio.gather(*(group.close() for group in groups), return_exceptions=True)
        await store.close()


async def turns(count: int) -> None:
    """Let the event loop turn `count` times; every eighth turn gives the kernel a moment."""
    for turn in range(count):
        await asyncio.sleep(0 if turn % 8 else 0.0005)


def descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
