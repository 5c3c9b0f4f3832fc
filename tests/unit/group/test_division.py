"""Groups divided, listed, split and shrunk: who is where, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.testing import SimulatedWorld, run_world


async def total(group: Any) -> float:
    """The sum of global ranks of a group, by a collective."""
    x = np.array([float(dist.get_rank())])
    await dist.all_reduce(x, group=group)
    return float(x[0])


def test_neighbors_of_a_size() -> None:
    async def main(group: Group) -> tuple[list[int], float, int]:
        mine, every = dist.new_subgroups(2)
        assert sum(isinstance(one, dist.NonMember) for one in every) == 2
        assert mine in every
        return dist.get_process_group_ranks(mine), await total(mine), dist.get_pg_count()

    found = run_world(6, main)
    assert [ranks for ranks, *_ in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert [result for _, result, _ in found] == [1, 1, 5, 5, 9, 9]
    assert {count for *_, count in found} == {2}


def test_a_group_out_of_order_is_divided_in_its_own_order() -> None:
    async def main(group: Group) -> None:
        reverse = dist.new_group([3, 2, 1, 0], sort_ranks=False)
        mine, _ = dist.new_subgroups(2, group=reverse)
        assert dist.get_process_group_ranks(mine) == ([3, 2] if group.rank > 1 else [1, 0])
        assert mine.rank == 1 - group.rank % 2

    run_world(4, main)


def test_ranks_of_a_host_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(group: Group) -> int:
        return dist.get_world_size(dist.new_subgroups()[0])

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
        run_world(4, main)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert run_world(4, main) == [2] * 4


def test_by_enumeration_some_ranks_are_in_none() -> None:
    async def main(group: Group) -> None:
        mine, every = dist.new_subgroups_by_enumeration([[4, 0], [1, 3]])
        if group.rank == 2:
            assert isinstance(mine, dist.NonMember)
            assert mine == dist.GroupMember.NON_GROUP_MEMBER
            with pytest.raises(ValueError, match="not a member"):
                dist.barrier(mine)
        else:
            assert mine != dist.GroupMember.NON_GROUP_MEMBER
            assert dist.get_process_group_ranks(mine) == ([0, 4] if group.rank in (0, 4) else [1, 3])
            assert await total(mine) == 4
        assert len(every) == 2

    run_world(5, main)


def test_split_takes_group_ranks() -> None:
    async def main(group: Group) -> None:
        parent = dist.new_group([5, 1, 3], sort_ranks=False)
        if isinstance(parent, dist.NonMember):
            return
        part = dist.split_group(parent, [[0, 2], [1]], timeout=7)  # global 5 and 3, and 1 alone
        assert dist.get_process_group_ranks(part) == ([1] if group.rank == 1 else [3, 5])
        assert part.timeout_s == 7
        assert await total(part) == (1 if group.rank == 1 else 8)
        named = dist.split_group(parent, [[0]], group_desc="first")
        assert isinstance(named, dist.NonMember) == (group.rank != 5)
        assert named.name == "first"

    run_world(6, main)


def test_members_alone_make_a_group_whatever_else_they_made() -> None:
    async def main(group: Group) -> None:
        if group.rank == 1:
            dist.new_group([1], use_local_synchronization=True)
            dist.new_group([1, 2], use_local_synchronization=True)
        if group.rank in (0, 1):
            first = dist.new_group([0, 1], use_local_synchronization=True)
            second = dist.new_group([0, 1], use_local_synchronization=True)
            x, y = np.array([group.rank + 1]), np.array([10 * (group.rank + 1)])
            works = [dist.all_reduce(x, group=first), dist.all_reduce(y, group=second)]
            for work in works[:: 1 if group.rank else -1]:
                await work
            assert (x[0], y[0]) == (3, 30)
        everyone = dist.new_group()
        assert await total(everyone) == 3

    run_world(3, main)


def test_survivors_go_on_in_a_smaller_group() -> None:
    async def main(group: Group, world: SimulatedWorld) -> float | None:
        await group.barrier()
        if group.rank == 1:
            world.kill(1)
            return None
        with pytest.raises(dist.PeerLostError) as lost:
            await group.barrier()
        smaller = dist.shrink_group([lost.value.rank])
        assert dist.get_process_group_ranks(smaller) == [0, 2, 3]
        assert smaller.rank == {0: 0, 2: 1, 3: 2}[group.rank]
        result = await total(smaller)
        await asyncio.sleep(1)
        smallest = dist.shrink_group([0], smaller, dist.SHRINK_ABORT) if group.rank else None
        if smallest is not None:
            assert await total(smallest) == 5
            with pytest.raises(dist.GroupAbortedError, match="it was shrunk"):
                smaller.barrier()
            return result
        await asyncio.sleep(1)
        with pytest.raises(dist.GroupAbortedError, match=r"shrunk .* without rank 0"):
            smaller.barrier()
        return result

    assert run_world(4, main, pass_world=True) == [5, None, 5, 5]


def test_shrinking_leaves_the_old_group_as_it_is() -> None:
    async def main(group: Group) -> None:
        pending = group.all_reduce(np.ones(1)) if group.rank != 2 else None
        if pending is not None:
            assert await total(dist.shrink_group([2])) == 1
        else:
            await asyncio.sleep(1)
            pending = group.all_reduce(np.ones(1))
        assert (await pending)[0] == 3

    run_world(3, main)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: dist.new_subgroups(0), ValueError, "group_size=0"),
        (lambda g: dist.new_subgroups(3), ValueError, "group_size=3 does not divide group default, which has 4 ranks"),
        (lambda g: dist.new_subgroups(8), ValueError, "does not divide"),
        (lambda g: dist.new_subgroups(2.0), TypeError, "must be an int"),
        (lambda g: dist.new_subgroups_by_enumeration([]), ValueError, "must not be empty"),
        (lambda g: dist.new_subgroups_by_enumeration([[0], []]), ValueError, "must not be empty"),
        (
            lambda g: dist.new_subgroups_by_enumeration([[0, 1], [1]]),
            ValueError,
            r"1 appears in both \[0, 1\] and \[1\]",
        ),
        (lambda g: dist.new_subgroups_by_enumeration([[0, 0]]), ValueError, "twice"),
        (lambda g: dist.new_subgroups_by_enumeration([[0], [9]]), ValueError, "rank=9"),
        (lambda g: dist.new_subgroups_by_enumeration([["0"]]), TypeError, "ints"),
        (lambda g: dist.split_group(), ValueError, "must not be empty"),
        (lambda g: dist.split_group(g, [[0], [4]]), ValueError, "rank 4 is not a group rank"),
        (lambda g: dist.split_group(g, [[0, 1], [1]]), ValueError, "appears in both"),
        (lambda g: dist.shrink_group([]), ValueError, "empty"),
        (lambda g: dist.shrink_group(1), TypeError, "must be a list"),
        (lambda g: dist.shrink_group([1.0]), TypeError, "ints"),
        (lambda g: dist.shrink_group([1, 1]), ValueError, "twice"),
        (lambda g: dist.shrink_group([4]), ValueError, "rank 4"),
        (lambda g: dist.shrink_group([0, 1, 2, 3]), ValueError, "nobody would be left"),
        (lambda g: dist.shrink_group([0]), RuntimeError, "excludes itself"),
        (lambda g: dist.shrink_group([1], shrink_flags=2), ValueError, "shrink_flags"),
    ],
)
def test_wrong_divisions_are_refused_and_nothing_is_made(
    call: Callable[[Group], object], error: type[Exception], message: str
) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(error, match=message):
                call(group)
        assert dist.get_pg_count() == 1
        assert await total(dist.new_group()) == 6

    run_world(4, main)


def test_questions_that_need_no_group() -> None:
    assert dist.get_pg_count() == 0
    assert dist.get_default_backend_for_device("cpu") == "aio"
    with pytest.raises(ValueError, match="no backend for device cuda:0"):
        dist.get_default_backend_for_device("cuda:0")
    assert dist.supports_complex(dist.ReduceOp.SUM)
    assert not dist.supports_complex(dist.ReduceOp.MAX)
    assert not dist.is_ucc_available()
    assert not dist.is_xccl_available()
    assert dist.GroupMember.WORLD is dist.group.WORLD is None


def test_configuration_of_a_group() -> None:
    async def main(group: Group) -> None:
        assert dist.get_backend_config() == "cpu:aio"

    run_world(1, main)
