"""Shrink soak: ranks are killed at random instants, those that are left shrink the group and go on; how long it takes.

    python tests/soak/shrink_soak.py --trials 100 --deaths 2
    python tests/soak/shrink_soak.py --on-lost continue      # all_reduce shrinks it

Each trial is a world of processes of its own. From the last kill until a survivor has the right sum over the new group,
which all survivors must have.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import click
import numpy as np
from jobs import free_port

import asyncdist as dist
from asyncdist.errors import GroupAbortedError, PeerLostError

RANKS = 8
SPREAD_S = 0.05
"""Between the first and the last kill of a trial, at most: some fall into the agreement."""
LIMIT_S = 30.0
FORK = multiprocessing.get_context("fork")


def run_rank(rank: int, size: int, port: int, on_lost: str, tell: Connection) -> None:
    """Sum until ranks are lost, shrink, sum; tell the parent when it began, and what came of it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.run(_rank(size, on_lost, tell))


async def _rank(size: int, on_lost: str, tell: Connection) -> None:
    group = await dist.init_process_group()
    x = np.zeros(1, np.int64)
    began = False
    while True:
        x[0] = group.world.rank
        try:
            result = await group.all_reduce(x, on_lost=on_lost)
            ranks = group.ranks if on_lost == "raise" else result.ranks
            if len(ranks) < size:
                tell.send((time.monotonic(), ranks, int(x[0])))
            elif not began:
                began = True
                tell.send(None)
        except (PeerLostError, GroupAbortedError):
            group = await group.shrink(timeout=LIMIT_S)


def trial(seed: int, deaths: int, size: int = RANKS, on_lost: str = "raise") -> tuple[float, list[str]]:
    """Seconds from the last kill until the slowest survivor has gone on, and what was wrong."""
    chance = random.Random(seed)
    port = free_port()
    pipes = [FORK.Pipe(duplex=False) for _ in range(size)]
    processes = [
        FORK.Process(target=run_rank, args=(rank, size, port, on_lost, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for receiver, _ in pipes:
            if not receiver.poll(LIMIT_S):
                return 0.0, ["the world did not come together"]
            receiver.recv()
        victims = chance.sample(range(size), deaths)
        for number, victim in enumerate(victims):
            time.sleep(chance.uniform(0, SPREAD_S) if number else 0.0)
            pid = processes[victim].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        left = tuple(rank for rank in range(size) if rank not in victims)
        slowest_s = 0.0
        for rank in left:
            ranks: tuple[int, ...] = ()
            while ranks != left:  # before the last kill the survivors may have gone on with more
                if not pipes[rank][0].poll(LIMIT_S):
                    return 0.0, [f"seed {seed}: rank {rank} did not go on with {left} after {victims} were killed"]
                at_s, ranks, total = pipes[rank][0].recv()
                if total != sum(ranks):
                    return 0.0, [f"seed {seed}: rank {rank} of {ranks} has {total}"]
            slowest_s = max(slowest_s, at_s - killed_s)
        return slowest_s, []
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


@click.command()
@click.option("--trials", default=100)
@click.option("--deaths", default=1)
@click.option("--seed", default=0)
@click.option("--on-lost", type=click.Choice(["raise", "continue"]), default="raise")
def main(trials: int, deaths: int, seed: int, on_lost: str) -> None:
    """Kill `deaths` of 8 ranks, `trials` times."""
    times_s, problems = [], []
    for number in range(seed, seed + trials):
        took_s, wrong = trial(number, deaths, on_lost=on_lost)
        times_s.append(took_s)
        problems += wrong
        for line in wrong:
            click.echo(line)
    times_s.sort()
    shown = ", ".join(
        f"{name} {1000 * times_s[int(at * (trials - 1))]:.0f} ms"
        for name, at in (("p50", 0.5), ("p99", 0.99), ("max", 1))
    )
    click.echo(f"{trials} trials, {deaths} of {RANKS} ranks killed: {shown}; {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
