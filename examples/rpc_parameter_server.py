"""A parameter server: rank 0 has the weights, workers fetch them and send gradients, each at its own pace.

    asyncdist run --nproc-per-node 4 examples/rpc_parameter_server.py

Slow workers hold nobody up: the server applies each gradient when it comes. It waits for none in particular.
"""

from __future__ import annotations

import numpy as np

import asyncdist as dist
from asyncdist import rpc

TRUTH = np.array([3.0, -2.0, 1.0])
STEPS = 150
RATE = 0.05

weights = np.zeros(3)


@rpc.register
def push(gradient: np.ndarray) -> np.ndarray:
    """On the server: take a step; returns the weights, a copy as the next call changes them."""
    weights[...] -= RATE * gradient
    return weights.copy()


async def work() -> None:
    """On a worker: fit a plane to samples of its own."""
    rng = np.random.default_rng(dist.get_rank())
    current = np.zeros(3)
    for _ in range(STEPS):
        inputs = rng.normal(size=(16, 3))
        errors = inputs @ current - inputs @ TRUTH
        current = await rpc.call(0, "push", inputs.T @ errors / len(errors))


async def main() -> None:
    """The server's block is empty: it serves until all workers are through."""
    async with dist.init_process_group() as group:
        async with rpc.serve():
            if group.rank != 0:
                await work()
        if group.rank == 0:
            print(f"parameter server: {weights.round(2)} after {STEPS * (group.size - 1)} gradients")


if __name__ == "__main__":
    dist.run(main())
