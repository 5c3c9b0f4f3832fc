"""``python -m bench.nccl``: GPU arrays, beside cupy's bare call, torch.distributed and cupyx on the same device.

One rank shows what awaiting adds to the library's call; two ranks on one device compare the paths. Each part can be
measured alone, as `bench.gpu_proof` does: a library that hangs or crashes then costs one part.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

import asyncdist as dist
from asyncdist import HashStore
from bench.gpu import Gpu, NoGpuError, open_gpu
from bench.gpu_proof import LIMIT_VARIABLE
from bench.nccl_figures import IPC_BYTES, TORCH_BYTES, Figures, Note, nccl_table, notes_to, versions
from bench.nccl_ranks import SHARING, measure_ranks
from bench.runner import unused_port
from bench.stall import Lateness, late_share

__all__ = ["NEIGHBORS", "PARTS", "main", "measure_beside", "measure_stall"]

SIZES: Final = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, TORCH_BYTES, IPC_BYTES)

SMOKE_SIZES: Final = (4, 1 << 12)

SAMPLES: Final = 1000

SMOKE_SAMPLES: Final = 5

PATH_SAMPLES: Final = 30

LIMIT_S: Final = 70.0
"""Of a part. Libraries may hang on a shared device; a benchmark may not."""

STOP_S: Final = 10.0
"""How much sooner than the part itself its ranks are stopped, so that it can still say what they have measured."""


ROUNDS: Final = 5
"""Candidates take turns this often, so that a change of clock rates hits all of them."""

FEW: Final = 8
"""Sizes above a mebibyte have so many times fewer samples."""

KERNEL_S: Final = 1e-3
"""How long the operations take during which the loop is watched."""

Once = Callable[[], Awaitable[None]]

Closing = list[Callable[[], object]]
"""What ends the neighbor, last first."""


def measure_beside(gpu: Gpu, neighbor: str, sizes: tuple[int, ...], samples: int, note: Note) -> None:
    """Note asyncdist's time and the neighbor's, size by size, or why the neighbor cannot be measured."""
    closing: Closing = []
    try:
        dist.run(_beside(gpu, neighbor, sizes, samples, note, closing))
    finally:
        while closing:
            closing.pop()()


async def _beside(gpu: Gpu, neighbor: str, sizes: tuple[int, ...], samples: int, note: Note, closing: Closing) -> None:
    async with dist.init_process_group(store=HashStore(), rank=0, world_size=1):
        for nbytes in sizes:
            count = max(1, nbytes // 4)
            x, y = gpu.full(count, 1), gpu.full(count, 0)
            try:
                theirs = NEIGHBORS[neighbor](gpu, x, y, count, closing)
            except Exception as error:  # not installed, or does not work here
                note("missing", name=neighbor, why=f"{type(error).__name__}: {error}".splitlines()[0][:200])
                return
            candidates: dict[str, Once] = {"asyncdist": lambda x=x: _ours(x), neighbor: theirs}  # type: ignore[misc]
            few = samples if nbytes <= 1 << 20 else max(ROUNDS, samples // FEW)
            note("beside", name=neighbor, nbytes=nbytes, seconds=await _compare(candidates, few))


async def _compare(candidates: dict[str, Once], samples: int) -> dict[str, float]:
    """The median of each candidate, the candidates taking turns."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, once in candidates.items():
            for warm in range(2 + max(1, samples // ROUNDS)):
                start = time.perf_counter()
                await once()
                if warm >= 2:
                    times[name].append(time.perf_counter() - start)
    return {name: sorted(taken)[len(taken) // 2] for name, taken in times.items()}


async def _ours(x: Any) -> None:
    await dist.all_reduce(x)


def _bare(gpu: Gpu, x: Any, y: Any, count: int, closing: Closing) -> Once:
    """The binding's own call and an event that is waited for, as short as it can be written."""
    if gpu.fake:
        return _bare_fake(gpu, x, count)
    import cupy
    from cupy.cuda import nccl

    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    event = cupy.cuda.Event(disable_timing=True)
    pointer = x.data.ptr
    closing.append(communicator.destroy)

    async def once() -> None:
        communicator.allReduce(pointer, pointer, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
        event.record(stream)
        event.synchronize()

    return once


def _bare_fake(gpu: Gpu, x: Any, count: int) -> Once:
    assert gpu.provider.nccl is not None
    communicator = gpu.provider.nccl.open(1, gpu.provider.nccl.unique_id(), 0, gpu.device)
    stream, event = gpu.runtime.new_stream(gpu.device), gpu.runtime.new_event(gpu.device)

    async def once() -> None:
        communicator.all_reduce(x.data.ptr, x.data.ptr, count, np.dtype(np.float32), dist.ReduceOp.SUM, stream)
        event.record(stream)
        event.synchronize()

    return once


def _torch(gpu: Gpu, x: Any, y: Any, count: int, closing: Closing) -> Once:
    if gpu.fake and find_spec("torch"):  # known without the seconds that it takes to load
        raise RuntimeError("torch sees no device")
    import torch
    import torch.distributed as torch_dist

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no device")
    if not torch_dist.is_initialized():
        torch_dist.init_process_group("nccl", store=torch_dist.HashStore(), rank=0, world_size=1)
        closing.append(torch_dist.destroy_process_group)
    tensor = torch.ones(count, device=f"cuda:{gpu.device}")

    async def once() -> None:
        torch_dist.all_reduce(tensor, async_op=True).wait()
        torch.cuda.synchronize()

    return once


_cupyx_backend: list[Any] = []


def _cupyx(gpu: Gpu, x: Any, y: Any, count: int, closing: Closing) -> Once:
    if gpu.fake:
        raise RuntimeError("cupyx has no fake device")
    import cupy
    from cupyx.distributed import init_process_group

    if not _cupyx_backend:
        _cupyx_backend.append(init_process_group(1, 0, port=unused_port()))
        closing.append(_cupyx_backend[0].stop)
    stream = cupy.cuda.get_current_stream()

    async def once() -> None:
        _cupyx_backend[0].all_reduce(x, y)
        stream.synchronize()

    return once


NEIGHBORS: Final[dict[str, Callable[[Gpu, Any, Any, int, Closing], Once]]] = {
    "bare": _bare,
    "torch": _torch,
    "cupyx": _cupyx,
}
"""Each makes what performs one operation, given two arrays of so many floats. `bare` is cupy's own call."""


def measure_stall(gpu: Gpu, samples: int, note: Note) -> None:
    """Note how late, 99 times of 100, the loop calls back while operations of a millisecond are awaited."""
    dist.run(_stall(gpu, samples, note))


async def _stall(gpu: Gpu, samples: int, note: Note) -> None:
    async with dist.init_process_group(store=HashStore(), rank=0, world_size=1):
        x = gpu.full(1 << 16, 1)
        await dist.all_reduce(x)
        gpu.spin(0.0)
        gpu.synchronize()
        idle = Lateness()
        idle.start()
        await asyncio.sleep(samples * KERNEL_S)
        idle_s = idle.stop()
        watched = Lateness()
        watched.start()
        for _ in range(samples):
            gpu.spin(KERNEL_S)
            await dist.all_reduce(x)
        note("stall", seconds=late_share(watched.stop(), 0.99), idle_s=late_share(idle_s, 0.99))


PATHS: Final[dict[str, dict[str, str]]] = {
    "ipc": {"ASYNCDIST_CUDA_PATH": "ipc"},
    "staged": {"ASYNCDIST_CUDA_PATH": "staged"},
    **{f"nccl ({name})": {"ASYNCDIST_CUDA_PATH": "nccl", **environ} for name, environ in SHARING.items()},
}

TOGETHER: Final = {f"nccl beside torch ({name})": name for name in SHARING}

PARTS: Final = (*NEIGHBORS, "stall", "copy", *PATHS, *TOGETHER)
"""Parts by name: one rank beside a neighbor, the event loop, a copy within the device, two ranks on each path, and two
on NCCL's beside torch."""

NEEDED: Final = ("bare", "ipc", "staged")
"""What must work wherever there is a device; the others are neighbors, and ways that NCCL may refuse."""


@click.command()
@click.option("--smoke", is_flag=True, help="Only see that it runs.")
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Only these; all by default.")
@click.option("--figures", "file", type=click.Path(path_type=Path), help="Append what is measured, as JSON lines.")
@click.option("--limit-s", default=LIMIT_S, envvar=LIMIT_VARIABLE, help="Seconds for the ranks of one part.")
def main(smoke: bool, parts: tuple[str, ...], file: Path | None, limit_s: float) -> None:
    """Measure GPU arrays on this machine's first device."""
    figures = Figures()
    write = notes_to(file) if file is not None else None

    def note(kind: str, **fields: Any) -> None:
        figures.take({"kind": kind, **fields})
        if write is not None:
            write(kind, **fields)

    for part in parts or PARTS:
        try:
            _measure(part, smoke, max(limit_s - STOP_S, STOP_S), note)
        except NoGpuError as error:
            click.echo(f"no figures: {error}", err=True)
            sys.exit(1)
    for neighbor, by_size in figures.beside.items():
        for name in ("asyncdist", neighbor):
            table = nccl_table({nbytes: by_name[name] for nbytes, by_name in by_size.items()}, 1)
            click.echo(
                f"# {name}, one rank, taking turns with {'asyncdist' if name == neighbor else neighbor}\n{table}\n"
            )
    for name, seconds in figures.paths.items():
        click.echo(f"# path {name}, 2 ranks on one device\n{nccl_table(seconds, 2)}\n")
    for name, why in {**figures.missing, **figures.problems}.items():
        click.echo(f"# {name}: {why}")
    sys.exit(any(name in NEEDED for name in (*figures.missing, *figures.problems)))


def _measure(part: str, smoke: bool, limit_s: float, note: Note) -> None:
    sizes, samples = (SMOKE_SIZES, SMOKE_SAMPLES) if smoke else (SIZES, SAMPLES)
    path_samples = 2 if smoke else PATH_SAMPLES
    if part in PATHS:
        seconds, problem = measure_ranks(2, sizes, path_samples, PATHS[part], limit_s)
        for nbytes, taken in seconds.items():
            note("path", name=part, nbytes=nbytes, seconds=taken["asyncdist"])
        if problem:
            note("problem", name=part, why=problem)
        return
    if part in TOGETHER:
        way = TOGETHER[part]
        compared = [nbytes for nbytes in sizes if nbytes <= TORCH_BYTES]
        seconds, problem = measure_ranks(2, compared, path_samples, PATHS[f"nccl ({way})"], limit_s, torch=True)
        for nbytes, taken in seconds.items():
            note("together", name=way, nbytes=nbytes, seconds=taken)
        if problem:
            note("problem", name=part, why=problem)
        return
    with open_gpu(0) as gpu:
        note("about", values=versions(gpu))
        single: dict[str, Callable[[Gpu], None]] = {
            "stall": lambda gpu: measure_stall(gpu, samples, note),
            "copy": lambda gpu: note("copy", bytes_per_s=gpu.copy_bandwidth(sizes[-1], path_samples)),
        }
        if part in single:
            single[part](gpu)
        else:
            measure_beside(gpu, part, sizes, samples, note)


if __name__ == "__main__":
    main()
