"""What can be made of reductions and groups.

    asyncdist run --nproc-per-node 4 examples/reductions_blocking.py

The same on an event loop: reductions.py.
"""

from __future__ import annotations

import numpy as np

import asyncdist.blocking as dist


def groups_joined_by_max() -> None:
    """Two groups sum on their own; their first ranks join the sums by MAX and tell the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    halves = [range(size // 2), range(size // 2, size)]
    groups = [dist.new_group(half) for half in halves]  # every rank makes every group, in the same order
    leaders = dist.new_group([half[0] for half in halves])
    mine = int(rank in halves[1])
    x = np.array([float(rank)])
    dist.all_reduce(x, group=groups[mine])
    if rank == halves[mine][0]:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=leaders)
    dist.broadcast(x, src=halves[mine][0], group=groups[mine])
    assert x[0] == max(map(sum, halves))
    if rank == 0:
        print("groups joined by MAX:", x)


def weighted_sum() -> None:
    """PREMUL_SUM: each rank's array times a factor of its own, summed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weight = 2 * (rank + 1) / (size * (size + 1))  # all weights together are 1
    x = np.array([rank, 1.0])
    dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(weight))
    assert np.allclose(x, [2 * (size - 1) / 3, 1])
    if rank == 0:
        print("weighted sum:", x)


def softmax() -> None:
    """Softmax over a vector that is spread over the ranks: the maximum first, so that nothing overflows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    scores = np.random.default_rng(7).normal(1000, size=(size, 5))  # more than exp can bear
    mine = scores[rank]
    top = mine.max(keepdims=True)
    dist.all_reduce(top, dist.ReduceOp.MAX)
    shares = np.exp(mine - top)
    total = shares.sum(keepdims=True)
    dist.all_reduce(total)
    shares /= total
    whole = np.exp(scores - scores.max())
    assert np.allclose(shares, (whole / whole.sum())[rank])
    if rank == scores.max(axis=1).argmax():
        print("softmax: the largest share is", shares.max().round(3))


def norm() -> None:
    """The Euclidean norm of a vector that is spread over the ranks, unevenly."""
    rank, size = dist.get_rank(), dist.get_world_size()
    squares = np.array([np.sum(np.full(rank + 1, 2.0) ** 2)])
    dist.all_reduce(squares)
    length = float(np.sqrt(squares[0]))
    assert np.isclose(length, 2 * np.sqrt(size * (size + 1) / 2))
    if rank == 0:
        print(f"norm: {length:.4f}")


def main() -> None:
    """All of them, one after another."""
    with dist.init_process_group():
        groups_joined_by_max()
        weighted_sum()
        softmax()
        norm()


if __name__ == "__main__":
    main()
