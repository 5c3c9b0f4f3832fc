"""The collectives, a few lines each.

    asyncdist run --nproc-per-node 4 examples/collectives.py

The same without asyncio: collectives_blocking.py.
"""

from __future__ import annotations

import numpy as np

import asyncdist as dist


async def broadcast_from_two_roots() -> None:
    """Two broadcasts under way at once, from the first rank and from the last."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x, y = np.full(2, rank), np.full(2, rank)
    works = [dist.broadcast(x, src=0), dist.broadcast(y, src=last)]  # in the same order on every rank
    for work in works:
        await work
    assert x.tolist() == [0, 0]
    assert y.tolist() == [last, last]
    if rank == 0:
        print("broadcast:", x, y)


async def scatter() -> None:
    """Rank 0 deals out one array to each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = np.empty(2, np.int64)
    await dist.scatter(mine, [np.full(2, 10 * to) for to in range(size)] if rank == 0 else None, src=0)
    assert mine.tolist() == [10 * rank, 10 * rank]
    if rank == size - 1:
        print("scatter:", mine)


async def gather() -> None:
    """Rank 0 collects one array from each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    collected = [np.empty(1, np.int64) for _ in range(size)] if rank == 0 else None
    await dist.gather(np.array([rank * rank]), collected, dst=0)
    if collected is not None:
        assert np.concatenate(collected).tolist() == [one * one for one in range(size)]
        print("gather:", np.concatenate(collected))


async def reduce() -> None:
    """The largest of all ranks' numbers, on rank 0; the others keep what they have."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.array([rank, -rank])
    await dist.reduce(x, dst=0, op=dist.ReduceOp.MAX)
    assert x.tolist() == ([size - 1, 0] if rank == 0 else [rank, -rank])
    if rank == 0:
        print("reduce:", x)


async def all_gather() -> None:
    """Everybody's array, on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody = [np.empty(2) for _ in range(size)]
    await dist.all_gather(everybody, np.array([rank, rank / 2]))
    assert [array.tolist() for array in everybody] == [[one, one / 2] for one in range(size)]
    if rank == 0:
        print("all_gather:", np.stack(everybody).tolist())


async def all_gather_without_sizes() -> None:
    """Everybody's array, of whatever shape; nobody needs to know the others'."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody = await dist.all_gather_array(np.arange(rank))
    assert [array.size for array in everybody] == list(range(size))
    if rank == 0:
        print("all_gather_array:", [array.tolist() for array in everybody])


async def all_gather_bytes() -> None:
    """Everybody's byte string, and any other object made of numbers, strings, lists, dicts and arrays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody: list[object] = [None] * size
    await dist.all_gather_object(everybody, b"rank %d" % rank)
    assert everybody == [b"rank %d" % one for one in range(size)]
    if rank == 0:
        print("all_gather_object:", everybody)


async def all_reduce() -> None:
    """The sum of all ranks' arrays, on every rank, in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.array([1.0, rank])
    work = dist.all_reduce(x)  # issued here; until it is awaited, compute
    squares = sum(number * number for number in range(1000))
    await work
    assert x.tolist() == [size, size * (size - 1) / 2]
    if rank == 0:
        print("all_reduce:", x, "meanwhile:", squares)


async def main() -> None:
    """All of them, one after another."""
    async with dist.init_process_group():
        await broadcast_from_two_roots()
        await scatter()
        await gather()
        await reduce()
        await all_gather()
        await all_gather_without_sizes()
        await all_gather_bytes()
        await all_reduce()


if __name__ == "__main__":
    dist.run(main())
