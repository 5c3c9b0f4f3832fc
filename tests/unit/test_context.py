"""The default group's registry keeps nothing alive."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

import asyncdist as dist
from asyncdist.testing import run_world


def test_closed_worlds_are_freed_with_their_loops() -> None:
    groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
    loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()

    async def main(group: dist.ProcessGroup) -> None:
        await group.barrier()
        groups.add(group)
        loops.add(asyncio.get_running_loop())

    for _ in range(3):
        run_world(3, main)
    gc.collect()
    assert len(groups) == 0
    assert len(loops) == 0


async def test_worlds_made_and_closed_on_one_loop_are_freed() -> None:
    groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

    async def once() -> None:
        async with (
            dist.HashStore() as store,
            dist.init_process_group(store=store, rank=0, world_size=1) as group,
        ):
            groups.add(group)

    for _ in range(3):
        await asyncio.create_task(once())
    await asyncio.sleep(0)  # the loop still holds the callbacks of its last turn
    gc.collect()
    assert len(groups) == 0


async def test_who_forgot_to_await_is_told() -> None:
    async with dist.HashStore() as store:
        dist.init_process_group(store=store, rank=0, world_size=1)  # does nothing by itself
        with pytest.raises(ValueError, match=r"call init_process_group\(\) first, and in asyncio code await it"):
            dist.barrier()
