"""A team's all_reduce: the same result on all that are left, and who took part in it, whoever dies when."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import numpy as np
import pytest

import asyncdist as dist
from asyncdist.errors import CollectiveTimeoutError
from asyncdist.testing import run_world

OPERATIONS = 12


@pytest.mark.parametrize("seed", range(60))
def test_all_that_are_left_have_the_same_results(seed: int) -> None:
    """What each result says of who took part is true: it is the sum of just their values."""
    chance = random.Random(seed)
    size = chance.choice([2, 3, 5, 8])
    dead = {rank: chance.uniform(0, 0.2) for rank in chance.sample(range(size), chance.randrange(size))}

    def die(world: Any, rank: int) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            world.kill(rank)

    async def main(group: dist.ProcessGroup, world: Any) -> list[tuple[tuple[int, ...], list[int]]]:
        loop, rank = asyncio.get_running_loop(), group.rank
        if rank in dead:
            loop.call_later(dead[rank], die, world, rank)
        team = dist.Team(group)
        results = []
        for number in range(OPERATIONS):
            x = np.full(2, 100**rank * (number + 1))
            array, ranks = await team.all_reduce(x)
            assert array is x
            assert x.tolist() == [(number + 1) * sum(100**one for one in ranks)] * 2
            results.append((ranks, x.tolist()))
        assert set(team.group.ranks) <= set(ranks)
        return results

    results = run_world(size, main, seed=seed, latency_s=0.001, pass_world=True)
    left = [results[rank] for rank in range(size) if rank not in dead]
    assert all(result == left[0] for result in left)
    assert [len(ranks) for ranks, _ in left[0]] == sorted((len(ranks) for ranks, _ in left[0]), reverse=True)


def test_a_rank_that_does_not_come_is_named() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        if group.rank == 0:
            with pytest.raises(CollectiveTimeoutError) as caught:
                await dist.Team(group).all_reduce(np.ones(1), timeout=2)
            assert list(caught.value.missing) == [1]
        else:
            await asyncio.sleep(5)

    run_world(2, main)
