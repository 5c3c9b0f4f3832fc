"""`empty` and `zeros`: arrays as numpy makes them, shared where memory can be."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import pytest

import asyncdist as dist
from asyncdist.group.process_group import Shape
from asyncdist.transport.config import TransportConfig

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")


def alone() -> Any:
    return dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("shape", [5, (5,), (), (2, 3), [2, 3], (0,), (3, 0), np.int64(4)])
@pytest.mark.parametrize("dtype", [np.float32, "int64", np.dtype(np.complex64), bool, "V16", "i4,f8"])
async def test_shapes_and_dtypes_are_numpys(shape: Shape, dtype: Any) -> None:
    async with alone() as group:
        for made in (dist.empty(shape, dtype), group.empty(shape, dtype)):
            like = np.empty(shape, dtype)
            assert (made.shape, made.dtype, made.strides) == (like.shape, like.dtype, like.strides)
            assert made.flags.writeable
            assert made.flags.c_contiguous


@linux
async def test_they_lie_in_shared_memory_aligned_and_apart() -> None:
    async with alone() as group:
        arrays = group.world.mesh.memory.arrays
        one, two = dist.empty(100), dist.empty((3, 7), "int8")
        assert one.dtype == np.float32
        for array in (one, two):
            address = array.__array_interface__["data"][0]
            assert address % 64 == 0
            assert arrays.find(address, array.nbytes) is not None
        assert not np.may_share_memory(one, two)
        objects = dist.empty(3, object)
        assert arrays.find(objects.__array_interface__["data"][0], 1) is None


async def test_zeros_are_zeros_in_memory_used_before() -> None:
    async with alone():
        used = dist.empty(1000, np.uint8)
        used[:] = 9
        del used
        await asyncio.sleep(0)
        assert not dist.zeros(1000, np.uint8).any()
        assert dist.zeros((2, 2)).dtype == np.float32


async def test_wrong_arguments_are_refused_as_by_numpy() -> None:
    async with alone():
        with pytest.raises(ValueError, match="negative"):
            dist.empty((-1,))
        with pytest.raises(TypeError):
            dist.empty(1.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            dist.empty(3, "no such dtype")
        with pytest.raises((ValueError, MemoryError)):
            dist.empty((1 << 40, 1 << 40))


async def test_only_for_members_of_open_groups_on_their_loop() -> None:
    async with alone() as group:
        other = dist.NonMember("other", 0)
        with pytest.raises(ValueError, match="not a member"):
            dist.empty(3, group=other)
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(group.empty, 3)
    with pytest.raises(dist.ClosedError):
        group.empty(3)


@pytest.mark.parametrize(("text", "limit"), [("", None), ("0", 0), ("4096", 4096), (" 7 ", 7)])
def test_the_limit_is_read_from_the_environment(text: str, limit: int | None) -> None:
    assert TransportConfig.from_environ({"ASYNCDIST_EMPTY_BYTES": text}).arrays_bytes == limit


@pytest.mark.parametrize("text", ["1 GiB", "-1", "1.5"])
def test_a_limit_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ASYNCDIST_EMPTY_BYTES"):
        TransportConfig.from_environ({"ASYNCDIST_EMPTY_BYTES": text})
