"""Every dtype, layout and place of GPU arrays on every path: the right bits, or an error at the call that says why."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_fake_kit import GpuRank, equal, run_gpu, values_of

import asyncdist as dist
from asyncdist.gpu.ipc import scratch as ipc_scratch
from asyncdist.gpu.staged import pipeline as staged_pipeline

PATHS = ["nccl", "ipc", "staged"]
every_path = pytest.mark.parametrize("path", PATHS)

NUMPYS = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
NUMPYS += ("float16", "float32", "float64", "complex64", "complex128")
NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz")
DTYPES = [np.dtype(name) for name in NUMPYS] + [np.dtype(getattr(ml_dtypes, name)) for name in NARROW]

UNKNOWN_TO_NCCL = {"int16", "uint16", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"}
"""What it moves, and cannot reduce."""


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_scratch, "LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(staged_pipeline, "BUFFER_BYTES", 1 << 16)


class Place:
    """Arrays of one rank on its device."""

    def __init__(self, at: GpuRank, path: str) -> None:
        self.at = at
        self.device = at.rank if path == "nccl" else 0

    def array(self, values: Any) -> Any:
        return self.at.cuda.runtime.array(values, self.device)

    def inside(self, values: Any, offset: int) -> Any:
        """An array that begins `offset` elements into a larger allocation, and what is around it."""
        whole = self.at.cuda.runtime.empty(values.size + 2 * offset + 5, values.dtype, self.device)
        whole.set(np.full(whole.shape, 1).astype(values.dtype))
        part = whole[offset : offset + values.size]
        part.set(values.reshape(-1))
        return part, whole


def devices_of(path: str, size: int) -> int:
    return size if path == "nccl" else 1


@every_path
def test_every_dtype_moves(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def main(at: GpuRank) -> None:
        place = Place(at, path)
        for dtype, count in itertools.product(DTYPES, (1, 37)):
            x = place.array(values_of(at.rank, count, dtype))
            await dist.broadcast(x, 1)
            assert equal(x, values_of(1, count, dtype)), dtype
            gathered = [place.array(np.zeros(count, dtype)) for _ in range(at.size)]
            await dist.all_gather(gathered, place.array(values_of(at.rank, count, dtype)))
            for rank, part in enumerate(gathered):
                assert equal(part, values_of(rank, count, dtype)), dtype
            y = place.array(np.zeros(at.size * count, dtype))
            await dist.all_to_all_single(y, place.array(values_of(at.rank, at.size * count, dtype)))
            expected = [
                values_of(rank, at.size * count, dtype).reshape(at.size, -1)[at.rank] for rank in range(at.size)
            ]
            assert equal(y, np.concatenate(expected)), dtype

    run_gpu(2, main, devices=devices_of(path, 2))


@every_path
def test_every_dtype_is_reduced_or_refused_at_the_call(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def main(at: GpuRank) -> None:
        place = Place(at, path)
        for dtype in DTYPES:
            parts = [values_of(rank, 37, dtype) for rank in range(at.size)]
            x = place.array(parts[at.rank])
            if path == "nccl" and dtype.name in UNKNOWN_TO_NCCL:
                with pytest.raises(TypeError, match=rf"all_reduce.*{dtype.name}.*NCCL cannot reduce"):
                    dist.all_reduce(x)
                assert equal(x, parts[at.rank])
                continue
            await dist.all_reduce(x)
            assert equal(x, parts[0] + parts[1]), dtype
        for dtype in ("object", "datetime64[s]", "S3", "V4", ">f4"):
            host = np.zeros(3, dtype)
            with pytest.raises(TypeError):
                dist.all_reduce(Named(place.array(np.zeros(3, np.float32)), host.dtype))

    run_gpu(2, main, devices=devices_of(path, 2), may_differ=True)


def test_float8_on_a_gpu_on_which_nccl_does_not_reduce_it() -> None:
    """Refused at the call, also before the path is known, and the group goes on; it is moved all the same."""

    async def main(at: GpuRank) -> None:
        assert at.cuda.nccl is not None
        at.cuda.nccl.capability = 8
        for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
            x = at.cuda.runtime.array(np.full(3, at.rank).astype(dtype), at.device)
            for refused in (lambda x=x: dist.all_reduce(x), lambda x=x: dist.all_reduce_coalesced([x, x])):
                with pytest.raises(TypeError, match=r"compute capability is below 9\.0"):
                    refused()
            await dist.broadcast(x, 1)
            assert equal(x, np.full(3, 1).astype(dtype))

    run_gpu(2, main, devices=2)


class Named:
    """A GPU array that says that its dtype is another."""

    def __init__(self, array: Any, dtype: np.dtype[Any]) -> None:
        self._array = array
        self.device = array.device
        self.dtype = dtype

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._array.__cuda_array_interface__ | {"typestr": self.dtype.str}


@every_path
@pytest.mark.parametrize("offset", [1, 3, 17])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "float32", "complex128"])
def test_slices_of_larger_allocations(path: str, offset: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At odd addresses, and nothing beside them is touched."""
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def main(at: GpuRank) -> None:
        place = Place(at, path)
        for count in (1, 5, 1001, 40_000):
            x, whole = place.inside(values_of(at.rank, count, dtype), offset)
            await dist.all_reduce(x)
            assert equal(x, values_of(0, count, dtype) + values_of(1, count, dtype))
            y, other = place.inside(np.zeros(2 * count, dtype), offset)
            await dist.all_gather_into_tensor(y, x)
            assert equal(y, np.tile(x.get(), 2))
            z, third = place.inside(np.zeros(count, dtype), offset + 1)
            await dist.reduce_scatter_tensor(z, y, op=dist.ReduceOp.MAX if dtype != "complex128" else dist.ReduceOp.AVG)
            assert equal(z, x.get())
            for around in (whole, other, third):
                found = around.get()
                assert (found[:offset] == 1).all()
                assert (found[-5:] == 1).all()

    run_gpu(2, main, devices=devices_of(path, 2))


