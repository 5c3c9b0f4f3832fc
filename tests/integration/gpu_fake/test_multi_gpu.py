"""torch 1.x's lists of one array per GPU: 2 ranks with 8 GPUs each, in one collective of 16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_fake_kit import GpuRank, equal, failure_of, reduced, run_gpu, values_of

import asyncdist as dist
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.errors import CollectiveMismatchError

GPUS = 8


def member(at: GpuRank, index: int) -> int:
    """The number of a rank's GPU among all."""
    return at.rank * GPUS + index


def mine(at: GpuRank, shape: Any = 3, dtype: str = "float32") -> list[Any]:
    return [at.array(values_of(member(at, index), shape, dtype), index) for index in range(GPUS)]


def everybodys(size: int, shape: Any = 3, dtype: str = "float32") -> list[Any]:
    return [values_of(one, shape, dtype) for one in range(size * GPUS)]


def test_sixteen_gpus_of_two_ranks() -> None:
    async def main(at: GpuRank) -> None:
        parts, total = everybodys(2), 2 * GPUS
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG):
            xs = mine(at)
            assert await dist.all_reduce_multigpu(xs, op) is xs
            assert all(equal(x, reduced(op, parts)) for x in xs)
        xs = mine(at)
        await dist.broadcast_multigpu(xs, 1, src_tensor=3)
        assert all(equal(x, parts[GPUS + 3]) for x in xs)
        xs = mine(at)
        await dist.reduce_multigpu(xs, 1, ReduceOp.SUM, dst_tensor=2)
        for index, x in enumerate(xs):
            root = member(at, index) == GPUS + 2
            assert equal(x, reduced(ReduceOp.SUM, parts) if root else parts[member(at, index)])
        rows = [[at.array(np.zeros(3, np.float32), index) for _ in range(total)] for index in range(GPUS)]
        await dist.all_gather_multigpu(rows, mine(at))
        assert all(equal(found, part) for row in rows for found, part in zip(row, parts, strict=True))
        lists = [
            [at.array(values_of(member(at, index), 3, "float32", 5 + one), index) for one in range(total)]
            for index in range(GPUS)
        ]
        outs = [at.array(np.zeros(3, np.float32), index) for index in range(GPUS)]
        await dist.reduce_scatter_multigpu(outs, lists)
        for index, out in enumerate(outs):
            own = member(at, index)
            assert equal(out, reduced(ReduceOp.SUM, [values_of(one, 3, "float32", 5 + own) for one in range(total)]))
        assert "path nccl" in repr(at.group)

    run_gpu(2, main, per_rank=GPUS)


def test_ordinary_operations_beside() -> None:
    async def main(at: GpuRank) -> None:
        x = at.array(np.ones(2, np.float32))
        await dist.all_reduce(x)
        await dist.all_reduce_multigpu([at.array(np.ones(2, np.float32), index) for index in range(2)])
        await dist.all_reduce(x)
        assert equal(x, [4, 4])

    run_gpu(2, main, per_rank=2)


def test_lists_that_do_not_fit_are_refused() -> None:
    async def main(at: GpuRank) -> None:
        with pytest.raises(ValueError, match=r"tensor_list\[1\] and tensor_list\[0\] are both on cuda"):
            dist.all_reduce_multigpu([at.zeros(2), at.zeros(2)])
        with pytest.raises(ValueError, match=r"tensor_list\[1\] is on the host"):
            dist.all_reduce_multigpu([at.zeros(2), np.zeros(2, np.float32)])
        with pytest.raises(ValueError, match=r"has shape"):
            dist.all_reduce_multigpu([at.zeros(2), at.array(np.zeros(3, np.float32), 1)])
        with pytest.raises(ValueError, match=r"has dtype"):
            dist.all_reduce_multigpu([at.zeros(2), at.array(np.zeros(2), 1)])
        with pytest.raises(ValueError, match=r"must not be empty"):
            dist.all_reduce_multigpu([])

    run_gpu(1, main, per_rank=2)


def test_ranks_with_lists_of_different_lengths() -> None:
    async def main(at: GpuRank) -> None:
        group = dist.new_group()
        lists = [at.array(np.zeros(2, np.float32), index) for index in range(1 + at.rank)]
        error = await failure_of(dist.all_reduce_multigpu(lists, group=group))
        assert isinstance(error, CollectiveMismatchError), repr(error)
        assert "arrays per rank" in str(error) or "GPUs" in str(error)

    run_gpu(2, main, per_rank=2)


def pair(at: GpuRank) -> list[Any]:
    return [at.array(np.ones(2, np.float32), index) for index in range(2)]


@pytest.mark.parametrize(
    ("how", "path", "why"),
    [
        ("ipc", "ipc", "ASYNCDIST_CUDA_PATH asks for it"),
        ("staged", "staged", "ASYNCDIST_CUDA_PATH asks for it"),
        ("backend", "staged", "its backend says cuda:aio"),
        ("no nccl", "staged", "NCCL is missing here"),
    ],
)
def test_other_paths_refuse_several_gpus_at_the_call(
    how: str, path: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call already, as every rank knows; those who wait hear of it, and the group goes on."""
    if path == how:
        monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def main(at: GpuRank) -> None:
        for _ in range(2):
            if at.rank == 0:
                with pytest.raises(TypeError, match=f"needs path nccl, but this group takes {path}: {why}"):
                    dist.all_reduce_multigpu(pair(at), group=at.group)
            else:
                error = await failure_of(dist.all_reduce(at.zeros(2), group=at.group))
                assert isinstance(error, CollectiveMismatchError), repr(error)
                assert "rank 0" in str(error)
                assert "all_reduce_multigpu" in str(error)
            x = at.array(np.ones(2, np.float32))
            await dist.all_reduce(x, group=at.group)
            assert equal(x, [2, 2])

    run_gpu(2, main, per_rank=2, nccl=how != "no nccl", backend="cpu:aio,cuda:aio" if how == "backend" else None)


def test_a_path_that_the_ranks_found_refuses_several_gpus_at_the_call() -> None:
    async def main(at: GpuRank) -> None:
        x = at.cuda.runtime.array(np.ones(2, np.float32), 0)
        await dist.all_reduce(x)
        lists = [at.cuda.runtime.array(np.ones(2, np.float32), device) for device in range(2)]
        with pytest.raises(TypeError, match="this group takes ipc: ranks share a GPU"):
            dist.all_reduce_multigpu(lists)
        await dist.all_reduce(x)
        assert equal(x, [4, 4])

    run_gpu(2, main, devices=2)


def test_several_gpus_where_the_path_is_not_known_yet() -> None:
    """As the group's first operation: only opening shows that ranks share GPUs. It is the group's end, on all ranks."""
    errors: list[BaseException] = []

    async def main(at: GpuRank) -> None:
        group = dist.new_group()
        lists = [at.cuda.runtime.array(np.ones(2, np.float32), device) for device in range(2)]
        errors.append(await failure_of(dist.all_reduce_multigpu(lists, group=group)))
        assert "aborted" in repr(group)
        await dist.barrier()

    run_gpu(2, main, devices=2)
    assert any("several GPUs needs the nccl path" in str(error) for error in errors), errors
