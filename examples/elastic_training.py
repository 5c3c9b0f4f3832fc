"""Training that goes on when nodes come, leave or are lost: it saves, and begins each round where it saved last.

    asyncdist run --nproc-per-node 2 examples/elastic_training.py /shared/checkpoints

As an elastic job, on one to four nodes; start more launchers, or kill some, while it runs:

    export ASYNCDIST_STORE=host0:29500    # an asyncdist-server, which outlives the nodes
    asyncdist run --nnodes 1:4 --rdzv-id training --max-restarts 3 \\
        --nproc-per-node 2 examples/elastic_training.py /shared/checkpoints
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

import numpy as np

import asyncdist as dist
from asyncdist import checkpoint

STEPS = 200
SAVE_EVERY = 5
BATCH = 64
RATE = 0.1


def gradient_of(weights: np.ndarray, step: int, rank: int, size: int) -> np.ndarray:
    """This rank's share of the gradient for the batch of a step, which is the same however many ranks there are."""
    draw = np.random.default_rng(step)  # as if read from a file
    inputs = np.column_stack([draw.normal(size=(BATCH, 2)), np.ones(BATCH)])
    targets = inputs @ [3, -2, 1] + draw.normal(scale=0.1, size=BATCH)
    mine = slice(rank, None, size)
    errors = inputs[mine] @ weights - targets[mine]
    gradient: np.ndarray = 2 * errors @ inputs[mine] / BATCH
    return gradient


async def main(folder: Path, pause_s: float) -> None:
    """One round: from the last checkpoint to the end, or until the launcher stops it."""
    async with dist.init_process_group():
        rank, size = dist.get_rank(), dist.get_world_size()
        weights = np.zeros(3)
        found = await checkpoint.load(folder, {"weights": weights})
        first = found.state["step"] if found else 0
        if rank == 0:
            print(f"round {os.environ.get('ASYNCDIST_ROUND', '0')}: {size} ranks go on after step {first}")
        for step in range(first + 1, STEPS + 1):
            gradient = gradient_of(weights, step, rank, size)
            await dist.all_reduce(gradient)
            weights -= RATE * gradient
            if step % SAVE_EVERY == 0:
                await checkpoint.save({"weights": weights}, folder, state={"step": step})
            await asyncio.sleep(pause_s)
        if rank == 0:
            print("weights:", weights.round(2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("checkpoints"), help="the checkpoints, on a disk of all nodes"
    )
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="SECONDS", help="after each step, to have time to watch"
    )
    arguments = parser.parse_args()
    dist.run(main(arguments.folder, arguments.pause))
