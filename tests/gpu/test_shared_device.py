"""Several ranks, each a process, on one device: NCCL where it can be talked into it, CUDA IPC, and through the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_kit import on_gpu, run_on_gpu, succeeded

pytestmark = on_gpu

COLLECTIVES = """
COUNTS = (1, 1000, 70_000, 3_000_001)[: 3 if os.environ.get("ASYNCDIST_TEST_FAKE_CUDA") else 4]  # the fake is slow

async def collectives(gpu, group, count):
    rank, size = group.rank, group.size
    total = sum(range(1, size + 1))
    x = gpu.full(count, rank + 1)
    await dist.all_reduce(x)
    assert (x.get() == total).all(), (count, x.get())
    for op, expected in ((ReduceOp.MAX, size), (ReduceOp.AVG, total / size), (ReduceOp.PREMUL_SUM(2.0), 2 * total)):
        x = gpu.full(count, rank + 1)
        await dist.all_reduce(x, op)
        assert np.allclose(x.get(), expected), (op, x.get())
    x = gpu.full(count, rank)
    await dist.broadcast(x, size - 1)
    assert (x.get() == size - 1).all()
    x = gpu.full(count, rank + 1)
    await dist.reduce(x, 0)
    assert (x.get() == (total if rank == 0 else rank + 1)).all()
    y = gpu.full(size * count, -1)
    await dist.all_gather_into_tensor(y, gpu.full(count, rank))
    assert (y.get().reshape(size, count) == np.arange(size)[:, None]).all()
    x = gpu.full(count, 0)
    await dist.reduce_scatter_tensor(x, gpu.full(size * count, rank + 1))
    assert (x.get() == total).all()
    y = gpu.full(size * count, -1)
    await dist.all_to_all_single(y, gpu.array(np.repeat(10 * rank + np.arange(size), count).astype(np.float32)))
    assert (y.get().reshape(size, count) == (10 * np.arange(size) + rank)[:, None]).all()
    parts = [gpu.full(count, -1) for _ in range(size)] if rank == 0 else None
    await dist.gather(gpu.full(count, rank), parts, 0)
    if rank == 0:
        assert all((part.get() == other).all() for other, part in enumerate(parts))
    x = gpu.full(count, -1)
    await dist.scatter(x, parts, 0)
    assert (x.get() == rank).all()

async def main():
    with open_gpu() as gpu:
        async with dist.init_process_group(timeout=30) as group:
            for count in COUNTS:
                await collectives(gpu, group, count)
            works = [dist.all_reduce(gpu.full(300, number)) for number in range(300)]
            for number, array in enumerate(await asyncio.gather(*works)):
                assert (array.get() == number * group.size).all()
            if group.rank < 2:
                x = gpu.full(5000, group.rank)
                peer = 1 - group.rank
                if group.rank == 0:
                    await dist.send(x, peer)
                    await dist.recv(x, peer)
                else:
                    y = gpu.full(5000, -1)
                    await dist.recv(y, peer)
                    assert (y.get() == 0).all()
                    await dist.send(x, peer)
                assert (x.get() == 1).all()
            await dist.barrier()
            print(repr(group))
dist.run(main())
"""


def test_nccl_takes_two_ranks(nccl_sharing: dict[str, str], tmp_path: Path) -> None:
    for rank in succeeded(run_on_gpu(COLLECTIVES, 2, tmp_path, nccl_sharing)):
        assert "path nccl" in rank.stdout


@pytest.mark.parametrize("size", [2, 4])
def test_cuda_ipc(size: int, tmp_path: Path) -> None:
    for rank in succeeded(run_on_gpu(COLLECTIVES, size, tmp_path)):  # ranks that share a device choose it by themselves
        assert "path ipc" in rank.stdout


@pytest.mark.parametrize("size", [2, 4])
def test_staging(size: int, tmp_path: Path) -> None:
    for rank in succeeded(run_on_gpu(COLLECTIVES, size, tmp_path, {"ASYNCDIST_CUDA_PATH": "staged"})):
        assert "path staged" in rank.stdout


MANY_DEVICES = """
async def main():
    with open_gpu() as gpu:
        async with dist.init_process_group(timeout=30) as group:
            count = gpu.runtime.device_count()
            per_rank = max(1, count // group.size)
            devices = [(group.rank * per_rank + index) % count for index in range(per_rank)]
            x = [gpu.array(np.full(1000, 1.0, np.float32), device) for device in devices]
            await dist.all_reduce_multigpu(x)
            assert all((array.get() == group.size * per_rank).all() for array in x)
            mine = [np.full(1000, 10.0 * group.rank + index, np.float32) for index in range(per_rank)]
            x = [gpu.array(values, device) for values, device in zip(mine, devices)]
            await dist.broadcast_multigpu(x, 1, src_tensor=per_rank - 1)
            assert all((array.get() == 10 + per_rank - 1).all() for array in x)
            x = [gpu.array(np.full(1000, 1.0, np.float32), device) for device in devices]
            await dist.reduce_multigpu(x, 0)
            if group.rank == 0:
                assert (x[0].get() == group.size * per_rank).all()
            print(repr(group), per_rank)
dist.run(main())
"""


def test_two_processes_with_lists_of_arrays(tmp_path: Path) -> None:
    """As many devices per process as there are; all on one device where there is but one."""
    succeeded(run_on_gpu(MANY_DEVICES, 2, tmp_path))


OVERLAP = """
async def main():
    with open_gpu() as gpu:
        async with dist.init_process_group(timeout=30) as group:
            gpu.spin(0.0)
            x = gpu.full(1 << 20, 1)
            await dist.all_reduce(x)
            await dist.barrier()
            start = time.perf_counter()
            work = dist.all_reduce(x)
            gpu.spin(2.0)
            await work
            during = time.perf_counter() - start
            gpu.synchronize()
            assert during < 1.5 < time.perf_counter() - start, during
            assert (x.get() == 4).all()
dist.run(main())
"""


@pytest.mark.parametrize("channels", ["", "1"], ids=["all channels", "one channel"])
def test_nccl_overlaps_with_a_kernel(channels: str, nccl_sharing: dict[str, str], tmp_path: Path) -> None:
    environ = nccl_sharing | ({"NCCL_MAX_NCHANNELS": channels} if channels else {})
    succeeded(run_on_gpu(OVERLAP, 2, tmp_path, environ))


def test_cuda_ipc_overlaps_with_a_kernel(tmp_path: Path) -> None:
    succeeded(run_on_gpu(OVERLAP, 2, tmp_path, {"ASYNCDIST_CUDA_PATH": "ipc"}))
