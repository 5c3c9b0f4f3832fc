"""torch 1.x's multi-device collectives on lists of host arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from group_kit import Group, outcome

import asyncdist as dist
from asyncdist.testing import run_world

N = 2
"""Arrays of every rank."""
SIZE = 3


def own_arrays(rank: int, length: int = 4) -> list[np.ndarray]:
    return [np.full(length, 10.0 * rank + index) for index in range(N)]


TOTAL = sum(10.0 * rank + index for rank in range(SIZE) for index in range(N))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, TOTAL),
        (dist.ReduceOp.AVG, TOTAL / SIZE / N),
        (dist.ReduceOp.MAX, 21.0),
        (dist.ReduceOp.PREMUL_SUM(2.0), 2 * TOTAL),
    ],
)
def test_reductions_count_every_array_of_every_rank(op: dist.ReduceOp, expected: float) -> None:
    async def main(group: Group) -> None:
        own = own_arrays(group.rank)
        assert await dist.all_reduce_multigpu(own, op) is own
        assert [array.tolist() for array in own] == [[expected] * 4] * N
        own = own_arrays(group.rank)
        await dist.reduce_multigpu(own, 1, op, dst_tensor=1)
        for index, array in enumerate(own):
            here = group.rank == 1 and index == 1
            assert (array == (expected if here else 10.0 * group.rank + index)).all()
        outputs = [np.empty(2) for _ in range(N)]
        lists = [[np.full(2, 10.0 * group.rank + i) for _ in range(SIZE * N)] for i in range(N)]
        lists[1][3] += 100
        await dist.reduce_scatter_multigpu(outputs, lists, op)
        assert (outputs[0] == expected).all()
        assert (outputs[1] == expected).all() == (group.rank != 1)

    run_world(SIZE, main)


def test_strided_arrays_are_reduced_in_place() -> None:
    async def main(group: Group) -> None:
        base = np.ones((4, N))
        await group.all_reduce_multigpu([base[:, index] for index in range(N)])
        assert (base == SIZE * N).all()

    run_world(SIZE, main)


def test_broadcast_from_any_array_of_the_root() -> None:
    async def main(group: Group) -> None:
        own = own_arrays(group.rank)
        if group.rank == 2:
            own[1].flags.writeable = False
        await dist.broadcast_multigpu(own, 2, src_tensor=1)
        assert [array.tolist() for array in own] == [[21.0] * 4] * N

    run_world(SIZE, main)


def test_all_gather_fills_a_list_per_own_array() -> None:
    async def main(group: Group) -> None:
        lists = [[np.empty(4) for _ in range(SIZE * N)] for _ in range(N)]
        await dist.all_gather_multigpu(lists, own_arrays(group.rank))
        for gathered in lists:
            for rank in range(SIZE):
                for index in range(N):
                    assert (gathered[rank * N + index] == 10.0 * rank + index).all()

    run_world(SIZE, main)


def test_reduce_scatter_gives_every_array_its_part() -> None:
    async def main(group: Group) -> None:
        lists = [[np.full(3, 100.0 * i + place) for place in range(SIZE * N)] for i in range(N)]
        outputs = [np.empty(3) for _ in range(N)]
        await dist.reduce_scatter_multigpu(outputs, lists)
        for index, output in enumerate(outputs):
            assert (output == SIZE * (100.0 + 2 * (group.rank * N + index))).all()
        assert (lists[0][0] == 0).all()  # inputs are not written

    run_world(SIZE, main)


def test_rows_of_one_array_are_read_and_written_where_they_are() -> None:
    async def main(group: Group) -> None:
        rows = np.arange(SIZE * N * N * 2.0).reshape(N, SIZE * N, 2)
        before, outputs = rows.copy(), np.empty((N, 2))
        await group.reduce_scatter_multigpu(list(outputs), [list(row) for row in rows])
        assert np.array_equal(rows, before)
        mine = slice(group.rank * N, (group.rank + 1) * N)
        assert np.array_equal(outputs, SIZE * before.sum(0)[mine])
        gathered = np.empty((N, SIZE * N, 2))
        await group.all_gather_multigpu([list(row) for row in gathered], list(outputs))
        assert np.array_equal(gathered[1], SIZE * before.sum(0))
        assert np.array_equal(gathered[0], gathered[1])
        own = np.array([[group.rank, 1.0], [10.0, 2.0]])
        await group.all_reduce_multigpu(list(own))
        assert own.tolist() == [[33.0, 9.0]] * 2
        own = np.array([[group.rank, 1.0], [10.0 + group.rank, 2.0]])
        await group.broadcast_multigpu(list(own), 1, src_tensor=1)
        assert own.tolist() == [[11.0, 2.0]] * 2

    run_world(SIZE, main)


def test_one_array_per_rank_is_the_plain_collective() -> None:
    async def main(group: Group) -> None:
        x, y, out = np.ones(2), [np.ones(2) for _ in range(2)], np.empty(2)
        await group.all_reduce_multigpu([x])
        await group.reduce_scatter_multigpu([out], [y])
        assert x.tolist() == out.tolist() == [2, 2]
        assert y[0].tolist() == [1, 1]

    run_world(2, main)


ONE = np.ones(1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.all_reduce_multigpu([]), ValueError, "must not be empty"),
        (lambda g: g.all_reduce_multigpu([ONE, np.ones(2)]), ValueError, r"tensor_list\[1\] has shape \(2,\)"),
        (lambda g: g.all_reduce_multigpu([ONE, np.ones(1, "f4")]), ValueError, "dtype"),
        (lambda g: g.broadcast_multigpu([ONE], 0, 1), ValueError, "src_tensor=1 is not in tensor_list"),
        (lambda g: g.broadcast_multigpu([ONE], 0, True), TypeError, "src_tensor must be"),
        (lambda g: g.broadcast_multigpu([ONE], 2), ValueError, "root=2"),
        (lambda g: dist.broadcast_multigpu([ONE]), ValueError, "give src="),
        (lambda g: g.reduce_multigpu([ONE], 0, dst_tensor=-1), ValueError, "dst_tensor=-1"),
        (lambda g: g.all_gather_multigpu([], [ONE]), ValueError, "one list per array of this rank: 1"),
        (lambda g: g.all_gather_multigpu([[ONE]], [ONE]), ValueError, "2 ranks' 1 arrays, but holds 1"),
        (lambda g: g.all_gather_multigpu(ONE, [ONE]), TypeError, "list of lists"),
        (lambda g: g.all_gather_multigpu([[ONE, np.ones(2)]], [ONE]), ValueError, r"\[0\]\[1\] is float64\[2\]"),
        (lambda g: g.reduce_scatter_multigpu([ONE], [[ONE, np.ones(1, "i4")]]), ValueError, "int32"),
    ],
)
def test_wrong_lists_are_refused(call: Callable[[Group], object], error: type[Exception], message: str) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(error, match=message):
                call(group)

    run_world(2, main)


def test_ranks_with_another_number_of_arrays_are_told_apart() -> None:
    async def main(group: Group) -> None:
        error = await outcome(group.all_reduce_multigpu([np.ones(3) for _ in range(1 + group.rank)]))
        assert isinstance(error, dist.CollectiveMismatchError)

    run_world(2, main)
