"""Functions to call, and worlds in virtual time whose ranks call them."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

import asyncdist as dist
from asyncdist import rpc
from asyncdist.testing import run_world

__all__ = [
    "LARGE",
    "NOTHING",
    "Account",
    "Group",
    "UnprintableError",
    "count",
    "echo",
    "fail",
    "fail_later",
    "on_rank_0",
    "seen",
    "settled",
    "sleep",
    "stubborn",
    "unsendable",
]

Group = dist.ProcessGroup

LARGE = 300_000
"""Bytes of an array that travels apart."""
NOTHING = {"calls issued": 0, "calls waiting": 0, "calls running": 0, "objects": 0, "tasks": 0, "sends": 0}

seen: Counter[str] = Counter()
"""What happened on callees, which share this process."""


@rpc.register
def echo(*values: Any, **named: Any) -> list[Any]:
    return [list(values), named]


@rpc.register
async def sleep(seconds: float, value: Any = None) -> Any:
    seen["begun"] += 1
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        seen["cancelled"] += 1
        raise
    seen["slept"] += 1
    return value


@rpc.register
def fail(text: str) -> None:
    raise KeyError(text)


@rpc.register
async def fail_later() -> None:
    await asyncio.sleep(1)
    raise UnprintableError


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


@rpc.register
async def count(limit: int, fails_at: int = -1, nbytes: int = 0) -> AsyncIterator[Any]:
    try:
        for number in range(limit):
            seen["made"] += 1
            if number == fails_at:
                raise ValueError(f"no {number}")
            yield np.full(nbytes, number, np.uint8) if nbytes else number
    finally:
        seen["ended"] += 1


@rpc.register
async def stubborn(seconds: float) -> str:
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        await asyncio.sleep(seconds)
    return "at last"


@rpc.register
def unsendable() -> object:
    return object()


@rpc.register
class Account:
    def __init__(self, balance: int = 0) -> None:
        self.balance = balance

    def add(self, amount: int) -> int:
        self.balance += amount
        return self.balance

    async def wait(self) -> None:
        await asyncio.sleep(1000)

    async def wait_for(self, values: np.ndarray[Any, Any]) -> int:
        await asyncio.sleep(1)
        return int(values.sum())

    async def days(self) -> AsyncIterator[int]:
        for day in range(3):
            yield self.balance + day

    def __del__(self) -> None:
        seen["accounts dropped"] += 1


async def settled(group: Group) -> None:
    """Give what is on the way the time to come."""
    await asyncio.sleep(1)
    gc.collect()
    await asyncio.sleep(1)


def on_rank_0(size: int, body: Any, **options: Any) -> Any:
    """What `body(group)` returns on rank 0, while the others serve; nothing is left anywhere."""
    seed = options.pop("seed", None)

    async def main(group: Group) -> Any:
        result = None
        async with rpc.serve(**options):
            if group.rank == 0:
                result = await body(group)
            await settled(group)
            await group.barrier()
            assert rpc.statistics() == NOTHING
        return result

    return run_world(size, main, seed=seed)[0]
