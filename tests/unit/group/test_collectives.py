"""Collectives of whole worlds in virtual time: results, order, tags, overlap."""

from __future__ import annotations

import asyncio

import ml_dtypes
import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.testing import run_world


def test_every_collective_gives_what_numpy_gives() -> None:
    async def main(group: Group) -> None:
        size, rank = group.size, group.rank
        mine = np.arange(6, dtype=np.int64).reshape(2, 3) + 10 * rank
        everyone = [np.arange(6).reshape(2, 3) + 10 * other for other in range(size)]

        x = mine.copy()
        assert await dist.all_reduce(x) is x
        assert np.array_equal(x, sum(everyone))

        x = mine.copy()
        await dist.broadcast(x, src=size - 1)
        assert np.array_equal(x, everyone[-1])

        x = mine.copy()
        await dist.reduce(x, dst=1, op=dist.ReduceOp.MAX)
        assert np.array_equal(x, everyone[-1] if rank == 1 else mine)

        gathered = [np.zeros_like(mine) for _ in range(size)]
        assert await dist.all_gather(gathered, mine) is gathered
        assert np.array_equal(gathered, everyone)

        flat = np.zeros((size, 2, 3), np.int64)
        await dist.all_gather_into_tensor(flat, mine)
        assert np.array_equal(flat, everyone)

        gathered = [np.zeros_like(mine) for _ in range(size)] if rank == 0 else []
        await dist.gather(mine, gathered, dst=0)
        assert rank != 0 or np.array_equal(gathered, everyone)

        x = np.zeros_like(mine)
        await dist.scatter(x, everyone if rank == 1 else None, src=1)
        assert np.array_equal(x, everyone[rank])

        x = np.zeros_like(mine)
        await dist.reduce_scatter(x, [everyone[rank] * (other + 1) for other in range(size)])
        assert np.array_equal(x, sum(everyone) * (rank + 1))

        x = np.zeros(2, np.int64)
        await dist.reduce_scatter_tensor(x, np.arange(2 * size) + rank)
        assert np.array_equal(x, size * np.arange(2 * rank, 2 * rank + 2) + sum(range(size)))

        await dist.barrier()

    for size in (2, 3, 5):
        run_world(size, main)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reductions_of_every_kind(size: int) -> None:
    async def main(group: Group) -> None:
        values = [np.array([3, 5, 6], np.int32) + rank for rank in range(group.size)]
        for op, expected in {
            dist.ReduceOp.SUM: np.sum(values, axis=0),
            dist.ReduceOp.AVG: np.sum(values, axis=0) // group.size,
            dist.ReduceOp.PRODUCT: np.prod(values, axis=0),
            dist.ReduceOp.MIN: np.min(values, axis=0),
            dist.ReduceOp.MAX: np.max(values, axis=0),
            dist.ReduceOp.BAND: np.bitwise_and.reduce(values),
            dist.ReduceOp.BOR: np.bitwise_or.reduce(values),
            dist.ReduceOp.BXOR: np.bitwise_xor.reduce(values),
        }.items():
            x = values[group.rank].copy()
            await group.all_reduce(x, op)
            assert np.array_equal(x, expected), op
        x = np.array([1.5, 2.0])
        untouched = x.copy()
        await group.all_reduce(x, dist.ReduceOp.PREMUL_SUM(0.5))
        assert np.array_equal(x, untouched * 0.5 * group.size)
        x = untouched.copy()
        await group.reduce(x, 0, dist.ReduceOp.PREMUL_SUM(2.0))
        assert np.array_equal(x, untouched * 2 * group.size if group.rank == 0 else untouched)
        x = untouched.copy()
        await group.reduce(x, 0, dist.ReduceOp.AVG)
        assert np.array_equal(x, untouched)

    run_world(size, main)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("elements", [1, 100_000])
def test_an_average_is_the_sum_divided_and_premul_sum_divides_before(size: int, elements: int) -> None:
    """As gloo's AVG and NCCL's: a sum of float16 soon is too large for it, one of bfloat16 as float32's."""

    async def main(group: Group) -> None:
        for dtype, limit in ((np.dtype(np.float16), 65504), (np.dtype(ml_dtypes.bfloat16), 3.38e38)):
            large, small = np.full(elements, 60_000, dtype), np.full(elements, 2.0, dtype)
            total = np.float64(large[0]) * size
            for array in (large, small):
                x = array.copy()
                await group.all_reduce(x, dist.ReduceOp.AVG)
                if array is large and total > limit:
                    assert np.isinf(x).all()
                else:
                    assert np.allclose(
                        x.astype("f8"), array.astype("f8"), rtol=size * float(ml_dtypes.finfo(dtype).eps)
                    )
                await group.all_reduce(array, dist.ReduceOp.PREMUL_SUM(1 / size))
                exact = 60_000 if array is large else 2
                assert np.allclose(array.astype("f8"), exact, rtol=size * float(ml_dtypes.finfo(dtype).eps))

    run_world(size, main)


