"""The default group's registry keeps nothing alive."""

from __future__ import annotations

import asyncio
import gc
import threading
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


@pytest.mark.parametrize("has_loop", [False, True])
async def test_a_thread_that_has_no_group_is_told_where_it_is(has_loop: bool) -> None:
    said: list[str] = []

    async def coroutine() -> None:
        dist.get_rank()

    def body() -> None:
        try:
            asyncio.run(coroutine()) if has_loop else dist.get_rank()
        except RuntimeError as error:
            said.append(str(error))

    def in_a_thread() -> None:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()

    async with dist.HashStore() as store, dist.init_process_group(store=store, rank=0, world_size=1):
        in_a_thread()
    (text,) = said
    assert text.startswith("group default: called from another event loop than the group was made on")
    assert "It was made in thread 'MainThread'" in text
    with pytest.raises(ValueError, match="has not been initialized"):
        dist.get_rank()


async def test_who_forgot_to_await_is_told() -> None:
    async with dist.HashStore() as store:
        dist.init_process_group(store=store, rank=0, world_size=1)  # does nothing by itself
        with pytest.raises(ValueError, match=r"call init_process_group\(\) first, and in asyncio code await it"):
            dist.barrier()
