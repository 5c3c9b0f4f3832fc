"""Calls whose answers are streams."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from rpc_kit import (
    LARGE,
    NOTHING,
    Group,
    on_rank_0,
    seen,
    settled,
)

import asyncdist as dist
from asyncdist import rpc
from asyncdist.rpc.calls import AHEAD
from asyncdist.testing import SimulatedWorld, run_world


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("nbytes", [0, 10, LARGE])
def test_a_stream_yields_in_order_and_runs_little_ahead(seed: int | None, nbytes: int) -> None:
    async def body(_group: Group) -> Any:
        items = []
        async for item in rpc.stream(1, "count", 40, nbytes=nbytes):
            items.append(int(item[-1]) if nbytes else item)
            await asyncio.sleep(1)
            assert seen["made"] - len(items) <= AHEAD
        return items

    assert on_rank_0(2, body, seed=seed) == list(range(40))
    assert seen["ended"] == 1


def test_an_error_comes_behind_the_items_before_it() -> None:
    async def body(_group: Group) -> Any:
        items = rpc.stream(1, "count", 10, fails_at=5)
        taken = [await anext(items) for _ in range(5)]
        with pytest.raises(dist.RemoteError, match="raised ValueError: no 5"):
            await anext(items)
        with pytest.raises(dist.RemoteError, match=r"use rpc\.call"):
            await anext(rpc.stream(1, "sleep", 1.0))
        return taken

    assert on_rank_0(2, body) == list(range(5))


@pytest.mark.parametrize("how", ["break", "aclose", "cancel"])
@pytest.mark.parametrize("taken", [1, 3, 20])
def test_a_stream_ended_early_ends_its_generator(how: str, taken: int) -> None:
    async def body(_group: Group) -> None:
        items = rpc.stream(1, "count", 1000, nbytes=LARGE)

        async def take() -> None:
            for _ in range(taken):
                await anext(items)
            if how == "cancel":
                async for _item in items:
                    await asyncio.sleep(0)

        task = asyncio.create_task(take())
        if how == "cancel":
            await asyncio.sleep(1e-4)
            task.cancel()
            await asyncio.wait([task])
        else:
            await task
        if how == "break":
            async for _item in rpc.stream(1, "count", 1000):
                break
        await items.aclose()
        await settled(_group)
        assert seen["ended"] == (2 if how == "break" else 1)

    on_rank_0(2, body)


def test_a_stream_of_a_rank_that_dies_ends() -> None:
    async def main(group: Group, world: SimulatedWorld) -> None:
        async with rpc.serve():
            if group.rank == 1:
                await asyncio.sleep(5)
                world.kill(1)
            else:
                last = -1
                with contextlib.suppress(dist.PeerLostError):
                    async for item in rpc.stream(1, "count", 10**9):
                        last = item
                        await asyncio.sleep(1)
                assert last >= 4
                await settled(group)
                assert rpc.statistics() == NOTHING

    run_world(2, main, pass_world=True)
