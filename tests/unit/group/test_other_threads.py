"""Calls from another thread than the group's raise, those included that end it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from socket_world import socket_world

import asyncdist as dist
from asyncdist.store import HashStore

CALLS: dict[str, Callable[[dist.ProcessGroup], Any]] = {
    "all_reduce": lambda group: group.all_reduce(np.zeros(1)),
    "isend": lambda group: group.isend(np.zeros(1), 0),
    "empty": lambda group: group.empty(3),
    "new_group": lambda group: group.make_subgroup((0,), None, None),
    "abort": lambda group: group.abort("elsewhere"),
    "close": lambda group: group.close().send(None),
}


@pytest.mark.parametrize("name", CALLS)
async def test_they_raise_and_change_nothing(name: str) -> None:
    async with socket_world(1) as (group,):
        with pytest.raises(RuntimeError, match=f"{name}: called from another"):
            await asyncio.to_thread(CALLS[name], group)
        await group.barrier()


def test_closing_on_another_loop_of_the_thread_changes_nothing() -> None:
    async def join() -> dist.ProcessGroup:
        return await dist.init_process_group(store=store, rank=0, world_size=1, timeout=10)

    async def use_and_close() -> None:
        await group.barrier()
        await group.close()
        await store.close()

    store = HashStore()
    with asyncio.Runner() as runner:
        group = runner.run(join())
        with pytest.raises(RuntimeError, match="close: called from another event loop"), asyncio.Runner() as another:
            another.run(group.close())
        runner.run(use_and_close())
    assert group.closed
