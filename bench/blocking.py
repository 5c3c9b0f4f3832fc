"""``python -m bench.blocking``: operations that wait, as plain scripts call them, beside awaited ones and gloo's.

Two ranks on one host, in processes of their own; the candidates take turns, `--runs` times. A figure is the median of
the runs' best batches. gloo's is there where torch is. Ratios within one run tell most: of `blocking` to `awaited`, and
of `gloo` to `blocking`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.candidates import missing_torch

Operations = Mapping[str, tuple[Callable[[], Any], int]]
"""What starts each operation, and how many are timed together."""

SIZES: Final = {"4 B": (4, 200), "64 KiB": (1 << 16, 100), "1 MiB": (1 << 20, 20), "64 MiB": (1 << 26, 2)}
BATCHES: Final = 12


def _operations(dist: Any, rank: int, array: Callable[[int], Any]) -> dict[str, tuple[Callable[[], Any], int]]:
    found: dict[str, tuple[Callable[[], Any], int]] = {}
    for name, (nbytes, count) in SIZES.items():
        found[f"all_reduce {name}"] = partial(dist.all_reduce, array(nbytes)), count
    found["barrier"] = dist.barrier, 200
    x = array(4)
    found["send or recv 4 B"] = (lambda: _message(dist, x, rank)), 200
    return found


def _message(dist: Any, x: Any, rank: int) -> Any:
    """Rank 0 sends in every other call and receives in those between; rank 1 the other way round."""
    _message.calls += 1  # type: ignore[attr-defined]
    sends = (_message.calls + rank) % 2  # type: ignore[attr-defined]
    return dist.send(x, 1 - rank) if sends else dist.recv(x, 1 - rank)


_message.calls = 0  # type: ignore[attr-defined]


def _waiting(operations: Operations, barrier: Callable[[], Any]) -> dict[str, float]:
    best: dict[str, float] = {}
    for name, (start, count) in operations.items():
        times: list[float] = []
        for _ in range(BATCHES):
            barrier()
            began_s = time.perf_counter()
            for _ in range(count):
                start()
            times.append((time.perf_counter() - began_s) / count)
        best[name] = min(times)
    return best


async def _awaiting(operations: Operations, barrier: Callable[[], Awaitable[Any]]) -> dict[str, float]:
    best: dict[str, float] = {}
    for name, (start, count) in operations.items():
        times: list[float] = []
        for _ in range(BATCHES):
            await barrier()
            began_s = time.perf_counter()
            for _ in range(count):
                await start()
            times.append((time.perf_counter() - began_s) / count)
        best[name] = min(times)
    return best


def _array(nbytes: int) -> Any:
    return np.zeros(nbytes // 4, np.float32)


def _blocking(rank: int, address: str) -> dict[str, float]:
    dist = importlib.import_module("asyncdist.blocking")
    host, port = address.split(":")
    with (
        dist.TCPStore(host, int(port), is_master=False) as store,
        dist.init_process_group(store=store, rank=rank, world_size=2),
    ):
        store.set("key", "value")
        operations = _operations(dist, rank, _array)
        x = _array(4)
        operations["async_op, then wait, 4 B"] = (lambda: dist.all_reduce(x, async_op=True).wait()), 200
        return _waiting({**operations, "store.get": (lambda: store.get("key"), 200)}, dist.barrier)


def _awaited(rank: int, address: str) -> dict[str, float]:
    dist = importlib.import_module("asyncdist")

    async def main() -> dict[str, float]:
        host, port = address.split(":")
        async with (
            dist.TCPStore(host, int(port), is_master=False) as store,
            dist.init_process_group(store=store, rank=rank, world_size=2),
        ):
            await store.set("key", "value")
            operations = {**_operations(dist, rank, _array), "store.get": (lambda: store.get("key"), 200)}
            return await _awaiting(operations, dist.barrier)

    found: dict[str, float] = dist.run(main())
    return found


def _gloo(rank: int, address: str) -> dict[str, float]:
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    meeting = f"file://{tempfile.gettempdir()}/gloo-{address}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    try:
        return _waiting(_operations(dist, rank, lambda nbytes: torch.zeros(nbytes // 4)), dist.barrier)
    finally:
        dist.destroy_process_group()


CANDIDATES: Final = {"awaited": _awaited, "blocking": _blocking, "gloo": _gloo}


def _rank(name: str, rank: int, address: str, results: Any) -> None:
    figures = CANDIDATES[name](rank, address)
    if rank == 0:
        results.put(figures)


def _daemon(ports: Any) -> None:
    with importlib.import_module("asyncdist.blocking").TCPStore("127.0.0.1", 0, is_master=True) as store:
        ports.put(store.port)
        threading.Event().wait()


def _run(name: str) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    results, ports = spawn.Queue(), spawn.Queue()
    daemon = spawn.Process(target=_daemon, args=(ports,), daemon=True)
    daemon.start()
    address = f"127.0.0.1:{ports.get(timeout=30)}"
    ranks = [spawn.Process(target=_rank, args=(name, rank, address, results), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    figures: dict[str, float] = results.get(timeout=120)
    for process in ranks:
        process.join()
    daemon.terminate()
    daemon.join()
    return figures


@click.command()
@click.option("--runs", default=3, show_default=True, help="How often each candidate runs.")
def main(runs: int) -> None:
    """Time operations that wait, beside awaited ones and gloo's."""
    names = [name for name in CANDIDATES if name != "gloo" or not missing_torch()]
    measured = [{name: _run(name) for name in names} for _ in range(runs)]
    table = Table("operation", *(f"{name} (us)" for name in names), "blocking / awaited", "gloo / blocking")
    for operation in measured[0]["blocking"]:
        medians = {
            name: statistics.median(run[name][operation] for run in measured)
            for name in names
            if operation in measured[0][name]
        }
        own = medians["blocking"]
        table.add_row(
            operation,
            *(f"{medians[name] * 1e6:,.1f}" if name in medians else "" for name in names),
            f"{own / medians['awaited']:.2f}" if "awaited" in medians else "",
            f"{medians['gloo'] / own:.1f}" if "gloo" in medians else "",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
