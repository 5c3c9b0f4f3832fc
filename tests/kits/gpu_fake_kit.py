"""Worlds whose ranks have fake GPUs: in one process, on a real event loop, as the fake GPU works in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import uvloop

import asyncdist as dist
from asyncdist.testing import run_world
from asyncdist.testing.fake_cuda import FakeCuda, fake_cuda

PATIENCE_S = 60.0
"""Far more than anything here takes; a test that waits this long has failed."""

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class GpuRank:
    """One rank: its group, and arrays on its GPUs, of which it has `per_rank`."""

    def __init__(self, group: dist.ProcessGroup, world: Any, cuda: FakeCuda, per_rank: int) -> None:
        self.group = group
        self.world = world
        self.cuda = cuda
        self.rank, self.size = group.rank, group.size
        self.per_rank = per_rank
        self.device = self.rank * per_rank

    def array(self, values: Any, index: int = 0) -> Any:
        """An array on this rank's GPU number `index`."""
        return self.cuda.runtime.array(values, self.device + index)

    def zeros(self, shape: Any, dtype: Any = np.float32) -> Any:
        return self.array(np.zeros(shape, dtype))

    def stream(self) -> Any:
        return self.cuda.runtime.new_stream(self.device)


def run_gpu(
    size: int,
    main: Callable[[GpuRank], Awaitable[Any]],
    *,
    per_rank: int = 1,
    devices: int | None = None,
    loop: str = "asyncio",
    backend: str | None = None,
    timeout_s: float | None = PATIENCE_S,
    may_differ: bool = False,
    **options: Any,
) -> list[Any]:
    """Run `main` on every rank and return the results; fails on what the loop or the fake GPU complains about.

    So it does if ranks told NCCL different things, unless they `may_differ`: a real one would hang, or worse.
    `devices` is how many GPUs there are, `per_rank` for each rank unless it is said. With `backend` every rank makes a
    group of it.
    """
    unhandled: list[Any] = []

    def factory() -> asyncio.AbstractEventLoop:
        made: asyncio.AbstractEventLoop = LOOPS[loop]()
        made.set_exception_handler(lambda _loop, context: unhandled.append(context))
        return made

    options.setdefault("mode", "threads")
    with fake_cuda(devices if devices is not None else size * per_rank, **options) as cuda:

        async def rank_main(group: dist.ProcessGroup, world: Any) -> Any:
            chosen: Any = group if backend is None else dist.new_group(backend=backend)
            async with asyncio.timeout(PATIENCE_S):
                return await main(GpuRank(chosen, world, cuda, per_rank))

        results = run_world(size, rank_main, loop_factory=factory, timeout_s=timeout_s, pass_world=True)
        failure = cuda.runtime.failure
        violations = [] if cuda.nccl is None or may_differ else cuda.nccl.violations
    assert not unhandled, f"unhandled in the event loop: {unhandled}"
    assert not failure, failure
    assert not violations, violations
    return results


class ArrayMaker:
    """Makes the arrays that a rank gives to a collective of `group`: on a device, or on the host where that is None."""

    def __init__(self, at: GpuRank, group: dist.ProcessGroup, device: int | None) -> None:
        self.rank = at.rank
        self.group = group
        self._device = device
        self._runtime = at.cuda.runtime

    def __call__(self, count: int = 4) -> Any:
        values = np.ones(count, np.float32)
        return values if self._device is None else self._runtime.array(values, self._device)

    def each(self, count: int = 4) -> list[Any]:
        """One for every rank."""
        return [self(count) for _ in range(self.group.size)]


async def failure_of(awaitable: Awaitable[Any]) -> BaseException:
    """What awaiting raises."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await awaitable
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def values_of(rank: int, shape: Any, dtype: Any, seed: int = 0) -> Any:
    """What a rank contributes, small numbers that every dtype holds; any rank can make every other's."""
    generator = np.random.default_rng([seed, rank])
    return generator.integers(0, 4, shape).astype(dtype)


def equal(found: Any, expected: Any) -> bool:
    """Whether a GPU array holds what numpy says."""
    return bool(np.array_equal(np.asarray(found.get()), np.asarray(expected)))


def reduced(op: Any, arrays: Sequence[Any]) -> Any:
    """What `op` makes of the ranks' arrays, by the kernels that host arrays use."""
    from asyncdist.arrays.reduction import finish, kernel, prepare

    parts = [np.array(array) for array in arrays]
    for part in parts:
        prepare(op, part.reshape(-1))
    total = parts[0]
    for part in parts[1:]:
        kernel(op, total.dtype)(total, part, total)
    finish(op, total.reshape(-1), len(parts))
    return total
