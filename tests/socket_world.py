"""Ranks of one process over real sockets and shared memory, each with a context of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

import asyncdist as dist
from asyncdist.store import HashStore

__all__ = ["descriptors", "socket_world", "turns"]


@contextlib.asynccontextmanager
async def socket_world(
    size: int, make_store: Callable[[], dist.Store] = HashStore
) -> AsyncIterator[list[dist.ProcessGroup]]:
    """The world groups of `size` ranks; closed at the end, whatever became of them."""
    store = make_store()

    async def join(rank: int) -> dist.ProcessGroup:
        return await dist.init_process_group(store=store, rank=rank, world_size=size, timeout=60)

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
