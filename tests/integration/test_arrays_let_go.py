"""Arrays are free as soon as nobody uses them: no reference cycle keeps them for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from group_kit import outcome
from socket_world import run_ranks
from waiting import eventually

import asyncdist as dist

SIZES = [3, 300_000]
"""What is sent at once, and what is copied and reduced in slices."""

Arrays = Callable[..., np.ndarray[Any, Any]]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def streamed(group: Any, array: Arrays) -> None:
    async with group.broadcast_stream(array(), 0, chunk_bytes=1 << 16) as stream:
        async for _chunk in stream:
            pass
        await stream.work


async def received(group: Any, array: Arrays) -> None:
    await (group.recv(array(), 0) if group.rank else group.isend(array(), 1))


async def refused_by_the_receiver(group: Any, array: Arrays) -> None:
    waiting = asyncio.ensure_future(failure_of(group.recv(array()[1:], 0))) if group.rank else None
    await group.barrier()
    await (waiting or group.isend(array(), 1))


async def refused_elsewhere(group: Any, array: Arrays) -> None:
    waiting = None if group.rank else asyncio.ensure_future(failure_of(group.all_reduce(array())))
    await group.barrier(tag=1)
    if waiting is None:
        with pytest.raises(TypeError):
            group.all_reduce(None)
    else:
        await waiting


async def failure_of(work: dist.Work[Any]) -> None:
    """Somebody waits for the failure; of those that nobody waits for the group keeps some."""
    assert isinstance(await outcome(work), dist.CollectiveMismatchError)


OPERATIONS: dict[str, Callable[[Any, Arrays], Awaitable[Any]]] = {
    "all_reduce": lambda group, array: group.all_reduce(array()),
    "average": lambda group, array: group.all_reduce(array(), dist.ReduceOp.AVG),
    "broadcast": lambda group, array: group.broadcast(array(), 0),
    "all_gather": lambda group, array: group.all_gather([array(), array()], array()),
    "all_to_all": lambda group, array: group.all_to_all([array(), array()], [array(), array()]),
    "all_gather_array": lambda group, array: group.all_gather_array(array()),
    "stream": streamed,
    "recv": received,
    "refused by the receiver": refused_by_the_receiver,
    "refused elsewhere": refused_elsewhere,
}


@pytest.mark.parametrize("progress", ["loop", "thread"])
@pytest.mark.parametrize("count", SIZES)
async def test_an_operation_that_has_ended_holds_no_array(progress: str, count: int, no_collector: None) -> None:
    made: list[weakref.ref[Any]] = []

    def array() -> np.ndarray[Any, Any]:
        fresh = np.ones(count)
        made.append(weakref.ref(fresh))
        return fresh

    async def main(group: Any) -> None:
        for name, operation in OPERATIONS.items():
            await operation(group, array)
            await group.barrier()
            await eventually(lambda: all(one() is None for one in made), name)
            await group.barrier()

    await run_ranks(2, main, progress=progress)
