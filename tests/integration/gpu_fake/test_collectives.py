"""Every collective on GPU arrays against numpy, on a fake GPU and a fake NCCL."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_fake_kit import GpuRank, equal, reduced, run_gpu, values_of

import asyncdist as dist
from asyncdist.arrays.reduce_op import ReduceOp

MOVED = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32"]
MOVED += ["float64", "complex64", "complex128", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
REDUCED = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", ml_dtypes.bfloat16]
OPS = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG]
SIZES = [1, 2, 3]

sizes = pytest.mark.parametrize("size", SIZES)


@sizes
@pytest.mark.parametrize("premul", [False, True])
def test_reductions(size: int, premul: bool) -> None:
    async def main(at: GpuRank) -> None:
        for dtype in REDUCED:
            ops: list[Any] = [*OPS]
            if np.dtype(dtype).kind not in "iu":
                ops.append(ReduceOp.PREMUL_SUM(0.5))
            for op in ops:
                parts = [values_of(rank, (3, 2), dtype) for rank in range(size)]
                x, y = at.array(parts[at.rank]), at.array(parts[at.rank])
                assert await dist.all_reduce(x, op, at.group) is x
                assert equal(x, reduced(op, parts)), (dtype, op)
                await dist.reduce(y, size - 1, op, at.group)
                assert equal(y, reduced(op, parts) if at.rank == size - 1 else parts[at.rank]), (dtype, op)
                await check_reduce_scatters(at, dtype, op)

    run_gpu(size, main, native_premul_sum=premul)


async def check_reduce_scatters(at: GpuRank, dtype: Any, op: Any) -> None:
    size = at.size
    whole = [values_of(rank, (2 * size, 3), dtype, 1) for rank in range(size)]
    out = at.zeros((2, 3), dtype)
    await dist.reduce_scatter_tensor(out, at.array(whole[at.rank]), op, at.group)
    assert equal(out, reduced(op, whole)[2 * at.rank : 2 * at.rank + 2]), (dtype, op)
    lists = [[values_of(rank, index + 1, dtype, 2 + index) for index in range(size)] for rank in range(size)]
    out = at.zeros(at.rank + 1, dtype)
    await dist.reduce_scatter(out, [at.array(part) for part in lists[at.rank]], op, at.group)
    assert equal(out, reduced(op, [lists[rank][at.rank] for rank in range(size)])), (dtype, op)


@sizes
def test_bool_and_complex_reductions(size: int) -> None:
    async def main(at: GpuRank) -> None:
        for dtype, ops in (
            (bool, [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]),
            (np.complex64, [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM(2.0)]),
        ):
            for op in ops:
                parts = [values_of(rank, 5, dtype) for rank in range(size)]
                x = at.array(parts[at.rank])
                await dist.all_reduce(x, op, at.group)
                assert equal(x, reduced(op, parts)), (dtype, op)

    run_gpu(size, main)


@sizes
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_movements(size: int, loop: str) -> None:
    async def main(at: GpuRank) -> None:
        for dtype in MOVED:
            await check_movements(at, dtype)
            await check_exchanges(at, dtype)

    run_gpu(size, main, loop=loop)


async def check_movements(at: GpuRank, dtype: Any) -> None:
    size, rank, group = at.size, at.rank, at.group
    parts = [values_of(one, (2, 2), dtype) for one in range(size)]
    x = at.array(parts[rank])
    await dist.broadcast(x, size - 1, group)
    assert equal(x, parts[-1]), dtype
    out = [at.zeros((2, 2), dtype) for _ in range(size)]
    assert await dist.all_gather(out, at.array(parts[rank]), group) is out
    assert all(equal(found, part) for found, part in zip(out, parts, strict=True)), dtype
    whole = at.zeros((2 * size, 2), dtype)
    await dist.all_gather_into_tensor(whole, at.array(parts[rank]), group)
    assert equal(whole, np.concatenate(parts)), dtype
    blocks = [whole[2 * one : 2 * one + 2] for one in range(size)]  # in a row: NCCL's own all_gather
    await dist.all_gather(blocks, at.array(parts[rank]), group)
    assert equal(whole, np.concatenate(parts)), dtype
    root = size // 2
    out = [at.zeros((2, 2), dtype) for _ in range(size)]
    await dist.gather(at.array(parts[rank]), out if rank == root else None, root, group)
    assert rank != root or all(equal(found, part) for found, part in zip(out, parts, strict=True)), dtype
    x = at.zeros((2, 2), dtype)
    await dist.scatter(x, [at.array(part) for part in parts] if rank == root else None, root, group)
    assert equal(x, parts[rank]), dtype


async def check_exchanges(at: GpuRank, dtype: Any) -> None:
    size, rank, group = at.size, at.rank, at.group
    rows = [[values_of(source, (2, 3), dtype, target) for target in range(size)] for source in range(size)]
    out = at.zeros((2 * size, 3), dtype)
    await dist.all_to_all_single(out, at.array(np.concatenate(rows[rank])), group=group)
    assert equal(out, np.concatenate([rows[source][rank] for source in range(size)])), dtype
    # Uneven: rank s sends s + t rows to rank t.
    sent = [rank + target for target in range(size)]
    heard = [source + rank for source in range(size)]
    pieces = [[values_of(s, (s + t, 2), dtype, 9 + t) for t in range(size)] for s in range(size)]
    out = at.zeros((sum(heard), 2), dtype)
    await dist.all_to_all_single(out, at.array(np.concatenate(pieces[rank])), heard, sent, group)
    assert equal(out, np.concatenate([pieces[source][rank] for source in range(size)])), dtype
    outs = [at.zeros((count, 2), dtype) for count in heard]
    await dist.all_to_all(outs, [at.array(piece) for piece in pieces[rank]], group)
    assert all(equal(found, pieces[source][rank]) for source, found in enumerate(outs)), dtype
    mine = values_of(rank, rank + 1, dtype)
    out = [at.zeros(source + 1, dtype) for source in range(size)]
    await dist.gather(at.array(mine), out if rank == 0 else None, 0, group, uneven=True)
    assert rank or all(equal(found, values_of(source, source + 1, dtype)) for source, found in enumerate(out)), dtype
    back = at.zeros(rank + 1, dtype)
    await dist.scatter(back, out if rank == 0 else None, 0, group, uneven=True)
    assert equal(back, mine), dtype
    gathered = [at.zeros(source + 1, dtype) for source in range(size)]
    await dist.all_gather(gathered, at.array(mine), group)
    assert all(equal(found, values_of(source, source + 1, dtype)) for source, found in enumerate(gathered)), dtype


@sizes
def test_coalesced(size: int) -> None:
    async def main(at: GpuRank) -> None:
        shapes: list[Any] = [(3,), (2, 2), ()]
        parts = [[values_of(rank, shape, "float32", seed) for seed, shape in enumerate(shapes)] for rank in range(size)]
        mine, group = parts[at.rank], at.group
        xs = [at.array(part) for part in mine]
        await dist.all_reduce_coalesced(xs, ReduceOp.MAX, group)
        for index, x in enumerate(xs):
            assert equal(x, reduced(ReduceOp.MAX, [part[index] for part in parts]))
        xs = [at.array(part) for part in mine]
        await dist.broadcast_coalesced(xs, 0, group)
        assert all(equal(x, part) for x, part in zip(xs, parts[0], strict=True))
        rows = [[at.zeros(shape) for shape in shapes] for _ in range(size)]
        await dist.all_gather_coalesced(rows, [at.array(part) for part in mine], group)
        for row, part in zip(rows, parts, strict=True):
            assert all(equal(found, expected) for found, expected in zip(row, part, strict=True))
        wholes = [at.zeros(size * 3), at.zeros((size * 2, 2))]
        await dist.all_gather_into_tensor_coalesced(wholes, [at.array(part) for part in mine[:2]], group)
        for index, whole in enumerate(wholes):
            assert equal(whole, np.concatenate([part[index] for part in parts]))
        outs = [at.zeros(3), at.zeros((2, 2))]
        inputs = [at.array(np.concatenate([mine[index]] * size)) for index in range(2)]
        await dist.reduce_scatter_tensor_coalesced(outs, inputs, group=group)
        for index, out in enumerate(outs):
            assert equal(out, sum(part[index] for part in parts))

    run_gpu(size, main)


@sizes
@pytest.mark.parametrize("path", ["nccl", "ipc", "staged"])
def test_coalesced_operations_have_temporary_memory_of_their_own(
    path: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are launched together, after all copies."""
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def main(at: GpuRank) -> None:
        group, rank = at.group, at.rank
        parts = [[values_of(one, (size * 3,), "float32", seed) for seed in range(3)] for one in range(size)]
        outs = [at.zeros(3) for _ in range(3)]
        inputs = [at.array(part) for part in parts[rank]]
        await dist.reduce_scatter_tensor_coalesced(outs, inputs, ReduceOp.PREMUL_SUM(2.0), group=group)
        for index, out in enumerate(outs):
            assert equal(out, 2 * sum(part[index] for part in parts)[3 * rank : 3 * rank + 3])
        wholes = [at.array(part) for part in parts[rank]]
        await dist.all_gather_into_tensor_coalesced(wholes, [whole[:3] for whole in wholes], group)
        for index, whole in enumerate(wholes):
            assert equal(whole, np.concatenate([part[index][:3] for part in parts]))

    run_gpu(size, main)


