"""GPU arrays where a thread carries the messages: the caller's streams are the ones that are waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncdist as dist
from asyncdist import blocking
from asyncdist.testing.fake_cuda import FakeCuda, fake_cuda

LONG_S = 0.05


def written_late(cuda: FakeCuda, stream: Any) -> Any:
    """An array that a slow kernel of `stream` will write ones into."""
    x = cuda.runtime.array(np.zeros(4, np.float32))
    cuda.runtime.compute(LONG_S, stream)
    x.set(1)
    return x


def written_when_told(cuda: FakeCuda, stream: Any) -> tuple[Any, Any]:
    """An array that `stream` will write ones into once the gate is opened, and the gate."""
    x = cuda.runtime.array(np.zeros(4, np.float32))
    gate = cuda.runtime.hold(stream)
    x.set(1)
    return x, gate


@pytest.mark.parametrize("way", ["collective", "message"])
async def test_a_progress_thread_waits_for_the_callers_stream(way: str) -> None:
    with fake_cuda(1, mode="threads") as cuda:
        async with dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, progress="thread") as group:
            await dist.all_reduce(cuda.runtime.array(np.zeros(1)))
            stream = cuda.runtime.new_stream(0)
            out = cuda.runtime.array(np.zeros(4, np.float32))
            with cuda.runtime.use(stream):
                x = written_late(cuda, stream)
                if way == "collective":
                    work = dist.all_gather_into_tensor(out, x)
                    await work.enqueued()
                    work.wait_stream()
                else:
                    work = group.isend(x, 0)
                    await group.recv(out, 0)
            await work
            assert out.get().tolist() == [1, 1, 1, 1]
            with pytest.raises(TypeError, match="BAND"):
                dist.all_reduce(cuda.runtime.array(np.zeros(1, np.int32)), dist.ReduceOp.BAND)
            assert "path nccl" in repr(group)


def test_blocking_functions_wait_for_the_callers_stream() -> None:
    with fake_cuda(1, mode="threads") as cuda:
        blocking.init_process_group(store=blocking.HashStore(), rank=0, world_size=1)
        try:
            blocking.all_reduce(cuda.runtime.array(np.zeros(1)))
            stream = cuda.runtime.new_stream(0)
            outs = [cuda.runtime.array(np.zeros(4, np.float32)) for _ in range(3)]
            with cuda.runtime.use(stream):
                blocking.all_gather_into_tensor(outs[0], written_late(cuda, stream))
                blocking.all_gather([outs[1]], written_late(cuda, stream))
                x, gate = written_when_told(cuda, stream)
                work = blocking.all_gather_into_tensor(outs[2], x, async_op=True)
                work.wait_stream()
                assert not work.is_completed()
                gate.open()
                after = cuda.runtime.new_event(0)
                after.record(stream)
            after.synchronize()
            for out in outs:
                assert out.get().tolist() == [1, 1, 1, 1]
            work.wait()
            with pytest.raises(TypeError, match="BAND"):
                blocking.all_reduce(cuda.runtime.array(np.zeros(1, np.int32)), blocking.ReduceOp.BAND)
        finally:
            blocking.destroy_process_group()


async def test_many_from_a_thread() -> None:
    with fake_cuda(1, mode="threads") as cuda:
        async with dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, progress="thread"):
            arrays = [cuda.runtime.array(np.full(3, float(number))) for number in range(200)]
            works = [dist.all_reduce(x) for x in arrays]
            for number, (work, x) in enumerate(zip(works, arrays, strict=True)):
                await work
                assert x.get().tolist() == [number] * 3
