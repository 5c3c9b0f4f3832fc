"""The coalesced collectives: one message for many arrays, results in place, one place in the order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from group_kit import Group, outcome

import asyncdist as dist
from asyncdist.testing import run_world

SHAPES = [(2, 3), (), (0,), (5,)]


def arrays(rank: int, dtype: Any = np.float64) -> list[np.ndarray]:
    return [np.full(shape, rank + index, dtype) for index, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("dtype", [np.int16, np.float32, ml_dtypes.bfloat16, np.complex64])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_reduce(size: int, dtype: Any) -> None:
    async def main(group: Group) -> None:
        own = arrays(group.rank, dtype)
        assert await dist.all_reduce_coalesced(own) is own
        for index, array in enumerate(own):
            assert (array == sum(range(size)) + size * index).all()
            assert array.shape == SHAPES[index]

    run_world(size, main)


def test_average_and_strided_arrays() -> None:
    async def main(group: Group) -> None:
        base = np.full((4, 6), float(group.rank))
        await group.all_reduce_coalesced([base[:, ::2], base[:2, 1::2].T], dist.ReduceOp.AVG)
        assert (base[:, ::2] == 1).all()
        assert (base[:2, 1::2] == 1).all()
        assert (base[2:, 1::2] == group.rank).all()

    run_world(3, main)


def test_rows_of_one_array() -> None:
    async def main(group: Group) -> None:
        rows = np.arange(6.0).reshape(3, 2) + group.rank
        await group.all_reduce_coalesced([rows[0], rows[1]])
        await group.all_reduce_coalesced([rows[2], rows[0]])
        assert rows.tolist() == [[2.0, 6.0], [5.0, 7.0], [9.0, 11.0]]
        await group.broadcast_coalesced([rows[1] if group.rank else rows[1] * 2, rows[2]], 0)
        assert rows[1].tolist() == ([10.0, 14.0] if group.rank else [5.0, 7.0])

    run_world(2, main)


def test_views_between_the_elements_of_one_array() -> None:
    async def main(group: Group) -> None:
        octets = np.zeros(4).view(np.uint8)
        arrays = [octets[4:12].view(float), octets[12:20].view(float)]
        for index, array in enumerate(arrays):
            array[:] = group.rank + index
        await group.all_reduce_coalesced(arrays)
        assert [array.tolist() for array in arrays] == [[1], [3]]

    run_world(2, main)


def test_one_array_is_not_copied() -> None:
    async def main(group: Group) -> None:
        x = np.ones(3)
        work = group.all_reduce_coalesced([x])
        await work
        assert x.tolist() == [2, 2, 2]

    run_world(2, main)


def test_broadcast_reads_the_root_only() -> None:
    async def main(group: Group) -> None:
        own = arrays(group.rank)
        if group.rank == 2:
            for array in own:
                array.flags.writeable = False
        await dist.broadcast_coalesced(own, src=2)
        for index, array in enumerate(own):
            assert (array == 2 + index).all()

    run_world(4, main)


def test_all_gather() -> None:
    async def main(group: Group) -> None:
        lists = [[np.empty(shape) for shape in SHAPES] for _ in range(3)]
        assert await dist.all_gather_coalesced(lists, arrays(group.rank)) is lists
        for rank, found in enumerate(lists):
            for array, expected in zip(found, arrays(rank), strict=True):
                assert np.array_equal(array, expected)

    run_world(3, main)


def test_all_gather_into_tensor_and_reduce_scatter_tensor() -> None:
    async def main(group: Group) -> None:
        outputs = [np.empty((3, *shape)) for shape in SHAPES]
        outputs[0] = np.empty((3, 3, 2)).transpose(0, 2, 1)
        await dist.all_gather_into_tensor_coalesced(outputs, arrays(group.rank))
        for index, stacked in enumerate(outputs):
            for rank in range(3):
                assert (stacked[rank] == rank + index).all()
        parts = arrays(-9)
        await dist.reduce_scatter_tensor_coalesced(parts, outputs)
        for index, part in enumerate(parts):
            assert (part == 3 * (group.rank + index)).all()

    run_world(3, main)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.all_reduce_coalesced([]), ValueError, "tensors must not be empty"),
        (lambda g: g.all_reduce_coalesced(np.ones(2)), TypeError, "tensors must be a list"),
        (
            lambda g: g.all_reduce_coalesced([np.ones(1), np.ones(1, "f4")]),
            ValueError,
            r"tensors\[1\] has dtype float32",
        ),
        (lambda g: g.all_reduce_coalesced([np.ones(1), "x"]), TypeError, r"tensors\[1\] must be"),
        (lambda g: g.all_reduce_coalesced([np.ones(1)], dist.ReduceOp.BOR), TypeError, "BOR"),
        (lambda g: g.broadcast_coalesced([np.ones(1)], 2), ValueError, "root=2"),
        (lambda g: g.all_gather_coalesced([[np.ones(1)]], [np.ones(1)]), ValueError, "one list per rank: 2"),
        (lambda g: g.all_gather_coalesced(np.ones(2), [np.ones(1)]), TypeError, "list of lists"),
        (lambda g: g.all_gather_coalesced([[], []], [np.ones(1)]), ValueError, "must hold 1 arrays"),
        (lambda g: g.all_gather_coalesced([[np.ones(2)]] * 2, [np.ones(1)]), ValueError, r"\[0\]\[0\] is float64\[2\]"),
        (lambda g: g.all_gather_into_tensor_coalesced([], [np.ones(1)]), ValueError, "must not be empty"),
        (lambda g: g.all_gather_into_tensor_coalesced([np.ones(2)] * 2, [np.ones(1)]), ValueError, "holds 2 arrays"),
        (lambda g: g.all_gather_into_tensor_coalesced([np.ones(3)], [np.ones(1)]), ValueError, "2 times the 1 elem"),
        (lambda g: g.reduce_scatter_tensor_coalesced([np.ones(1)], [np.ones(2, "i4")]), ValueError, "dtype"),
    ],
)
def test_wrong_lists_are_refused_in_their_place(
    call: Callable[[Group], object], error: type[Exception], message: str
) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(error, match=message):
                call(group)
        else:
            assert isinstance(await outcome(group.all_reduce(np.ones(3))), dist.CollectiveMismatchError)
        x = np.ones(1)
        await group.all_reduce_coalesced([x, x.copy()])
        assert x[0] == 2

    run_world(2, main)


def test_other_divisions_of_the_same_total_are_told_apart() -> None:
    async def main(group: Group) -> None:
        sizes = (3, 5) if group.rank else (4, 4)
        error = await outcome(group.all_reduce_coalesced([np.ones(size) for size in sizes]))
        assert isinstance(error, dist.CollectiveMismatchError)

    run_world(2, main)


def test_many_arrays_travel_as_one_message() -> None:
    async def main(group: Group) -> int:
        await group.barrier()
        mesh: Any = group.world.mesh
        sent = 0

        def count(kind: str) -> Callable[..., Any]:
            post = getattr(core, kind)

            def counted(*arguments: Any) -> Any:
                nonlocal sent
                sent += 1
                return post(*arguments)

            return counted

        core = mesh.peer(1 - group.rank)
        core.post_send = count("post_send")
        await group.all_reduce_coalesced([np.ones(10) for _ in range(100)])
        return sent

    assert run_world(2, main) == [1, 1]