@sizes
def test_inputs_that_are_outputs(size: int) -> None:
    async def main(at: GpuRank) -> None:
        group, rank = at.group, at.rank
        parts = [values_of(one, (size, 2), "int64") for one in range(size)]
        x = at.array(parts[rank])
        await dist.all_to_all_single(x, x, group=group)
        assert equal(x, np.stack([part[rank] for part in parts]))
        whole = at.array(np.concatenate([parts[rank]] * size))
        await dist.all_gather_into_tensor(whole, whole[size * rank : size * (rank + 1)], group)
        assert equal(whole, np.concatenate(parts))
        whole = at.array(np.concatenate([parts[rank]] * size))
        await dist.all_gather_into_tensor(whole, whole[:size], group)  # not its own place but for rank 0
        assert equal(whole, np.concatenate(parts))
        x = at.array(parts[rank])
        await dist.reduce_scatter_tensor(x[0], x, group=group)
        assert equal(x[0], sum(parts)[rank])
        out = [at.zeros((size, 2), "int64") for _ in range(size)]
        out[rank] = at.array(parts[rank])
        await dist.gather(out[rank], out if rank == 0 else None, 0, group)
        assert rank or all(equal(found, part) for found, part in zip(out, parts, strict=True))

    run_gpu(size, main)


