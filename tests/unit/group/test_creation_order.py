"""Ranks that make other groups, or in another order, are told so instead of waiting for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome
from socket_world import run_ranks

import asyncdist as dist
from asyncdist.group.deadlines import ASK_S
from asyncdist.group.membership import MADE_KEPT, QUESTIONS_KEPT
from asyncdist.testing import run_world

Lists = Sequence[Sequence[int]]


def make(group: Group, lists: Lists) -> list[Any]:
    return [dist.new_group(ranks, group=group) for ranks in lists]


async def use(group: Any) -> BaseException | None:
    return None if group.rank < 0 else await outcome(group.all_reduce(np.ones(1)))


@pytest.mark.parametrize(
    ("others", "odd", "shown"),
    [
        ([[0, 1], [0, 1, 2]], [[0, 1, 2], [0, 1]], "rank 0 of [0, 1], rank 1 of [0, 1, 2]"),
        ([[0, 1, 2]], [[0, 1], [0, 1, 2]], "rank 0 of [0, 1, 2], rank 1 of [0, 1]"),
        ([[0, 2], [0, 1, 2]], [[0, 1, 2]], "rank 1 of [0, 1, 2], rank 2 of [0, 2]"),
        ([[0, 1, 2]], [[1, 2]], "rank 1 of [1, 2], rank 2 of [0, 1, 2]"),
    ],
    ids=["swapped", "one more", "one less", "other ranks"],
)
def test_ranks_that_made_other_groups_are_told_within_a_second(others: Lists, odd: Lists, shown: str) -> None:
    async def main(group: Group) -> list[str]:
        loop = asyncio.get_running_loop()
        made = make(group, odd if group.rank == 1 else others)
        start_s = loop.time()
        errors = [str(error) for error in await asyncio.gather(*map(use, made)) if isinstance(error, BaseException)]
        assert loop.time() - start_s <= 1
        return errors

    found = run_world(3, main)
    assert any(shown in error for errors in found for error in errors)
    for rank, errors in enumerate(found):
        assert errors, f"rank {rank} noticed nothing"
        assert all(error.startswith("group default/") and f", rank {rank}, all_reduce" in error for error in errors)


def test_both_sides_name_both_and_the_group_is_aborted() -> None:
    async def main(group: Group) -> str:
        made = make(group, [[0, 1, 2] if group.rank == 0 else [0, 1]])[0]
        error = await use(made)
        assert isinstance(error, dist.CollectiveMismatchError)
        with pytest.raises(dist.GroupAbortedError, match="differently"):
            made.barrier()
        await group.barrier()
        return str(error).partition(": ")[2]

    found = run_world(3, lambda group: main(group) if group.rank < 2 else _bystander(group))
    assert (
        found[0]
        == found[1]
        == (
            "ranks made group 1 of group default differently: rank 0 of [0, 1, 2], rank 1 of [0, 1]; "
            "make the same groups in the same order on all ranks"
        )
    )


async def _bystander(group: Group) -> str:
    make(group, [[0, 1]])
    await group.barrier()
    return ""


def test_messages_are_told_as_well() -> None:
    async def main(group: Group) -> None:
        made = make(group, [[1, 0] if group.rank == 0 else [0, 1, 2]])[0]
        if group.rank == 2:
            return
        with pytest.raises(
            dist.CollectiveMismatchError, match=r"irecv \(rank .\): ranks made group 1 of group default"
        ):
            await made.irecv(np.zeros(1), 1 - group.rank)

    run_world(3, main)


def test_who_is_late_is_waited_for_and_still_found_out() -> None:
    async def main(group: Group, others: Lists) -> BaseException | None:
        if group.rank == 1:
            await asyncio.sleep(5)
            return await use(make(group, others)[0])
        loop = asyncio.get_running_loop()
        error = await use(make(group, [[0, 1]])[0])
        assert 5 <= loop.time() <= 5 + 2 * ASK_S
        return error

    assert all(
        error is not None and not isinstance(error, BaseException) for error in run_world(2, _with(main, [[0, 1]]))
    )
    for error in run_world(2, _with(main, [[1]]))[:1]:
        assert isinstance(error, dist.CollectiveMismatchError)


def _with(main: Callable[[Group, Lists], Any], lists: Lists) -> Callable[[Group], Any]:
    return lambda group: main(group, lists)


def test_groups_without_the_other_go_on() -> None:
    """Rank 0 counts otherwise than all, but ranks 1 and 2 have each other."""

    async def main(group: Group) -> None:
        made = make(group, [[0, 1] if group.rank == 0 else [1, 2]])[0]
        if group.rank == 0:
            assert isinstance(await use(made), dist.CollectiveMismatchError)
            return
        await asyncio.sleep(5)
        await made.all_reduce(np.ones(1))

    run_world(3, main)


@pytest.mark.parametrize(("past", "told"), [(0, True), (1, False)])
def test_so_many_groups_are_remembered(past: int, told: bool) -> None:
    async def main(group: Group) -> bool:
        first = make(group, [[0, 1] if group.rank == 0 else [1]])[0]
        for _ in range(MADE_KEPT - 1 + past if group.rank == 1 else 0):
            make(group, [[1]])
        await group.barrier()
        if group.rank == 1:
            await asyncio.sleep(10)
            return told
        error = await outcome(first.all_reduce(np.ones(1), timeout=5))
        return isinstance(error, dist.CollectiveMismatchError)

    assert run_world(2, main)[0] is told


@pytest.mark.parametrize(("past", "kept"), [(0, True), (1, False)])
def test_so_many_questions_are_kept(past: int, kept: bool) -> None:
    async def main(group: Group) -> None:
        order = group._core._lineage.order
        for number in range(1, QUESTIONS_KEPT + 1 + past):
            order.heard(1, number, number, "ranks", True)
        assert (QUESTIONS_KEPT + past in order._questions) is kept
        order.heard(1, 1, 7, "others", True)
        assert order._questions[1][1].shown == "others"
        order.made(1, 7, (0,))
        order.heard(1, 1, 7, "others", True)
        assert 1 not in order._questions

    run_world(1, main)


@pytest.mark.parametrize("progress", ["loop", "thread"])
async def test_on_sockets_and_the_communication_thread(progress: Any) -> None:
    async def main(group: Any) -> None:
        lists = [[0, 1], [0]]
        made = [dist.new_group(ranks, group=group) for ranks in (lists if group.rank == 0 else lists[::-1])]
        pair = made[group.rank]
        error = await outcome(pair.all_reduce(np.ones(3)))
        assert isinstance(error, dist.CollectiveMismatchError)
        assert "differently: rank 0 of [0" in str(error)
        await group.barrier()

    await run_ranks(2, main, progress=progress)
