"""Messages from one rank to another.

    asyncdist run --nproc-per-node 4 examples/point_to_point.py

The same without asyncio: point_to_point_blocking.py.
"""

from __future__ import annotations

import numpy as np

import asyncdist as dist


async def chain() -> None:
    """Each rank receives a number, doubles it and passes it on: 0 -> 1 -> 2 -> ..."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.ones(1)
    if rank > 0:
        await dist.recv(x, src=rank - 1)
        x *= 2
    if rank < size - 1:
        await dist.send(x, dst=rank + 1)
    assert x[0] == 2**rank
    if rank == size - 1:
        print("chain:", x)


async def ring() -> None:
    """isend and irecv: post both, compute while the messages travel, then wait."""
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    arriving = np.empty(1000)
    receiving = dist.irecv(arriving, src=left)
    sending = dist.isend(np.full(1000, float(rank)), dst=right)
    expected = np.full(1000, float(left))  # computed meanwhile
    source = await receiving  # a receive tells who it was from
    await sending
    assert source == left
    assert np.array_equal(arriving, expected)
    if rank == 0:
        print(f"ring: {arriving[0]} from rank {source}")


async def crossed_sends() -> None:
    """Two ranks send to each other before either receives: a deadlock where a large send waits for its receiver."""
    rank, size = dist.get_rank(), dist.get_world_size()
    partner = rank ^ 1
    if partner == size:  # an odd one out
        return
    mine, theirs = np.full(1 << 20, rank), np.empty(1 << 20, np.int64)
    sending = dist.send(mine, dst=partner)  # on its way, and not waited for yet
    await dist.recv(theirs, src=partner)
    await sending
    assert (theirs == partner).all()
    if rank == 0:
        print(f"crossed sends: {theirs.nbytes >> 20} MiB each way")


async def from_anybody() -> None:
    """Rank 0 takes arrays of any shape as they come. To give up waiting loses none of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        try:
            await dist.recv_array(timeout=0.01)
        except TimeoutError:
            print("from anybody: nothing yet")
    await dist.barrier()
    if rank > 0:
        await dist.send(np.arange(rank), dst=0)
        return
    arrays = [await dist.recv_array() for _ in range(size - 1)]
    assert sorted(array.size for array in arrays) == list(range(1, size))
    print("from anybody:", sorted(array.tolist() for array in arrays))


async def main() -> None:
    """All of them, one after another."""
    async with dist.init_process_group():
        await chain()
        await ring()
        await crossed_sends()
        await from_anybody()


if __name__ == "__main__":
    dist.run(main())
