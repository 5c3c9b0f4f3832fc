"""Every collective on arrays on a GPU beside numpy, for any path; see `device_paths_kit`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from device_paths_kit import PATIENCE_S, PathRank, everybody, values
from differential import REDUCTIONS, wide

from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.collectives.arguments import call as calls
from asyncdist.collectives.arguments.call import Call
from asyncdist.group.methods.coalesced import all_reduce_coalesced

Check = Callable[[PathRank, int, Any, str], Coroutine[Any, Any, None]]


def reduced(op: str, arrays: Any, dtype: Any) -> np.ndarray:
    return REDUCTIONS[op](np.stack([wide(array) for array in arrays])).astype(dtype)


def same(found: Any, expected: np.ndarray, op: str = "SUM") -> None:
    array = found._array  # without waiting for anything: when an operation has ended its results are in place
    assert array.dtype == expected.dtype
    if op == "AVG" and array.dtype.kind not in "iu":  # rounded twice in narrow dtypes
        assert np.allclose(wide(array), wide(expected), rtol=0.15 if array.itemsize == 1 else 0.01)
    else:
        np.testing.assert_array_equal(array, expected)


async def all_reduce(rank: PathRank, count: int, dtype: Any, op: str) -> None:
    x = rank.array(values(rank.rank, count, dtype))
    await rank.run(calls.all_reduce(x, ReduceOp[op]))
    same(x, reduced(op, everybody(rank.size, count, dtype), dtype), op)


async def reduce(rank: PathRank, count: int, dtype: Any, op: str) -> None:
    root = rank.size - 1
    x = rank.array(values(rank.rank, count, dtype))
    await rank.run(calls.reduce(x, root, ReduceOp[op], rank.rank))
    total = reduced(op, everybody(rank.size, count, dtype), dtype)
    same(x, total if rank.rank == root else values(rank.rank, count, dtype), op)


async def premultiplied(rank: PathRank, count: int, dtype: Any, op: str) -> None:
    if np.dtype(dtype).kind in "fc":
        x = rank.array(values(rank.rank, count, dtype))
        await rank.run(calls.all_reduce(x, ReduceOp.PREMUL_SUM(rank.rank + 1)))  # each rank with a factor of its own
        total = sum((other + 1) * wide(array) for other, array in enumerate(everybody(rank.size, count, dtype)))
        same(x, np.asarray(total).astype(dtype))


async def broadcast(rank: PathRank, count: int, dtype: Any, op: str) -> None:
    root = rank.size // 2
    x = rank.array(values(rank.rank, count, dtype))
    await rank.run(calls.broadcast(x, root, rank.rank))
    same(x, values(root, count, dtype))


async def all_gather(rank: PathRank, count: int, dtype: Any, op: str) -> None:
    x = rank.array(values(rank.rank, count, dtype))
    out = rank.array(np.ones(rank.size * count, dtype))
    await rank.run(calls.all_gather_into_tensor(out, x, rank.size))
    same(out, np.concatenate(everybody(rank.size, count, dtype)))
    places = [rank.array(np.ones(count + other, dtype)) for other in range(rank.size)]  # uneven
    own = values(rank.rank, count + rank.rank, dtype)
    await rank.run(calls.all_gather(places, rank.array(own), rank.rank, rank.size))
    for other, place in enumerate(places):
        same(place, values(other, count + other, dtype))


async def gather_and_scatter(rank: PathRank, count: int, dtype: Any, op: str) -> None:
    root, size = rank.size - 1, rank.size
    x = rank.array(values(rank.rank, count, dtype))
    places = [rank.array(np.ones(count, dtype)) for _ in range(size)] if rank.rank == root else None
    await rank.run(calls.gather(x, places, root, rank.rank, size))
    for other, place in enumerate(places or ()):
        same(place, values(other, count, dtype))
    x = rank.array(np.ones(count, dtype))
    await rank.run(calls.scatter(x, places, root, rank.rank, size))
    same(x, values(rank.rank, count, dtype))


async def reduce_scatter(rank: PathRank, count: int, dtype: Any, op: str) -> None:
    size = rank.size
    out = rank.array(np.ones(count, dtype))
    x = rank.array(values(rank.rank, size * count, dtype))
    await rank.run(calls.reduce_scatter_tensor(out, x, ReduceOp[op], size))
    total = reduced(op, everybody(size, size * count, dtype), dtype)
    same(out, total[rank.rank * count : (rank.rank + 1) * count], op)
    parts = [rank.array(values(rank.rank, count + other, dtype)) for other in range(size)]  # uneven
    out = rank.array(np.ones(count + rank.rank, dtype))
    await rank.run(calls.reduce_scatter(out, parts, ReduceOp[op], rank.rank, size))
    same(out, reduced(op, everybody(size, count + rank.rank, dtype), dtype), op)


async def all_to_all(rank: PathRank, count: int, dtype: Any, op: str) -> None:
    size, me = rank.size, rank.rank
    out = rank.array(np.ones(size * count, dtype))
    x = rank.array(values(me, size * count, dtype))
    await rank.run(calls.all_to_all_single(out, x, None, None, me, size))
    same(out, np.concatenate([values(other, size * count, dtype)[me * count :][:count] for other in range(size)]))
    sent = [rank.array(values(10 * me + other, pair_count(me, other, count), dtype)) for other in range(size)]
    into = [rank.array(np.ones(pair_count(other, me, count), dtype)) for other in range(size)]
    await rank.run(calls.all_to_all(into, sent, me, size))
    for other, place in enumerate(into):
        same(place, values(10 * other + me, pair_count(other, me, count), dtype))


def pair_count(source: int, target: int, count: int) -> int:
    """Some pairs have nothing for each other, some far more than others."""
    return (source + 2 * target) % 3 * count


async def uneven(rank: PathRank, count: int, dtype: Any, op: str) -> None:
    size, me = rank.size, rank.rank
    places = [rank.array(np.ones(other * count, dtype)) for other in range(size)] if me == 0 else None
    await rank.run(calls.gather_uneven(rank.array(values(me, me * count, dtype)), places, 0, me, size))
    for other, place in enumerate(places or ()):
        same(place, values(other, other * count, dtype))
    x = rank.array(np.ones(me * count, dtype))
    await rank.run(calls.scatter_uneven(x, places, 0, me, size))
    same(x, values(me, me * count, dtype))


async def coalesced(rank: PathRank, count: int, dtype: Any, op: str) -> None:
    lengths = (count, 0, 3, 2 * count)
    arrays = [rank.array(values(rank.rank, length, dtype)) for length in lengths]
    await rank.run(all_reduce_coalesced(arrays, ReduceOp[op]))
    for array, length in zip(arrays, lengths, strict=True):
        same(array, reduced(op, everybody(rank.size, length, dtype), dtype), op)


async def in_place(rank: PathRank, count: int, dtype: Any, op: str) -> None:
    size, me = rank.size, rank.rank
    whole = rank.array(values(me, size * count, dtype))
    own = whole[me * count : (me + 1) * count]
    await rank.run(calls.all_gather_into_tensor(whole, own, size))
    parts = [values(other, size * count, dtype)[other * count : (other + 1) * count] for other in range(size)]
    same(whole, np.concatenate(parts))
    whole = rank.array(values(me, size * count, dtype))
    await rank.run(calls.reduce_scatter_tensor(whole[me * count : (me + 1) * count], whole, ReduceOp[op], size))
    total = reduced(op, everybody(size, size * count, dtype), dtype)
    same(whole[me * count : (me + 1) * count], total[me * count : (me + 1) * count], op)
    whole = rank.array(values(me, size * count, dtype))
    await rank.run(calls.all_to_all_single(whole, whole, None, None, me, size))
    same(whole, np.concatenate([values(other, size * count, dtype)[me * count :][:count] for other in range(size)]))


CHECKS: tuple[Check, ...] = (
    all_reduce,
    reduce,
    premultiplied,
    broadcast,
    all_gather,
    gather_and_scatter,
    reduce_scatter,
    all_to_all,
    uneven,
    coalesced,
    in_place,
)


class _Part:
    """A rank, for one of several checks that run at once; `issued` is its next operation."""

    def __init__(self, rank: PathRank) -> None:
        self.rank, self.size, self.array = rank.rank, rank.size, rank.array
        self.begin_round()

    def begin_round(self) -> None:
        self.issued: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, call: Call) -> None:
        self.issued.set_result(call)
        await self.ended


async def at_once(rank: PathRank, checks: Sequence[Check], count: int, dtype: Any, op: str) -> None:
    """Run the first operations of all checks, then the second ones, and so on: in one order on all ranks."""
    parts: Any = [_Part(rank) for _ in checks]
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(check(part, count, dtype, op)) for check, part in zip(checks, parts, strict=True)]
        while True:
            for part, task in zip(parts, tasks, strict=True):
                await asyncio.wait([part.issued, task], return_when=asyncio.FIRST_COMPLETED)
            issued = [part for part in parts if part.issued.done()]
            if not issued:
                return
            await asyncio.gather(*(rank.start(part.issued.result()) for part in issued))
            for part in issued:
                ended = part.ended
                part.begin_round()
                ended.set_result(None)
