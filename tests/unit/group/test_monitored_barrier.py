"""monitored_barrier: who did not come."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome

import asyncdist as dist
from asyncdist.group import deadlines as expiry
from asyncdist.group.methods.collectives import VERDICT_S
from asyncdist.testing import run_world


def missing_after(absent: set[int], size: int, timeout_s: float = 5.0, seed: int | None = None) -> list[Any]:
    """The error of each rank that came, and when it came up."""

    async def main(group: Group) -> Any:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        if group.rank in absent:
            await asyncio.sleep(timeout_s + 10)
            return None
        error = await outcome(dist.monitored_barrier(timeout=timeout_s, wait_all_ranks=True))
        assert isinstance(error, dist.CollectiveTimeoutError)
        return error, loop.time() - start_s

    return run_world(size, main, seed=seed)


def test_all_come() -> None:
    async def main(group: Group) -> None:
        for _ in range(3):
            await dist.monitored_barrier()
            await group.monitored_barrier(timeout=None, tag=4)
        subgroup = dist.new_group([3, 1], sort_ranks=False)
        if group.rank % 2:
            await dist.monitored_barrier(subgroup, 3.0)

    run_world(4, main)


@pytest.mark.parametrize("absent", [{1}, {2, 4}, {1, 2, 3, 4}])
@pytest.mark.parametrize("seed", [None, 1])
def test_every_missing_rank_is_named_on_every_rank(absent: set[int], seed: int | None) -> None:
    found = missing_after(absent, 5, seed=seed)
    for rank, result in enumerate(found):
        assert (result is None) == (rank in absent)
        if result is not None:
            error, after_s = result
            assert error.missing == tuple(sorted(absent))
            assert "monitored_barrier #0: timed out on rank 0" in str(error)
            assert 5 <= after_s < 6


def test_the_first_rank_itself_is_missing() -> None:
    for result in missing_after({0, 3}, 5):
        if result is not None:
            error, after_s = result
            assert error.missing == (0, 3)
            assert 5 + VERDICT_S <= after_s < 7


def test_in_large_groups_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "MAX_PROBE_DIALS", 2)
    assert [result and result[0].missing for result in missing_after({5, 8}, 9)] == [
        None if rank in (5, 8) else (5, 8) for rank in range(9)
    ]


def test_the_group_is_aborted_and_late_comers_hear_why() -> None:
    async def main(group: Group) -> None:
        if group.rank == 1:
            await asyncio.sleep(4)
            with pytest.raises(dist.GroupAbortedError, match="missing: rank 1"):
                dist.monitored_barrier(timeout=2)
        else:
            assert isinstance(await outcome(dist.monitored_barrier(timeout=2)), dist.CollectiveTimeoutError)

    run_world(3, main)


def test_it_takes_its_place_among_the_collectives() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(TypeError, match="timeout"):
                dist.monitored_barrier(timeout="soon")
        else:
            with pytest.raises(dist.CollectiveMismatchError, match="rank 0 refused"):
                await dist.monitored_barrier(timeout=5)
        x = np.ones(2)
        await dist.all_reduce(x)
        assert x[0] == 2

    run_world(2, main)


def test_a_plain_barrier_does_not_meet_it() -> None:
    async def main(group: Group) -> None:
        error = await outcome(group.barrier() if group.rank else group.monitored_barrier())
        assert isinstance(error, dist.CollectiveMismatchError)
        assert "rank 0 runs monitored_barrier (dissemination)" in str(error)
        assert "rank 1 runs barrier (dissemination)" in str(error)

    run_world(2, main)
