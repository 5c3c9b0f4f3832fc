"""One rank on one device: what awaiting adds to the library's call, beside torch and cupyx in the same process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

import asyncdist as dist
from asyncdist import HashStore
from bench.gpu import Gpu
from bench.lateness import Lateness, share
from bench.nccl_figures import Note
from bench.runner import unused_port

__all__ = ["NEIGHBORS", "measure_beside", "measure_stall"]

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
        note("stall", seconds=share(watched.stop(), 0.99), idle_s=share(idle_s, 0.99))
