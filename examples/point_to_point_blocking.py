"""Messages from one rank to another.

    asyncdist run --nproc-per-node 4 examples/point_to_point_blocking.py

The same on an event loop: point_to_point.py.
"""

from __future__ import annotations

import numpy as np

import asyncdist.blocking as dist


def chain() -> None:
    """Each rank receives a number, doubles it and passes it on: 0 -> 1 -> 2 -> ..."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.ones(1)
    if rank > 0:
        dist.recv(x, src=rank - 1)
        x *= 2
    if rank < size - 1:
        dist.send(x, dst=rank + 1)
    assert x[0] == 2**rank
    if rank == size - 1:
        print("chain:", x)


def ring() -> None:
    """isend and irecv: post both, compute while the messages travel, then wait."""
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    arriving = np.empty(1000)
    receiving = dist.irecv(arriving, src=left)
    sending = dist.isend(np.full(1000, float(rank)), dst=right)
    expected = np.full(1000, float(left))  # computed meanwhile
    receiving.wait()
    sending.wait()
    source = receiving.source_rank()
    assert source == left
    assert np.array_equal(arriving, expected)
    if rank == 0:
        print(f"ring: {arriving[0]} from rank {source}")


def crossed_sends() -> None:
    """Two ranks send to each other before either receives: a deadlock where a large send waits for its receiver."""
    rank, size = dist.get_rank(), dist.get_world_size()
    partner = rank ^ 1
    if partner == size:  # an odd one out
        return
    mine, theirs = np.full(1 << 20, rank), np.empty(1 << 20, np.int64)
    sending = dist.isend(mine, dst=partner)  # on its way, and not waited for yet
    dist.recv(theirs, src=partner)
    sending.wait()
    assert (theirs == partner).all()
    if rank == 0:
        print(f"crossed sends: {theirs.nbytes >> 20} MiB each way")


def from_anybody() -> None:
    """Rank 0 takes arrays of any shape as they come. To give up waiting loses none of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        try:
            dist.recv_array(timeout=0.01)
        except TimeoutError:
            print("from anybody: nothing yet")
    dist.barrier()
    if rank > 0:
        dist.send(np.arange(rank), dst=0)
        return
    arrays = [dist.recv_array() for _ in range(size - 1)]
    assert sorted(array.size for array in arrays) == list(range(1, size))
    print("from anybody:", sorted(array.tolist() for array in arrays))


def main() -> None:
    """All of them, one after another."""
    with dist.init_process_group():
        chain()
        ring()
        crossed_sends()
        from_anybody()


if __name__ == "__main__":
    main()
