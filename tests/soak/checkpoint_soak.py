"""Checkpoint soak: ranks that save are killed at random instants; what is found is whole, and nothing done is lost.

python tests/soak/checkpoint_soak.py --kills 50
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import click
import numpy as np
from jobs import free_port

import asyncdist as dist
from asyncdist import checkpoint
from asyncdist.testing import run_world

RANKS = 3
ROWS = 300_000
FORK = multiprocessing.get_context("fork")


def arrays_of(step: int, start: int, stop: int) -> dict[str, object]:
    """An array that is alike on all ranks, and some rows of one that is divided."""
    return {
        "alike": np.full(100_003, step, np.int32),
        "divided": checkpoint.Part(np.full((stop - start, 2), step, np.int64), start, ROWS),
    }


def run_rank(rank: int, port: int, folder: str, tell: Connection) -> None:
    """Save step after step; tell the parent of each that is saved."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    async def main() -> None:
        async with dist.init_process_group():
            step = await newest(folder)
            while True:
                step += 1
                arrays = arrays_of(step, ROWS * rank // RANKS, ROWS * (rank + 1) // RANKS)
                await checkpoint.save(arrays, folder, state={"step": step})
                tell.send(step)

    dist.run(main())


async def newest(folder: str) -> int:
    """The step of the newest checkpoint, all of whose numbers are that step's; -1 if there is none."""
    found = await checkpoint.load(folder)
    if found is None:
        return -1
    step: int = found.state["step"]
    for name, array in found.arrays.items():
        assert (array == step).all(), f"{name} of step {step} holds {np.unique(array)}"
    return step


def check(kills: int, seed: int, folder: str) -> list[int]:
    """Start, kill and load so many times; the steps that were found."""
    dice = random.Random(seed)
    found = []
    for _ in range(kills):
        port = free_port()
        pipes = [FORK.Pipe(duplex=False) for _ in range(RANKS)]
        ranks = [FORK.Process(target=run_rank, args=(rank, port, folder, pipes[rank][1])) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        told = [pipes[0][0].recv()]  # they are at work
        time.sleep(dice.random() * 0.2)
        for process in dice.sample(ranks, RANKS):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            process.join()
        for reader, writer in pipes:
            writer.close()
            while reader.poll():
                try:
                    told.append(reader.recv())
                except EOFError:
                    break
        (step,) = run_world(1, lambda _group: newest(folder), loop_factory=asyncio.new_event_loop)
        assert max(told) <= step <= max(told) + 1, f"saved {max(told)}, and found {step}"
        found.append(step)
    return found


@click.command()
@click.option("--kills", default=50, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(kills: int, seed: int) -> None:
    """Exit with an error at the first checkpoint that is not whole, or is lost."""
    with tempfile.TemporaryDirectory() as folder:
        steps = check(kills, seed, folder)
    click.echo(f"{kills} times killed while saving, {steps[-1] + 1} checkpoints: all whole, none that was done lost")


if __name__ == "__main__":
    main()
