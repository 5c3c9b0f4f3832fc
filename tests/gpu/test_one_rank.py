"""One rank on one device: every collective, much in flight, a loop that goes on, streams, arrays of other libraries."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from gpu_kit import FAKE, on_gpu

import asyncdist as dist
from asyncdist import HashStore, ReduceOp
from bench.gpu import Gpu
from bench.stall import Lateness, late_share

pytestmark = on_gpu

IN_FLIGHT = 1000
STALL_LIMIT_S = 1e-3


def world() -> dist.ProcessGroup:
    return dist.init_process_group(store=HashStore(), rank=0, world_size=1)


async def test_collectives(gpu: Gpu) -> None:
    async with world() as group:
        x, y = gpu.full(1000, 3), gpu.full(1000, 0)
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG):
            await dist.all_reduce(x, op)
        await dist.all_reduce(x, ReduceOp.PREMUL_SUM(2.0))
        assert set(x.get()) == {6}
        await dist.broadcast(x, 0)
        await dist.reduce(x, 0)
        for collective in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_to_all_single):
            y.set(np.zeros(1000, np.float32))
            await collective(y, x)
            assert set(y.get()) == {6}, collective
        y.set(np.zeros(1000, np.float32))
        await dist.gather(x, [y], 0)
        await dist.scatter(y, [x], 0)
        await dist.all_to_all([y], [x])
        assert set(y.get()) == {6}
        await dist.barrier()
        assert "path nccl" in repr(group)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"])
async def test_dtypes(gpu: Gpu, dtype: str) -> None:
    async with world():
        x = gpu.array(np.ones(17, dtype))
        await dist.all_reduce(x)
        assert (x.get() == np.ones(17, dtype)).all()


async def test_host_arrays_beside_device_arrays(gpu: Gpu) -> None:
    async with world():
        host, device = np.ones(10), gpu.full(10, 1)
        await asyncio.gather(dist.all_reduce(host), dist.all_reduce(device, tag=1))
        assert set(device.get()) == {1} == set(host)


async def test_what_nccl_has_not_is_refused_at_the_call(gpu: Gpu) -> None:
    async with world():
        with pytest.raises(TypeError):
            dist.all_reduce(gpu.array(np.ones(4, np.int32)), ReduceOp.BAND)
        x = gpu.full(4, 1)
        await dist.all_reduce(x)
        assert set(x.get()) == {1}


async def test_a_thousand_operations_in_flight(gpu: Gpu) -> None:
    async with world():
        arrays = [gpu.full(256, number) for number in range(IN_FLIGHT)]
        works = [dist.all_reduce(array) for array in arrays]
        await asyncio.gather(*works)
        assert all(array.get()[0] == number for number, array in enumerate(arrays))


async def test_results_are_in_order_with_the_callers_stream(gpu: Gpu) -> None:
    """Nothing need be synchronized: what is queued before is seen, and what waits for the stream comes after."""
    async with world():
        x = gpu.full(1 << 20, 1)
        gpu.spin(0.05)
        x.set(np.full(1 << 20, 5, np.float32))
        work = dist.all_reduce(x)
        await work
        assert set(x.get()) == {5}
        work = dist.all_reduce(x)
        await work.enqueued()
        work.wait_stream(gpu.runtime.current_stream(gpu.device).handle)
        gpu.synchronize()
        await work


async def test_awaiting_does_not_hold_the_loop(gpu: Gpu) -> None:
    async with world():
        x = gpu.full(1 << 20, 1)
        await dist.all_reduce(x)
        watched = Lateness()
        watched.start()
        for _ in range(2 if FAKE else 20):
            gpu.spin(0.01)
            await asyncio.gather(*(dist.all_reduce(x) for _ in range(5)))
        late_s = watched.stop()
        assert late_s
        if not FAKE:  # in the fake the work itself is done by this process
            assert late_share(late_s, 0.98) <= STALL_LIMIT_S, late_s[-10:]


async def test_a_kernel_and_a_collective_overlap(gpu: Gpu) -> None:
    async with world():
        x = gpu.full(1 << 16, 1)
        await dist.all_reduce(x)
        gpu.synchronize()
        start = time.perf_counter()
        work = dist.all_reduce(x)
        gpu.spin(0.5)
        await work
        assert time.perf_counter() - start < 0.4
        gpu.synchronize()
        assert time.perf_counter() - start > 0.4


async def test_tensors_of_torch(gpu: Gpu) -> None:
    if gpu.fake:
        pytest.skip("torch sees no device")  # without the seconds that importing it takes
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    async with world():
        x = torch.full((1000,), 2.0, device="cuda")
        half = torch.full((1000,), 2.0, device="cuda", dtype=torch.bfloat16)
        await dist.all_reduce(x)
        await dist.all_reduce(half)
        assert float(x.sum()) == 2000 == float(half.float().sum())
