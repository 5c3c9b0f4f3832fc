"""What the mpi backend costs beside bare MPI, in the same processes: latency of an `await`, and what idling takes.

    mpirun -n 2 python -m bench.mpi
    mpirun -n 4 python -m bench.mpi --samples 500

Each sample is one operation after a barrier of MPI, and its time that of the slowest rank. Samples of `await` and of
the bare nonblocking call with `Wait` alternate; `added` is the median of the differences. Idling is measured as the
processor time of a rank, of all its threads: while nothing is under way, and while a receive waits in vain.
"""

from __future__ import annotations

import asyncio
import importlib
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import click
import numpy as np

import asyncdist as dist

SIZES = (4, 1 << 10, 1 << 16, 1 << 20, 1 << 24)
PROMISED_US = 40.0
"""What an `await` may add to a small operation."""
PROMISED_IDLE = 0.02
"""Of a core, while nothing is under way."""

Operation = Callable[[], Awaitable[object]]


class Bench:
    """One rank."""

    def __init__(self, group: dist.ProcessGroup, samples: int) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD.Dup()
        self._group = group
        self._samples = samples
        if group.rank == 0:
            version = self._mpi.Get_library_version().splitlines()[0]
            click.echo(f"{version}; {group.size} ranks; {samples} samples; microseconds, median")
            click.echo(f"{'operation':<12}{'bytes':>10}{'await':>12}{'bare':>12}{'added':>12}")

    async def all_reduce(self, nbytes: int) -> float:
        """Return what `await` adds to MPI's all_reduce, in microseconds."""
        x, y = np.zeros(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
        request = self._mpi.IN_PLACE

        async def bare() -> None:
            self._comm.Iallreduce(request, y).Wait()

        return await self._compare("all_reduce", nbytes, lambda: self._group.all_reduce(x), bare)

    async def ping_pong(self, nbytes: int) -> float:
        """Return what `await` adds to a message and its answer between ranks 0 and 1, in microseconds."""
        x, comm, rank = np.zeros(nbytes, np.uint8), self._comm, self._group.rank

        async def ours() -> None:
            if rank == 0:
                await self._group.send(x, 1)
                await self._group.recv(x, 1)
            elif rank == 1:
                await self._group.recv(x, 0)
                await self._group.send(x, 0)

        async def bare() -> None:
            if rank == 0:
                comm.Isend(x, 1).Wait()
                comm.Irecv(x, 1).Wait()
            elif rank == 1:
                comm.Irecv(x, 0).Wait()
                comm.Isend(x, 0).Wait()

        return await self._compare("ping-pong", nbytes, ours, bare)

    async def idle(self, seconds: float) -> tuple[float, float]:
        """Return the share of a core that this rank takes while nothing is under way, and while a receive waits."""
        self._comm.Barrier()
        alone = await self._share(seconds)
        receive = self._group.irecv(np.empty(1), (self._group.rank + 1) % self._group.size, tag=1)
        waiting = await self._share(seconds)
        receive.cancel()
        return self._slowest(alone), self._slowest(waiting)

    async def _share(self, seconds: float) -> float:
        await asyncio.sleep(0.1)
        began_s, busy_s = time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        return (time.process_time() - busy_s) / (time.perf_counter() - began_s)

    async def _compare(self, name: str, nbytes: int, ours: Operation, bare: Operation) -> float:
        count = max(20, min(self._samples, (1 << 27) // nbytes))
        ours_us, bare_us = [], []
        for number in range(count + 10):
            one, other = await self._sample(ours), await self._sample(bare)
            if number >= 10:  # warm
                ours_us.append(one)
                bare_us.append(other)
        added = statistics.median(one - other for one, other in zip(ours_us, bare_us, strict=True))
        if self._group.rank == 0:
            figures = statistics.median(ours_us), statistics.median(bare_us), added
            click.echo(f"{name:<12}{nbytes:>10}" + "".join(f"{figure:>12.1f}" for figure in figures))
        return added

    async def _sample(self, operation: Operation) -> float:
        self._comm.Barrier()
        began_s = time.perf_counter()
        await operation()
        return self._slowest((time.perf_counter() - began_s) * 1e6)

    def _slowest(self, figure: float) -> float:
        return float(self._comm.allreduce(figure, self._mpi.MAX))


async def measure(samples: int, seconds: float) -> bool:
    """Measure on this rank; whether what was promised holds."""
    async with dist.init_process_group("mpi") as group:
        bench = Bench(group, samples)
        added = [await bench.all_reduce(nbytes) for nbytes in SIZES]
        if group.size > 1:
            added += [await bench.ping_pong(nbytes) for nbytes in SIZES]
        alone, waiting = await bench.idle(seconds)
        small = added[:2]
        holds = max(small) <= PROMISED_US and alone <= PROMISED_IDLE
        if group.rank == 0:
            click.echo(f"a core while nothing is under way: {alone:.2%}; while a receive waits: {waiting:.2%}")
            click.echo(
                f"promised: {PROMISED_US:g} us added to an all_reduce of up to 1 KiB, {PROMISED_IDLE:.0%} of a core: "
                f"{'held' if holds else 'MISSED'}"
            )
    return holds


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--samples", default=300, show_default=True, help="Of each small operation.")
@click.option("--seconds", default=5.0, show_default=True, help="To idle.")
def main(samples: int, seconds: float) -> None:
    """See the module."""
    if not dist.run(measure(samples, seconds)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
