"""What is remembered of tags, so as to warn of collectives that overlap."""

from __future__ import annotations

import asyncio
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.group.misuse import TAGS_KEPT, OverlapWatch
from asyncdist.testing import run_world


@pytest.mark.parametrize(("tags", "kept"), [(TAGS_KEPT, TAGS_KEPT), (TAGS_KEPT + 1, 1)])
async def test_so_many_tags_are_remembered(tags: int, kept: int) -> None:
    watch = OverlapWatch(SimpleNamespace(_works={}, name="default"), asyncio.get_running_loop())
    for tag in range(tags):
        watch.issue(tag, "all_reduce")
        watch.issue(tag, "all_reduce")
    assert len(watch.last_task) == kept


async def test_it_warns_after_having_forgotten() -> None:
    owner = SimpleNamespace(_works={}, name="default")
    watch = OverlapWatch(owner, asyncio.get_running_loop())
    for tag in range(TAGS_KEPT + 1):
        watch.issue(tag, "all_reduce")
    owner._works[TAGS_KEPT, 0] = None

    async def another() -> None:
        watch.issue(TAGS_KEPT, "barrier")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await asyncio.create_task(another())
    assert ["overlaps" in str(warning.message) for warning in caught] == [True]


def test_where_warnings_are_errors_the_others_hear_of_it() -> None:
    """The call raises, so nothing was issued: who waits for it has to know."""

    async def main(group: Group) -> None:
        first = group.all_reduce(np.ones(3))
        if group.rank == 1:
            with pytest.raises(dist.CollectiveMismatchError, match=r"rank 0 refused the operation: .* overlaps"):
                await group.all_reduce(np.ones(3))
        else:

            async def another() -> None:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    with pytest.raises(RuntimeWarning, match="overlaps"):
                        group.all_reduce(np.ones(3))

            await asyncio.create_task(another())
        await first
        x = np.ones(3)
        await group.all_reduce(x)
        assert x.tolist() == [2] * 3

    run_world(2, main)
