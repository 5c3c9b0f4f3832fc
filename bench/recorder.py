"""``python -m bench.recorder``: what the recorder costs an operation.

Two processes do the same operations with the recorder on and off, in turns, so that whatever else the host does
meanwhile meets both. A figure is the median over the pairs of what a block of operations takes longer per operation.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from time import perf_counter
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import asyncdist as dist
from asyncdist.inspect.recorder import RECORDER

PROMISED_US = 0.5
PROMISED_SHARE = 0.02
CASES = (("all_reduce", 4), ("all_reduce", 64 << 10), ("send and recv", 4))
BLOCK = {"all_reduce": 1000, "send and recv": 5000}
"""Operations of a block: with 20 pairs, 100,000 messages on and as many off."""


async def _measure(pairs: int) -> list[tuple[list[float], list[float]]]:
    async with dist.init_process_group() as group:
        return [await _case(group, name, nbytes, pairs) for name, nbytes in CASES]


async def _all_reduces(group: dist.ProcessGroup, x: Any, count: int) -> None:
    for _ in range(count):
        await group.all_reduce(x, dist.ReduceOp.MAX)


async def _messages(group: dist.ProcessGroup, x: Any, count: int) -> None:
    for _ in range(count):
        await (group.send(x, 1) if group.rank == 0 else group.recv(x, 0))


async def _case(group: dist.ProcessGroup, name: str, nbytes: int, pairs: int) -> tuple[list[float], list[float]]:
    x = np.ones(nbytes // 4, np.float32)
    operations = _all_reduces if name == "all_reduce" else _messages
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * (pairs + 1)):
        RECORDER.on = number % 2 == 0
        await group.barrier()
        start_s = perf_counter()
        await operations(group, x, BLOCK[name])
        await group.barrier()
        if number > 1:
            found[number % 2].append((perf_counter() - start_s) / BLOCK[name] * 1e6)
    RECORDER.on = True
    return found


def _rank(_local_rank: int, pairs: int, transport: str) -> list[tuple[list[float], list[float]]]:
    os.environ["ASYNCDIST_TRANSPORT"] = transport
    return asyncio.run(_measure(pairs))


@click.command()
@click.option("--pairs", type=click.IntRange(min=1), default=20, help="Blocks with and without it.")
@click.option("--judge", is_flag=True, help="Fail above what is promised: 0.5 us, or 2 %.")
def main(pairs: int, judge: bool) -> None:
    """Print the time of operations with and without the recorder, for each transport."""
    table = Table("operation", "transport", "off us", "on us", "median of the differences", "promised")
    late = []
    for transport in ("shm", "tcp"):
        results: Any = dist.spawn(_rank, (pairs, transport), nprocs=2)
        for (name, nbytes), (on, off) in zip(CASES, results[0], strict=True):
            more = statistics.median(one - other for one, other in zip(on, off, strict=True))
            allowed = max(PROMISED_US, PROMISED_SHARE * min(off))
            label = f"{name} {nbytes} B"
            best = f"{min(off):.2f}", f"{min(on):.2f}"
            table.add_row(label, transport, *best, f"{more:+.2f} us", f"<= {allowed:.2f} us")
            if more > allowed:
                late.append(f"{label} by {transport}: {more:.2f} us")
    Console(width=120).print(table)
    if judge and late:
        raise click.ClickException("; ".join(late))


if __name__ == "__main__":
    main()
