"""Saving and loading a checkpoint, beside the same bytes written and read as plain files by as many processes.

    python -m bench.checkpoint --mib 1024 --writers 4 --readers 3 --folder /disk

Both kinds alternate. Written files are new, and on the disk when the time is taken (fsync); the system's cache forgets
them before they are read. What is loaded is compared with what was saved. Removing old files is in neither time.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

import asyncdist as dist
from asyncdist import checkpoint

PROMISED = 0.7
"""Of the plain files' rate."""


async def timed(group: dist.ProcessGroup, action: Callable[[], Any]) -> float:
    """Seconds until the slowest rank has done it."""
    await group.barrier()
    start = time.perf_counter()
    result = action()
    if result is not None:
        await result
    took = np.array([time.perf_counter() - start])
    await group.all_reduce(took, dist.ReduceOp.MAX)
    return float(took[0])


async def write(_local_rank: int, mib: int, folder: str, rounds: int) -> list[list[float]]:
    """One rank: seconds of each way to write, in turns."""
    arrays = {f"x{number}": np.full(mib << 14, number, np.float32) for number in range(16)}
    took: list[list[float]] = [[], []]
    async with dist.init_process_group() as group:
        share = np.ones((mib << 20) // group.size, np.uint8).data

        def plain() -> None:
            path = Path(folder, f"plain-{group.rank}")
            if path.exists():
                path.rename(path.with_name(f"old-{len(took[0])}-{group.rank}"))
            with path.open("wb", buffering=0) as file:
                for start in range(0, share.nbytes, 4 << 20):
                    file.write(share[start : start + (4 << 20)])
                os.fsync(file.fileno())

        for _ in range(rounds):
            took[0].append(await timed(group, plain))
            took[1].append(
                await timed(group, lambda: checkpoint.save(arrays, Path(folder, "saved"), keep=rounds, copy=False))
            )
    return took


def forget(folder: Path) -> None:
    """Let the system's cache forget all files."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


async def read(_local_rank: int, mib: int, folder: str, rounds: int) -> list[list[float]]:
    """One rank: seconds of each way to read all of it, in turns."""
    arrays = {f"x{number}": np.zeros(mib << 14, np.float32) for number in range(16)}
    room = np.zeros(mib << 20, np.uint8).data
    took: list[list[float]] = [[], []]
    async with dist.init_process_group() as group:

        def plain() -> None:
            start = 0
            for path in sorted(Path(folder).glob("plain-*")):
                with path.open("rb", buffering=0) as file:
                    while count := file.readinto(room[start : start + (4 << 20)]):
                        start += count

        for _ in range(rounds):
            forget(Path(folder))
            took[0].append(await timed(group, plain))
            forget(Path(folder))
            took[1].append(await timed(group, lambda: checkpoint.load(Path(folder, "saved"), arrays)))
    for number in range(16):
        assert (arrays[f"x{number}"] == number).all()
    return took


@click.command()
@click.option("--mib", default=1024, show_default=True)
@click.option("--writers", default=4, show_default=True)
@click.option("--readers", default=3, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--folder", type=click.Path(file_okay=False), help="Where; by default among temporary files.")
def command(mib: int, writers: int, readers: int, rounds: int, folder: str | None) -> None:
    """Measure, and exit with 1 if the promise is not kept."""
    place = tempfile.mkdtemp(dir=folder)
    kept = True
    try:
        for what, main, ranks in (("save", write, writers), ("load", read, readers)):
            plain, ours = dist.spawn(main, (mib, place, rounds), nprocs=ranks)[0]
            rates = [mib / 1024 / statistics.median(took) for took in (plain, ours)]
            ratio = statistics.median(p / o for p, o in zip(plain, ours, strict=True))
            kept &= ratio >= PROMISED
            click.echo(
                f"{what} {mib} MiB by {ranks} ranks: {rates[1]:.2f} GiB/s, plain files {rates[0]:.2f} GiB/s: "
                f"{ratio:.2f} of it (promised {PROMISED})"
            )
    finally:
        shutil.rmtree(place)
    raise SystemExit(not kept)


if __name__ == "__main__":
    command()
