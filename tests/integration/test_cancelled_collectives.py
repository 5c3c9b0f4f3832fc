"""A rank that stops waiting, at any await, for any collective: the operation goes on, and so does the group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from cancel_sweep import Cut, cancelling_at
from socket_world import socket_world

import asyncdist as dist

COUNT = 20_000
RANKS = 3
WHO_GIVES_UP = 1
ENOUGH_S = 20.0

Call = Callable[[dist.ProcessGroup], Awaitable[Any]]


def filled(value: float, blocks: int = 1) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.full(COUNT * blocks, float(value))


async def streamed(group: dist.ProcessGroup) -> None:
    async with group.broadcast_stream(filled(group.rank), 0, chunk_bytes=1 << 16) as stream:
        async for chunk in stream:
            assert (chunk.data == 0).all()


OPERATIONS: dict[str, Call] = {
    "all_reduce": lambda group: group.all_reduce(filled(1)),
    "small all_reduce": lambda group: group.all_reduce(np.ones(3)),
    "broadcast": lambda group: group.broadcast(filled(1), 0),
    "reduce": lambda group: group.reduce(filled(1), 0),
    "all_gather": lambda group: group.all_gather([filled(0) for _ in range(RANKS)], filled(1)),
    "gather": lambda group: group.gather(filled(1), None if group.rank else [filled(0) for _ in range(RANKS)], 0),
    "scatter": lambda group: group.scatter(filled(0), None if group.rank else [filled(1) for _ in range(RANKS)], 0),
    "reduce_scatter": lambda group: group.reduce_scatter_tensor(filled(0), filled(1, RANKS)),
    "all_to_all": lambda group: group.all_to_all_single(filled(0, RANKS), filled(1, RANKS)),
    "scan": lambda group: group.scan(filled(1)),
    "barrier": lambda group: group.barrier(),
    "monitored_barrier": lambda group: group.monitored_barrier(),
    "all_gather_object": lambda group: group.all_gather_object([None] * RANKS, {"rank": group.rank}),
    "all_gather_array": lambda group: group.all_gather_array(np.arange(group.rank + 1)),
    "broadcast_stream": streamed,
}


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
async def test_cancelled_at_any_await(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_TRANSPORT", transport)
    async with socket_world(RANKS) as groups:
        for name, operation in OPERATIONS.items():
            cut = Cut(0)
            while not cut.at or cut.reached:
                cut = Cut(cut.at + 1)

                async def give_up(cut: Cut = cut, call: Call = operation) -> None:
                    await cancelling_at(cut, call(groups[WHO_GIVES_UP]))

                async def go_on(group: dist.ProcessGroup, call: Call = operation) -> None:
                    await call(group)

                others = [go_on(group) for group in groups if group.rank != WHO_GIVES_UP]
                tasks = [asyncio.create_task(task) for task in (give_up(), *others)]
                async with asyncio.timeout(ENOUGH_S):
                    ends = await asyncio.gather(*tasks, return_exceptions=True)
                assert isinstance(ends[0], asyncio.CancelledError) == cut.reached, name
                assert ends[1:] == [None] * len(others), name
                data = [np.ones(2) for _ in groups]
                await asyncio.gather(
                    *(group.all_reduce(array, tag=1) for group, array in zip(groups, data, strict=True))
                )
                assert all((array == RANKS).all() for array in data), name