@every_path
def test_layouts_that_are_refused_at_the_call(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the group goes on."""
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def main(at: GpuRank) -> None:
        place = Place(at, path)
        whole = place.array(np.zeros((6, 8), np.float32))
        for bad in (whole[:, ::2], whole[::2], whole[::-1], whole[:, 1:3]):
            for call in (
                lambda bad=bad: dist.all_reduce(bad),
                lambda bad=bad: dist.broadcast(bad, 0),
                lambda bad=bad: dist.all_reduce_coalesced([whole, bad]),
                lambda bad=bad: dist.all_gather_into_tensor(place.array(np.zeros(2 * bad.size, np.float32)), bad),
                lambda bad=bad: dist.isend(bad, 1 - at.rank),
                lambda bad=bad: dist.irecv(bad, 1 - at.rank),
            ):
                with pytest.raises(ValueError, match="C-contiguous"):
                    call()
        fine = [whole[1:3], whole[2], whole[2, 3:5], whole[3:3], whole[:, :0]]
        for good in fine:
            await dist.all_reduce(good)
        x = place.array(np.ones(3, np.float32))
        await dist.all_reduce(x)
        assert equal(x, [2, 2, 2])

    run_gpu(2, main, devices=devices_of(path, 2))


@every_path
def test_arrays_on_other_gpus(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at the call, whichever argument it is, and both devices are named."""
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def main(at: GpuRank) -> None:
        runtime, own = at.cuda.runtime, at.rank if path == "nccl" else 0
        here, there = runtime.array(np.ones(4), own), runtime.array(np.ones(4), 3)
        await dist.all_reduce(here)
        with pytest.raises(ValueError, match=f"cuda:3.*cuda:{own}"):
            dist.all_reduce(there)
        for call in (
            lambda: dist.all_gather([here, there], here),
            lambda: dist.all_to_all([here, here], [there, here]),
            lambda: dist.all_reduce_coalesced([here, there]),
            lambda: dist.all_gather_into_tensor(runtime.array(np.zeros(8), 3), here),
        ):
            with pytest.raises(ValueError, match="cuda:"):
                call()
        await dist.all_reduce(here)
        assert equal(here, np.full(4, 4))

    run_gpu(2, main, devices=4)


@every_path
@pytest.mark.parametrize("size", [2, 3])
def test_nothing_to_move(path: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No elements in every collective, first and later, between others that have some."""
    monkeypatch.setenv("ASYNCDIST_CUDA_PATH", path)

    async def main(at: GpuRank) -> None:
        place = Place(at, path)

        def none(*shape: int) -> Any:
            return place.array(np.zeros(shape or (0,), np.float32))

        for _ in range(2):
            await dist.all_reduce(none(0, 3))
            await dist.broadcast(none(), 0)
            await dist.reduce(none(), 1)
            await dist.all_gather([none() for _ in range(size)], none())
            await dist.all_gather_into_tensor(none(0, 2), none(0, 2))
            await dist.gather(none(), [none() for _ in range(size)] if at.rank == 0 else None)
            await dist.scatter(none(), [none() for _ in range(size)] if at.rank == 0 else None)
            await dist.reduce_scatter(none(), [none() for _ in range(size)])
            await dist.reduce_scatter_tensor(none(), none())
            await dist.all_to_all([none() for _ in range(size)], [none() for _ in range(size)])
            await dist.all_to_all_single(none(), none())
            await dist.all_to_all_single(none(), none(), [0] * size, [0] * size)
            await dist.all_reduce_coalesced([none(), none(2), none()])
            sent, into = dist.isend(none(), (at.rank + 1) % size), none()
            await dist.recv(into, (at.rank - 1) % size)
            await sent
            x = place.array(np.ones(3, np.float32))
            await dist.all_reduce(x)
            assert equal(x, [size] * 3)

    run_gpu(size, main, devices=devices_of(path, size))
