"""Counts the Python calls of a warm operation, the files they are in, and how often they change file.

    python tests/tools/hops.py                          # all_reduce of 4 B and 64 MiB, shm and TCP, and a message
    python tests/tools/hops.py --most 44,70,101,63      # fail above so many calls: 4 B shm, TCP, a message, blocking

Two ranks run each operation many times, and rank 0 counts one at a time: the fewest of all tries are told, of each
figure, as a rank that waits looks around meanwhile. Only files of asyncdist count. The figures need no clock, so they
show what a change costs on a busy machine, too.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import asyncdist as dist
from asyncdist import blocking

PACKAGE = str(Path(dist.__file__).parent)
TRIES, TRIES_OF_LONG = 60, 30
CASES = (
    "all_reduce 4 B shm",
    "all_reduce 4 B tcp",
    "send and recv 4 B shm",
    "blocking all_reduce 4 B shm",
    "all_reduce 64 MiB shm",
    "all_reduce 64 MiB tcp",
)


class Hops(NamedTuple):
    """Of one operation."""

    calls: int
    files: int
    changes: int


class Counter:
    """A profile function that keeps the file of each call in asyncdist."""

    def __init__(self) -> None:
        self.path: list[str] = []

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.path.append(frame.f_code.co_filename)

    def hops(self) -> Hops:
        """Return what was counted."""
        changes = sum(one != other for one, other in zip(self.path, self.path[1:], strict=False))
        return Hops(len(self.path), len(set(self.path)), changes)


async def _counted(operation: Callable[[], Awaitable[object]]) -> Hops:
    counter = Counter()
    sys.setprofile(counter)
    try:
        await operation()
    finally:
        sys.setprofile(None)
    return counter.hops()


async def _measure(case: str, rank: int) -> Hops:
    nbytes = 64 << 20 if "MiB" in case else 4
    x = np.ones(nbytes // 4, np.float32)
    other = 1 - rank

    async def all_reduce() -> None:
        await dist.all_reduce(x)

    async def exchange() -> None:
        if rank == 0:
            await dist.send(x, other)
            await dist.recv(x, other)
        else:
            await dist.recv(x, other)
            await dist.send(x, other)

    operation = all_reduce if case.startswith("all_reduce") else exchange
    async with dist.init_process_group():
        for _ in range(3):
            await operation()
        found = []
        for _ in range(TRIES_OF_LONG if "MiB" in case else TRIES):
            await dist.barrier()
            found.append(await _counted(operation) if rank == 0 else await _plain(operation))
        return Hops(*map(min, zip(*found, strict=True)))


def _measure_blocking() -> Hops:
    x, found = np.ones(1, np.float32), []
    with blocking.init_process_group():
        for _ in range(3 + TRIES):
            blocking.barrier()
            counter = Counter()
            sys.setprofile(counter)  # of this thread
            blocking.all_reduce(x)
            sys.setprofile(None)
            found.append(counter.hops())
    return Hops(*map(min, zip(*found, strict=True)))


async def _plain(operation: Callable[[], Awaitable[object]]) -> Hops:
    await operation()
    return Hops(0, 0, 0)


def _rank(case: str, rank: int, port: int, results: SimpleQueue[Any]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", ASYNCDIST_TRANSPORT=case.split()[-1])
    hops = _measure_blocking() if case.startswith("blocking") else asyncio.run(_measure(case, rank))
    if rank == 0:
        results.put(hops)


def measure(case: str) -> Hops:
    """Run two ranks of a case and return what rank 0 counted."""
    context = get_context("spawn")
    results: SimpleQueue[Any] = context.SimpleQueue()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(case, rank, port, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    hops = results.get()
    for process in ranks:
        process.join(60)
    return Hops(*hops)


@click.command()
@click.option("--most", default="", help="Most calls of the first cases, with commas.")
def main(most: str) -> None:
    """Print calls, files and changes of file of each case."""
    limits = [int(part) for part in most.split(",") if part]
    table = Table("operation", "calls", "files", "changes of file")
    above = []
    for number, case in enumerate(CASES):
        hops = measure(case)
        table.add_row(case, str(hops.calls), str(hops.files), str(hops.changes))
        if number < len(limits) and hops.calls > limits[number]:
            above.append(f"{case}: {hops.calls} calls, at most {limits[number]}")
    Console().print(table)
    if above:
        raise click.ClickException("; ".join(above))


if __name__ == "__main__":
    main()
