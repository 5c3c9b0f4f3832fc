"""Programs that hang, or are slow, each in a way of its own: `hang_programs.py NAME` is one rank of one.

With `hang_programs.py NAME SECONDS` operations have that long, and the rank prints what they raise.

A comment `# NAME: who` marks the line at which a rank is found.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time

import numpy as np

import asyncdist as dist

LARGE = 4 << 20
STEP_S = 0.01


def own_store() -> dist.TCPStore:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), namespace="own", wait_for_workers=False
    )


async def never_calls(rank: int) -> None:
    if rank < 2:
        await dist.all_reduce(np.ones(4))  # never_calls: waits
    await asyncio.sleep(3600)  # never_calls: culprit


async def calls_something_else(rank: int) -> None:
    x = np.ones(4)
    if rank == 2:
        await dist.broadcast(x, 0)  # calls_something_else: culprit
    await dist.all_reduce(x)  # calls_something_else: waits


async def groups_in_different_order(rank: int) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 0:
        await first.all_reduce(np.ones(4))  # groups_in_different_order: rank 0
        await second.all_reduce(np.ones(4))
    elif rank == 1:
        await second.all_reduce(np.ones(4))  # groups_in_different_order: rank 1
        await first.all_reduce(np.ones(4))
    await dist.barrier()


async def sends_that_cross(rank: int) -> None:
    if rank < 2:
        await dist.send(np.ones(LARGE), 1 - rank)  # sends_that_cross: rank
        await dist.recv(np.ones(LARGE), 1 - rank)
    await dist.barrier()


async def tasks_that_wait_for_each_other(rank: int) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    store = own_store()
    if rank == 2:
        await dist.barrier()
        return

    async def reduces() -> None:
        if rank == 0:
            await first.all_reduce(np.ones(4))  # tasks_that_wait_for_each_other: rank 0
            await store.set("ready", b"")  # tasks_that_wait_for_each_other: key
        else:
            await store.get("ready")  # tasks_that_wait_for_each_other: rank 1
            await first.all_reduce(np.ones(4))

    async def gathers() -> None:
        await second.barrier()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reduces(), name="reduces")
        tasks.create_task(gathers(), name="gathers")
    await dist.barrier()


def _spin() -> bool:
    return all(number >= 0 for number in itertools.count())  # computes: culprit


async def computes(rank: int) -> None:
    if rank == 1:
        _spin()
    await dist.all_reduce(np.ones(4))  # computes: waits


async def sleeps(rank: int) -> None:
    if rank == 1:
        time.sleep(3600)  # noqa: ASYNC251  # sleeps: culprit
    await dist.all_reduce(np.ones(4))  # sleeps: waits


async def is_stopped(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # is_stopped: culprit
    await dist.all_reduce(np.ones(4))  # is_stopped: waits


async def is_killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await dist.all_reduce(np.ones(4))  # is_killed: waits


async def left_early(rank: int) -> None:
    if rank != 1:
        await dist.all_reduce(np.ones(4))  # left_early: waits


async def wrong_tag(rank: int) -> None:
    if rank == 0:
        await dist.recv(np.ones(4), 1, tag=5)  # wrong_tag: waits
    elif rank == 1:
        await dist.send(np.ones(4), 0, tag=6)  # wrong_tag: culprit
    await dist.barrier()  # wrong_tag: barrier


async def key_never_set(rank: int) -> None:
    if rank == 1:
        await own_store().get("config")  # key_never_set: culprit
    await dist.barrier()  # key_never_set: waits


async def two_roots(rank: int) -> None:
    root = 1 if rank == 2 else 0
    await dist.broadcast(np.ones(4), root)  # two_roots: all
    await dist.barrier()


async def is_slower(rank: int) -> None:
    for _ in range(100_000):
        time.sleep(STEP_S * (1.3 if rank == 1 else 1.0))  # noqa: ASYNC251
        await dist.all_reduce(np.ones(4))  # is_slower: all


async def main(program: str, timeout: float | None) -> None:
    async with dist.init_process_group() as group:
        group.set_timeout(timeout or 1800)
        await dist.barrier()
        print("begins", flush=True)
        try:
            await globals()[program](group.rank)
        except dist.DistError as error:  # what has failed is asked about before it ends
            if timeout is not None:
                print(error, flush=True)
            await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]) if sys.argv[2:] else None))