def test_strided_arrays_are_handled() -> None:
    async def main(group: Group) -> None:
        base = np.zeros((4, 4))
        base[:, 1] = group.rank + 1
        await group.all_reduce(base[:, 1])
        assert base[:, 1].tolist() == [3.0] * 4
        assert base[:, 0].tolist() == [0.0] * 4
        transposed = (np.arange(6.0).reshape(2, 3) + group.rank).T
        await group.all_reduce(transposed)
        assert np.array_equal(transposed, (2 * np.arange(6.0).reshape(2, 3) + 1).T)

    run_world(2, main)


def test_empty_arrays_take_part() -> None:
    async def main(group: Group) -> None:
        await group.all_reduce(np.zeros((0, 3)))
        await group.broadcast(np.zeros(0), 1)
        await group.all_gather([np.zeros(0) for _ in range(group.size)], np.zeros(0))

    run_world(3, main)


def test_many_in_flight_in_any_await_order() -> None:
    async def main(group: Group) -> None:
        arrays = [np.full(size, float(group.rank + 1)) for size in (1, 50_000, 3, 300_000, 7) * 20]
        works = [group.all_reduce(array) for array in arrays]
        for work in reversed(works):
            await work
        assert all((array == 6.0).all() for array in arrays)

    run_world(3, main, seed=1)


def test_a_forgotten_work_still_completes() -> None:
    async def main(group: Group) -> None:
        x = np.ones(4)
        group.all_reduce(x)
        await group.barrier()
        await group.close()
        assert x.tolist() == [2.0] * 4

    run_world(2, main)


def test_tags_keep_concurrent_tasks_apart() -> None:
    async def main(group: Group) -> None:
        async def one(tag: int) -> float:
            total = 0.0
            for turn in range(20):
                await asyncio.sleep((tag * 7 + group.rank * 3 + turn) % 5 * 0.001)
                x = np.full(3, float(tag))
                await group.all_reduce(x, tag=tag)
                total += x[0]
            return total

        assert await asyncio.gather(*map(one, range(4))) == [tag * 60.0 for tag in range(4)]

    run_world(3, main, seed=5)


@pytest.mark.parametrize("module", [False, True])
def test_overlap_of_one_tag_from_two_tasks_warns_once_with_the_place(module: bool) -> None:
    async def main(group: Group) -> None:
        async def one() -> None:
            await (dist.barrier() if module else group.barrier())

        with pytest.warns(
            RuntimeWarning, match=r"overlaps a collective of the same tag 0 .*test_collectives.py:\d+"
        ) as seen:
            await asyncio.gather(*(asyncio.ensure_future(one()) for _ in range(3)))
        assert len(seen) == 1
        assert seen[0].filename == __file__, "not a line of the library"

    run_world(2, lambda group: main(group) if group.rank == 0 else three(group))


async def three(group: Group) -> None:
    for work in [group.barrier() for _ in range(3)]:
        await work


def test_more_collectives_of_a_tag_than_32_bits_count() -> None:
    """Of two that are 2^32 apart the first has long ended; refusals and time-outs name them by their whole number."""

    async def main(group: Group) -> None:
        group._core._sequences[0] = 2**32 - 3
        for _ in range(3):
            for size in (1, 100_000):
                x = np.full(size, group.rank + 1.0)
                await dist.all_reduce(x)
                assert (x == 6).all()
        if group.rank == 1:
            with pytest.raises(TypeError):
                dist.all_reduce(None)  # type: ignore[arg-type]
        else:
            with pytest.raises(dist.CollectiveMismatchError, match=f"#{2**32 + 3}: rank 1 refused"):
                await dist.all_reduce(np.ones(3))
        await dist.barrier()
        if group.rank:
            with pytest.raises(dist.CollectiveTimeoutError) as caught:
                await dist.barrier(timeout=1)
            assert caught.value.missing == (0,)
        else:
            await asyncio.sleep(10)

    run_world(3, main)
