"""Call soak: callers are cancelled, a callee is killed; each call ends once, and nothing is left of any.

python tests/soak/rpc_soak.py --calls 100000
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import click
import numpy as np
import psutil
from jobs import free_port

import asyncdist as dist
from asyncdist import rpc

CALLEES = (1, 2, 3)
KILLED = 3
AT_A_TIME = 500
CANCELLED = 0.05
GROWTH_BYTES = 32 << 20
"""Memory that a rank may have more at the end than after the first tenth: allocators keep what a burst has needed."""
GROWTH_OBJECTS = 1000
"""The same of Python's objects, which are counted."""
UNDER_WAY = ("calls issued", "calls waiting", "calls running", "objects", "tasks", "sends")
FORK = multiprocessing.get_context("fork")


@rpc.register
def soak_echo(value: Any) -> Any:
    return value


@rpc.register
async def soak_sleep(seconds: float, value: Any) -> Any:
    await asyncio.sleep(seconds)
    return value


@rpc.register
async def soak_count(limit: int) -> Any:
    for number in range(limit):
        yield number


@rpc.register
class SoakKept:
    def get(self, value: Any) -> Any:
        return value


@rpc.register
def soak_die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@rpc.register
def soak_left() -> dict[str, int]:
    """What this rank has under way beside this call, and its memory."""
    gc.collect()
    memory = {"bytes": psutil.Process().memory_info().rss, "python objects": len(gc.get_objects())}
    return rpc.statistics() | {"all tasks": len(asyncio.all_tasks())} | memory


async def echo(rank: int, value: int) -> Any:
    return await rpc.call(rank, "soak_echo", value)


async def sleep(rank: int, value: int) -> Any:
    return await rpc.call(rank, "soak_sleep", value % 10 * 1e-3, value)


async def send_much(rank: int, value: int) -> Any:
    array = await rpc.call(rank, "soak_echo", np.full(100_000, value, np.int32))
    return int(array[-1]) if (array == value).all() else -1


async def keep(rank: int, value: int) -> Any:
    kept = await rpc.create(rank, "SoakKept")  # released as it becomes garbage
    return await kept.call("get", value)


async def count(rank: int, value: int) -> Any:
    last = -1
    async for number in rpc.stream(rank, "soak_count", 20):
        last = number
    return value + last - 19


KINDS: tuple[Callable[[int, int], Awaitable[Any]], ...] = (*[echo] * 12, *[sleep] * 4, send_much, keep, keep, count)


async def call_all(calls: int, seed: int) -> tuple[Counter[str], list[dict[str, int]]]:
    """Issue the calls; how they ended, and what each rank that is left has under way and keeps."""
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    before: list[dict[str, int]] = []
    for first in range(0, calls, AT_A_TIME):
        if first >= calls // 10 and not before:
            before = await left()
        tasks = []
        for number in range(first, min(first + AT_A_TIME, calls)):
            task = asyncio.ensure_future(rng.choice(KINDS)(rng.choice(CALLEES), number))
            task.add_done_callback(partial(_count, ends, number))
            if rng.random() < CANCELLED:
                asyncio.get_running_loop().call_later(rng.choice((0, 1e-4, 1e-3, 1e-2)), task.cancel)
            tasks.append(task)
        if first <= calls // 2 < first + AT_A_TIME:
            asyncio.get_running_loop().call_soon(rpc.call, KILLED, "soak_die")
        async with asyncio.timeout(60):
            await asyncio.wait(tasks)
        del task, tasks  # whose exceptions hold their frames, and so references
    after = await left()
    assert ends.total() == calls, f"{calls} calls have ended {ends.total()} times: {ends}"
    assert not ends["wrong"], ends
    for rank, (early, late) in enumerate(zip(before, after, strict=True)):
        for what, most in (("bytes", GROWTH_BYTES), ("python objects", GROWTH_OBJECTS)):
            grown = late[what] - early[what]
            assert grown <= most, f"rank {rank} has {grown} {what} more than before"
    return ends, after


def _count(ends: Counter[str], number: int, task: asyncio.Future[Any]) -> None:
    ends[_end_of(task, number)] += 1


def _end_of(task: asyncio.Future[Any], number: int) -> str:
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    if error is None:
        return "done" if task.result() == number else "wrong"
    return "lost" if isinstance(error, dist.PeerLostError) and error.rank == KILLED else "wrong"


async def left() -> list[dict[str, int]]:
    """Of the ranks that live to the end, once what was cancelled is over there."""
    for _ in range(1000):
        found = [soak_left(), *[await rpc.call(rank, "soak_left") for rank in CALLEES if rank != KILLED]]
        if not any(one[name] for one in found for name in UNDER_WAY):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"still under way or kept: {found}")


def run_rank(rank: int, port: int, calls: int, seed: int, tell: Connection) -> None:
    """One rank; rank 0 calls, and tells the parent how it ended."""
    size = str(1 + len(CALLEES))
    os.environ.update(RANK=str(rank), WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    async def main() -> None:
        async with dist.init_process_group(), rpc.serve():
            if rank == 0:
                tell.send(await call_all(calls, seed))

    dist.run(main())


def check(calls: int, seed: int) -> Counter[str]:
    """Run it all; how the calls ended."""
    hear, tell = FORK.Pipe(duplex=False)
    port = free_port()
    ranks = [FORK.Process(target=run_rank, args=(rank, port, calls, seed, tell)) for rank in range(1 + len(CALLEES))]
    for process in ranks:
        process.start()
    tell.close()
    for process in ranks:
        process.join(60 + calls / 200)
        process.kill()
    codes = [process.exitcode for process in ranks]
    assert codes == [-signal.SIGKILL if rank == KILLED else 0 for rank in range(len(ranks))], codes
    ends, after = hear.recv()
    tasks = {one["all tasks"] for one in after[1:]}
    assert len(tasks) == 1, f"tasks are left on some rank: {after}"
    found: Counter[str] = ends
    return found


@click.command()
@click.option("--calls", default=100_000, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(calls: int, seed: int) -> None:
    """Call, cancel and kill; exits with an error if a call ends twice or never, or something is left."""
    click.echo(f"{calls} calls: {dict(check(calls, seed))}, and nothing is left")


if __name__ == "__main__":
    main()
