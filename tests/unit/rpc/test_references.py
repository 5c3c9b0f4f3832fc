"""Objects that stay on their rank until they are released."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
from rpc_kit import (
    LARGE,
    Group,
    on_rank_0,
    seen,
    settled,
)

import asyncdist as dist
from asyncdist import rpc
from asyncdist.testing import run_world


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_objects_stay_until_they_are_released(seed: int | None) -> None:
    async def body(_group: Group) -> None:
        with await rpc.create(1, "Account", 10) as account:
            other = await rpc.create(1, "Account")
            assert await account.call("add", 5) == 15
            assert await other.call("add", 1) == 1
            assert [day async for day in account.stream("days")] == [15, 16, 17]
            with pytest.raises(dist.RemoteError, match="private"):
                await account.call("__init__")
            with pytest.raises(dist.RemoteError, match="no attribute 'burn'"):
                await account.call("burn")
            last = account.call("add", 1)
        assert await last == 16
        with pytest.raises(RuntimeError, match="released"):
            account.call("add", 1)
        account.release()
        await settled(_group)
        assert seen["accounts dropped"] == 1
        assert await other.call("add", 1) == 2
        del other
        await settled(_group)
        assert seen["accounts dropped"] == 2

    on_rank_0(2, body, seed=seed)


def test_calls_of_an_object_keep_it() -> None:
    """Also those that wait for their turn, or whose arrays are on the way; and a stream."""

    async def body(group: Group) -> None:
        works = []
        with await rpc.create(1, "Account", 1) as account:
            works = [account.call("wait_for", np.ones(LARGE)) for _ in range(5)]
            days = account.stream("days")
        for work in works:
            assert await work == LARGE
        assert [day async for day in days] == [1, 2, 3]
        assert await (await rpc.create(1, "Account", 1)).call("wait_for", np.ones(3)) == 3
        del work, works, days, account
        await settled(group)
        assert seen["accounts dropped"] == 2

    on_rank_0(2, body, max_calls=2)


@pytest.mark.parametrize("seed", range(8))
def test_an_object_whose_creation_is_cancelled_is_dropped(seed: int) -> None:
    async def body(_group: Group) -> None:
        for turns in range(8):
            work = rpc.create(1, "Account")
            for _ in range(turns):
                await asyncio.sleep(0 if seed < 4 else 1e-5)
            work.cancel()
            del work
        await settled(_group)

    on_rank_0(2, body, seed=seed)


def test_a_reference_does_not_outlive_its_service() -> None:
    async def main(group: Group) -> None:
        async with rpc.serve():
            account = await rpc.create(1 - group.rank, "Account")
        with pytest.raises(RuntimeError, match="has ended"):
            account.call("add", 1)
        gc.collect()

    run_world(2, main)
    gc.collect()
    assert seen["accounts dropped"] == 2
