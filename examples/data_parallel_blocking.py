"""Data-parallel training: every rank learns from its own part of the data.

    asyncdist run --nproc-per-node 4 examples/data_parallel_blocking.py

The line y = 3 a - 2 b + 1 is found from noisy points, divided among the ranks by DataPartitioner. For a network whose
gradients leave layer by layer see train_digits.py. The same on an event loop: data_parallel.py.
"""

from __future__ import annotations

import numpy as np

import asyncdist.blocking as dist

POINTS = 2000
STEPS = 200
RATE = 0.1


def train() -> np.ndarray:
    """Gradient descent on the mean square error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = np.random.default_rng(11)  # the same data on every rank, as if read from a file
    inputs = np.column_stack([draw.normal(size=(POINTS, 2)), np.ones(POINTS)])
    targets = inputs @ [3, -2, 1] + draw.normal(scale=0.1, size=POINTS)

    mine = dist.DataPartitioner(np.column_stack([inputs, targets]), [1 / size] * size).use(rank)[:]
    weights = np.random.default_rng(rank).normal(size=3)  # different everywhere ...
    dist.broadcast_parameters([weights], src=0)  # ... until here
    for _ in range(STEPS):
        errors = mine[:, :3] @ weights - mine[:, 3]
        gradient = 2 * errors @ mine[:, :3] / len(mine)
        dist.average_gradients([gradient])
        weights -= RATE * gradient
    return weights


def main() -> None:
    """Train, and see that all ranks have learned the same."""
    with dist.init_process_group():
        weights = train()
        assert np.allclose(weights, [3, -2, 1], atol=0.02)
        everybody = dist.all_gather_array(weights)
        assert all(np.array_equal(weights, other) for other in everybody)  # to the last bit
        if dist.get_rank() == 0:
            print("weights:", weights.round(2))


if __name__ == "__main__":
    main()