@sizes
def test_nothing_at_all(size: int) -> None:
    async def main(at: GpuRank) -> None:
        group, empty = at.group, at.zeros(0)
        await dist.all_reduce(empty, group=group)
        await dist.broadcast(empty, 0, group)
        await dist.reduce(empty, 0, group=group)
        await dist.all_gather([at.zeros(0) for _ in range(size)], empty, group)
        await dist.reduce_scatter(empty, [at.zeros(0) for _ in range(size)], group=group)
        await dist.all_to_all_single(empty, at.zeros(0), group=group)
        await dist.gather(empty, [at.zeros(0) for _ in range(size)] if at.rank == 0 else None, 0, group)

    run_gpu(size, main)


@pytest.mark.parametrize("backend", ["nccl", "cpu:aio,cuda:nccl", "cuda:aio", "gloo"])
def test_backends_and_the_paths_they_take(backend: str) -> None:
    async def main(at: GpuRank) -> None:
        x = at.array(np.ones(3, np.float32))
        await dist.all_reduce(x, group=at.group)
        assert equal(x, [2, 2, 2])
        path = "nccl" if "nccl" in backend else "staged"
        assert f"path {path}" in repr(at.group)
        assert dist.get_backend(at.group) == ("nccl" if backend == "nccl" else "aio")
        expected = {"nccl": "cuda:nccl", "gloo": "cpu:aio,cuda:aio"}.get(backend, backend)
        assert dist.get_backend_config(at.group) == expected

    run_gpu(2, main, backend=backend)


def test_ranks_that_share_a_gpu_take_another_path() -> None:
    async def main(at: GpuRank) -> None:
        x = at.cuda.runtime.array(np.ones(3, np.float32), 0)
        await dist.all_reduce(x, group=at.group)
        assert equal(x, [2, 2, 2])
        assert "path ipc" in repr(at.group)

    run_gpu(2, main, devices=1)


def test_without_nccl_arrays_go_through_the_host() -> None:
    async def main(at: GpuRank) -> None:
        assert not dist.is_nccl_available()
        x = at.array(np.ones(3, np.float32))
        await dist.all_reduce(x, group=at.group)
        assert equal(x, [2, 2, 2])
        assert "cpu:aio,cuda:aio path staged" in repr(at.group)

    run_gpu(2, main, nccl=False)
