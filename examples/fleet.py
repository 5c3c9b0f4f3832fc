"""A fleet: workers that come and go, and train one model with whoever is there.

    asyncdist run --nproc-per-node 4 examples/fleet.py

starts four workers that come one after the other; each goes after 100 steps. Without the launcher, workers meet at a
store daemon, in any number, at any time, on any host; Ctrl-C ends one after its step, and kill -9 harms no other:

    export ASYNCDIST_STORE=host0:29500
    python examples/fleet.py --name worker-7 --steps 100000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal

import numpy as np

import asyncdist as dist

LARGEST = 64
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


async def work(member: dist.Membership, steps: int, stop: asyncio.Event, pause_s: float) -> None:
    """Take part in one world after the other, for so many steps."""
    model = np.zeros(4)  # three weights, and the steps they have had
    worlds = member.worlds()
    async for world in worlds:
        if world.rank == 0:
            print(f"{', '.join(member.members)}: from step {int(model[3])} on", flush=True)
        with contextlib.suppress(dist.PeerLostError, dist.GroupAbortedError):
            await world.broadcast(model, 0)  # rank 0 has the model as long as anybody has
            last = False
            while not last:
                shared = np.append(gradient_of(model[:3], int(model[3]), world.rank, world.size), 0.0)
                shared[3] = bool(worlds.changing) or stop.is_set() or steps == 1
                await world.all_reduce(shared)
                model += [*(-RATE * shared[:3]), 1]  # a step that failed is not taken
                steps -= 1
                last = shared[3] > 0  # the same for all, so that all end their turns after the same step
                await asyncio.sleep(pause_s)
        if steps <= 0 or stop.is_set():
            print(f"{member.name} goes after step {int(model[3])}, weights: {model[:3].round(1)}", flush=True)
            return


async def main(options: argparse.Namespace) -> None:
    """Come, work and go."""
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    await asyncio.sleep(options.after)
    host, _, port = os.environ["ASYNCDIST_STORE"].rpartition(":")
    async with (
        dist.TCPStore(host, int(port)) as store,
        await store.join("training", 1, LARGEST, None, name=options.name, settle=0.2) as member,
    ):
        await work(member, options.steps, stop, options.pause)


if __name__ == "__main__":
    rank = int(os.environ.get("RANK", "0"))
    parser = argparse.ArgumentParser(description="Workers that come and go, and train one model.")
    parser.add_argument("--name", default=f"worker-{rank}", help="a worker that is started again keeps its name")
    parser.add_argument("--steps", type=int, default=100, help="after so many steps it goes (default 100)")
    parser.add_argument("--after", type=float, default=0.5 * rank, metavar="SECONDS", help="when it comes")
    parser.add_argument("--pause", type=float, default=0.02, metavar="SECONDS", help="after each step")
    dist.run(main(parser.parse_args()))
