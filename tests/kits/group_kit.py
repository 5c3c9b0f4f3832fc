"""What tests of groups share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import asyncdist as dist
from asyncdist.testing import run_world

Group = dist.ProcessGroup


async def outcome(awaitable: Awaitable[Any]) -> BaseException | Any:
    """What awaiting gives, be it an exception."""
    try:
        return await awaitable
    except dist.DistError as error:
        return error


def assert_told_apart(one: Callable[[Group], Any], other: Callable[[Group], Any]) -> None:
    """Two ranks that call different operations find out, and have no group then."""

    async def main(group: Group) -> Any:
        first = await outcome((one if group.rank == 0 else other)(group))
        await asyncio.sleep(1)
        with pytest.raises(dist.GroupAbortedError):
            group.barrier()
        return first

    for seed in (None, 1, 2):
        outcomes = run_world(2, main, seed=seed)
        assert any(isinstance(first, dist.CollectiveMismatchError) for first in outcomes), outcomes
