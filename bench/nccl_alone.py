"""One rank on one device: what awaiting adds to the library's call, beside torch and cupyx in the same process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

import asyncdist as dist
from asyncdist import HashStore
from bench.gpu import Gpu

__all__ = ["Alone", "measure_alone"]

ROUNDS: Final = 5
"""Candidates take turns this often, so that a change of clock rates hits all of them."""

TICK_S: Final = 0.001

Once = Callable[[], Awaitable[None]]


@dataclass
class Alone:
    """Median seconds of all_reduce with one rank, by size in bytes and candidate; the rest in seconds."""

    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    overhead_s: float = 0.0
    stall_s: float = 0.0


def measure_alone(gpu: Gpu, sizes: tuple[int, ...], samples: int) -> Alone:
    """Measure; candidates that are not installed are said to be missing."""
    return dist.run(_measure(gpu, sizes, samples))


async def _measure(gpu: Gpu, sizes: tuple[int, ...], samples: int) -> Alone:
    result = Alone()
    async with dist.init_process_group(store=HashStore(), rank=0, world_size=1):
        for nbytes in sizes:
            count = max(1, nbytes // 4)
            x, y = gpu.full(count, 1), gpu.full(count, 0)
            candidates: dict[str, Once] = {"asyncdist": lambda x=x: _ours(x)}  # type: ignore[misc]
            for name, make in (("bare", _bare), ("torch", _torch), ("cupyx", _cupyx)):
                try:
                    candidates[name] = make(gpu, x, y, count)
                except Exception as error:  # not installed, or does not work here: the others are measured
                    result.missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            result.seconds[nbytes] = await _compare(candidates, samples if nbytes <= 1 << 20 else max(5, samples // 8))
        smallest = result.seconds[min(sizes)]
        result.overhead_s = smallest["asyncdist"] - smallest.get("bare", 0.0)
        result.stall_s = await _stall(gpu, samples)
    while _closing:
        _closing.pop()()
    return result


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


def _bare(gpu: Gpu, x: Any, y: Any, count: int) -> Once:
    """The binding's own call and an event that is waited for, as short as it can be written."""
    if gpu.fake:
        return _bare_fake(gpu, x, count)
    import cupy
    from cupy.cuda import nccl

    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    event = cupy.cuda.Event(disable_timing=True)
    pointer = x.data.ptr

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


def _torch(gpu: Gpu, x: Any, y: Any, count: int) -> Once:
    import torch
    import torch.distributed as torch_dist

    if gpu.fake or not torch.cuda.is_available():
        raise RuntimeError("torch sees no device")
    if not torch_dist.is_initialized():
        torch_dist.init_process_group("nccl", store=torch_dist.HashStore(), rank=0, world_size=1)
        _closing.append(torch_dist.destroy_process_group)
    tensor = torch.ones(count, device=f"cuda:{gpu.device}")

    async def once() -> None:
        torch_dist.all_reduce(tensor, async_op=True).wait()
        torch.cuda.synchronize()

    return once


_cupyx_backend: list[Any] = []
_closing: list[Callable[[], object]] = []
"""What ends the neighbors, last first."""


def _cupyx(gpu: Gpu, x: Any, y: Any, count: int) -> Once:
    if gpu.fake:
        raise RuntimeError("cupyx has no fake device")
    import cupy
    from cupyx.distributed import init_process_group

    if not _cupyx_backend:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        _cupyx_backend.append(init_process_group(1, 0, port=port))
        _closing.append(_cupyx_backend[0].stop)
    stream = cupy.cuda.get_current_stream()

    async def once() -> None:
        _cupyx_backend[0].all_reduce(x, y)
        stream.synchronize()

    return once


async def _stall(gpu: Gpu, samples: int) -> float:
    """How late, 99 times of 100, a callback due every millisecond is while operations of a millisecond are awaited."""
    x = gpu.full(1 << 16, 1)
    late: list[float] = []
    done = asyncio.Event()

    async def tick() -> None:
        while not done.is_set():
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(time.perf_counter() - due)

    gpu.spin(0.0)
    gpu.synchronize()
    ticking = asyncio.create_task(tick())
    for _ in range(samples):
        gpu.spin(0.001)
        await dist.all_reduce(x)
    done.set()
    await ticking
    return sorted(late)[int(len(late) * 0.99)]
