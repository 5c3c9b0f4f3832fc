"""Which tags have a lane of their own, and what the others cost."""

from __future__ import annotations

import numpy as np
from group_kit import Group
from lane_kit import lane_of
from socket_world import run_ranks


async def total(group: Group, tag: int = 0) -> None:
    """An all_reduce that must be right."""
    data = np.full(10, group.rank + 1.0)
    await group.all_reduce(data, tag=tag)
    assert (data == group.size * (group.size + 1) / 2).all()


async def test_tags_that_are_used_once_cost_no_memory_and_no_agreement() -> None:
    async def main(group: Group) -> None:
        await total(group)
        lanes = group._core._backend._lanes  # type: ignore[attr-defined]
        for tag in range(1, 30):
            await total(group, tag=tag)
        assert list(lanes._tags) == [0]
        for _ in range(2):
            await total(group, tag=29)
        assert lane_of(group, 29) is not None
        works = [group.all_reduce(np.ones(1000), tag=30) for _ in range(6)]  # the first of them by messages
        for work in works:
            await work
        assert lane_of(group, 30) is not None

    await run_ranks(2, main)
