"""Wrong arguments: refused at the call, told to the others, and never a hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from group_kit import Group, assert_told_apart, outcome

import asyncdist as dist
from asyncdist.group.rejected_calls import REFUSALS_KEPT
from asyncdist.testing import run_world


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.all_reduce([1]), TypeError, "tensor must be a numpy array"),
        (lambda g: g.all_reduce(np.zeros(2), "sum"), TypeError, "ReduceOp"),
        (lambda g: g.all_reduce(np.zeros(2), dist.ReduceOp.BAND), TypeError, "BAND"),
        (lambda g: g.broadcast(np.zeros(2), 2), ValueError, "root=2 is not in this group"),
        (lambda g: g.reduce(np.zeros(2), True), TypeError, "root must be a rank"),
        (lambda g: g.all_gather([np.zeros(2)], np.zeros(2)), ValueError, "one array per rank: 2, but holds 1"),
        (lambda g: g.all_gather(np.zeros((2, 2)), np.zeros(2)), TypeError, "must be a list"),
        (lambda g: g.all_gather([np.zeros(3), np.zeros(2)], np.zeros(2)), ValueError, r"float64\[3\]"),
        (lambda g: g.all_gather_into_tensor(np.zeros(3), np.zeros(2)), ValueError, "2 times the 2 elements"),
        (lambda g: g.all_gather_into_tensor(np.zeros(4, "f4"), np.zeros(2)), ValueError, "dtype"),
        (lambda g: g.reduce_scatter_tensor(np.zeros(2), np.zeros(3)), ValueError, "2 times the 2 elements"),
        (lambda g: g.all_reduce(np.zeros(2), tag=-1), ValueError, "tag"),
        (lambda g: g.all_reduce(np.zeros(2), timeout=-1), ValueError, "timeout"),
        (lambda g: g.isend(np.zeros(2), 2), ValueError, "dst=2 is not in this group"),
        (lambda g: g.irecv(np.zeros(2), -1), ValueError, "src=-1"),
        (lambda g: g.irecv("text"), TypeError, "tensor"),
        (lambda g: g.recv_array(max_bytes=-1), ValueError, "max_bytes"),
        (lambda g: dist.isend(np.zeros(2)), ValueError, "give dst="),
        (lambda g: dist.isend(np.zeros(2), 1, group_dst=1), ValueError, "not both"),
        (lambda g: dist.all_reduce(np.zeros(2), group="x"), TypeError, "group must be"),
        (lambda g: dist.new_group([0, 5]), ValueError, "rank 5 is not in group"),
        (lambda g: dist.new_group([0, 0]), ValueError, "twice"),
        (lambda g: dist.new_group([]), ValueError, "empty"),
        (lambda g: dist.batch_isend_irecv([]), ValueError, "empty"),
        (lambda g: dist.P2POp(dist.barrier, np.zeros(1), 0), ValueError, "op must be"),
        (lambda g: dist.P2POp(dist.isend, [1.0], 0), TypeError, "tensor must be a numpy array"),
        (lambda g: dist.P2POp(dist.irecv, np.zeros(1), 0, tag=-1), ValueError, "tag must be between"),
        (lambda g: g.all_reduce(np.zeros(2), tag=True), TypeError, "tag must be an int, not bool"),
        (lambda g: dist.new_group([True, 0]), TypeError, "ranks must be ints, not bool"),
        (lambda g: dist.new_group([0, 1.0]), TypeError, "ranks must be ints, not float"),
        (lambda g: dist.new_group(0), TypeError, "ranks must be ints, in a list, not int"),
        (lambda g: dist.split_group(split_ranks=[0, 1]), TypeError, r"split_ranks must hold ranks .*, not int"),
        (lambda g: dist.split_group(split_ranks=1), TypeError, "split_ranks must be a list of lists of ranks, not int"),
        (lambda g: dist.new_subgroups(1.0), TypeError, "group_size must be an int"),
        (lambda g: dist.split_group(split_ranks=[["0"]]), TypeError, r"split_ranks must hold ranks \(ints\), not str"),
        (lambda g: dist.get_global_rank(g, 1.0), TypeError, "group_rank must be a rank"),
        (lambda g: dist.get_global_rank(g, -1), ValueError, "group rank -1 is not in group"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(
    call: Callable[[Group], object], error: type[Exception], message: str
) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(error, match=message):
                call(group)

    run_world(2, main)


@pytest.mark.parametrize("rank", [1.0, True, "1", [1], None])
def test_in_a_subgroup_too_a_rank_is_a_whole_number(rank: object) -> None:
    """Not what a dict takes to be equal to one."""

    async def main(group: Group) -> None:
        sub = dist.new_group([1, 0])
        with pytest.raises(TypeError, match="rank must be a rank"):
            dist.get_group_rank(sub, rank)  # type: ignore[arg-type]

    run_world(2, main)


def test_numbers_out_of_arrays_are_numbers() -> None:
    """Ranks and sizes are computed with numpy where all else is."""

    async def main(group: Group) -> None:
        grid = np.arange(4).reshape(2, 2)
        row = dist.new_subgroups_by_enumeration(grid)[0]
        assert dist.new_group(grid[:, 0]).size == 2 if group.rank in grid[:, 0] else True
        assert row.size == dist.new_subgroups(np.int64(2))[0].size == 2
        x = np.full(2, group.rank)
        root = grid[group.rank // 2].max()
        await dist.broadcast(x, root, row, tag=np.uint8(7), timeout=np.int64(60))
        assert x.tolist() == [root, root]
        await row.broadcast(x, np.int64(0), timeout=np.float32(60))
        assert dist.get_group_rank(row, root) == 1
        assert dist.get_global_rank(row, np.int64(1)) == root
        sent = dist.isend(x, grid[0, 0], tag=np.int64(3))
        if group.rank == 0:
            assert [await dist.recv(x, source, tag=3) for source in grid.flat] == [0, 1, 2, 3]
        await sent

    run_world(4, main)


@pytest.mark.parametrize("uneven", [False, True])
def test_an_empty_list_off_the_root_is_none(uneven: bool) -> None:
    async def main(group: Group) -> None:
        own, root = np.zeros(1), group.rank == 0
        gathered = await group.gather(own, [np.zeros(1), np.zeros(1)] if root else [], uneven=uneven)
        assert (gathered is None) is not root
        assert await group.scatter(own, [np.zeros(1), np.zeros(1)] if root else [], uneven=uneven) is own

    run_world(2, main)


def test_a_refused_collective_keeps_its_place_and_tells_the_others() -> None:
    async def main(group: Group) -> BaseException | None:
        if group.rank == 1:
            with pytest.raises(TypeError):
                group.all_reduce("not an array")
            error = None
        else:
            error = await outcome(group.all_reduce(np.zeros(200_000)))
        x = np.ones(3)
        await group.all_reduce(x)
        assert x.tolist() == [3.0] * 3
        return error

    for seed in range(5):
        errors = run_world(3, main, seed=seed)
        for rank in (0, 2):
            assert isinstance(errors[rank], dist.CollectiveMismatchError)
            assert "rank 1 refused" in str(errors[rank])
            assert f"rank {rank}, all_reduce #0" in str(errors[rank])


def test_a_refusal_is_heard_of_before_the_leaving_of_those_who_heard_of_it() -> None:
    async def main(group: Group) -> None:
        await group.all_gather_into_tensor(np.zeros(6), np.zeros(1))
        if group.rank == 1:
            with pytest.raises(TypeError):
                group.all_reduce("not an array")
            await asyncio.sleep(1)
        else:
            with pytest.raises(dist.CollectiveMismatchError, match="rank 1 refused"):
                await group.all_gather_into_tensor(np.zeros(6), np.zeros(1))

    for seed in range(40):
        run_world(6, main, seed=seed)


@pytest.mark.parametrize("past", [0, 1])
def test_a_rank_can_be_ahead_by_so_many_refusals_and_no_more(past: int) -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        if group.rank == 1:
            for _ in range(REFUSALS_KEPT + past):
                with pytest.raises(TypeError):
                    group.all_reduce("not an array")
            await asyncio.sleep(2)
            if past:
                with pytest.raises(dist.GroupAbortedError, match="64 refusals"):
                    group.barrier()
            else:
                await group.barrier()
            return
        await asyncio.sleep(1)
        if past:
            with pytest.raises(dist.GroupAbortedError, match="rank 1 refused the operation"):
                group.barrier()
            return
        for number in range(REFUSALS_KEPT):
            with pytest.raises(dist.CollectiveMismatchError, match=f"barrier #{number + 1}: rank 1 refused"):
                await group.barrier()
        await group.barrier()

    run_world(3, main)


def test_what_was_sent_for_a_refused_collective_is_not_kept() -> None:
    async def main(group: Group) -> None:
        await group.barrier()
        await asyncio.sleep(group.rank * 0.1)  # rank 0's messages come before the refusal, rank 2's after it
        for size in (3, 100_000):
            if group.rank == 1:
                with pytest.raises(TypeError):
                    group.all_reduce("not an array")
            else:
                assert isinstance(await outcome(group.all_reduce(np.zeros(size))), dist.CollectiveMismatchError)
        await asyncio.sleep(1)
        for core in group.world.mesh.cores:
            kept = {} if core is None else core.statistics()
            assert not [name for name, count in kept.items() if count and name != "credit"], kept

    for seed in (None, 1, 2):
        run_world(3, main, seed=seed)


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.broadcast(np.zeros(2), 7),
        lambda g: g.reduce(np.zeros(2), None),
        lambda g: dist.broadcast(np.zeros(2)),
        lambda g: dist.gather(np.zeros(2), dst=9),
        lambda g: dist.scatter(np.zeros(2), src=0, group_src=1),
        lambda g: g.barrier(timeout="soon"),
    ],
)
def test_a_wrong_root_or_time_out_is_told_to_the_others_too(call: Callable[[Group], object]) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises((TypeError, ValueError)):
                call(group)
        else:
            with pytest.raises(dist.CollectiveMismatchError, match="rank 0 refused"):
                await group.barrier()
        await group.barrier()

    run_world(3, main)


def test_different_shapes_end_the_group_everywhere() -> None:
    async def main(group: Group) -> tuple[Any, Any]:
        first = await outcome(group.all_reduce(np.zeros(100 + group.rank)))
        with pytest.raises(dist.GroupAbortedError) as later:
            group.barrier()
        return first, later.value

    outcomes = run_world(2, main)
    assert any(isinstance(first, dist.CollectiveMismatchError) for first, _ in outcomes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda g: g.all_reduce(np.ones(4)), lambda g: g.all_reduce(np.ones(4), dist.ReduceOp.MAX)),
        (lambda g: g.all_reduce(np.ones(4, "f4")), lambda g: g.all_reduce(np.ones(4, "i4"))),
        (lambda g: g.all_reduce(np.ones(4)), lambda g: g.broadcast(np.ones(4), 0)),
        (lambda g: g.all_reduce(np.ones(200_000)), lambda g: g.all_reduce(np.ones(200_000), dist.ReduceOp.MIN)),
        (lambda g: g.all_gather([np.ones(1), np.ones(1)], np.ones(1)), lambda g: g.all_reduce(np.ones(1))),
    ],
)
def test_different_calls_of_equal_size_are_told_apart(
    one: Callable[[Group], Any], other: Callable[[Group], Any]
) -> None:
    assert_told_apart(one, other)


def test_factors_of_a_weighted_sum_may_differ() -> None:
    async def main(group: Group) -> None:
        x = np.ones(3)
        await group.all_reduce(x, dist.ReduceOp.PREMUL_SUM(group.rank + 1.0))
        assert x.tolist() == [6.0] * 3

    run_world(3, main)
