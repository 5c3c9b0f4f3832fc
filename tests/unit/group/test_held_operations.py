"""Operations issued while their tag's lane is being agreed on wait; a loss meanwhile ends all of them, in order."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from group_kit import outcome
from socket_world import socket_world, turns

import asyncdist as dist


@pytest.mark.parametrize("count", [1, 6, 20])
async def test_a_loss_meanwhile_fails_all_of_them_and_is_heard_by_every_group(count: int) -> None:
    async with socket_world(2) as (group, other):
        sub = group.make_subgroup((0, 1), None, "sub")
        assert sub is not None
        works = [group.all_reduce(np.ones(4)) for _ in range(3)]
        await turns(count)
        other.world.mesh.abort()
        for work in works:
            async with asyncio.timeout(5):
                error = await outcome(work)
            assert isinstance(error, dist.PeerLostError), error
            assert error.rank == 1
        with pytest.raises(dist.GroupAbortedError):
            sub.barrier()
        assert 1 in group.world.lost
        await outcome(group.close())
