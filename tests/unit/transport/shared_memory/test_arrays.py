"""Arrays in shared memory: they live as long as anyone uses them, their memory no longer, and within bounds."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from mesh_world import open_fds
from waiting import eventually

from asyncdist.transport.fork import SocketSet
from asyncdist.transport.shared_memory import arrays as shared_arrays
from asyncdist.transport.shared_memory.arrays import ARENA_BYTES, FEW_ARENAS, SharedArrays, address_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
BYTE = np.dtype(np.uint8)


class Owner:
    """What a mesh's HostMemory does for its arrays."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.numbers = iter(range(1, 1 << 30))
        self.gone: list[int] = []
        self.arrays = SharedArrays(
            asyncio.get_running_loop(),
            SocketSet(lambda: None),
            lambda: next(self.numbers),
            self.gone.append,
            limit_bytes,
        )

    def make(self, nbytes: int) -> np.ndarray[Any, Any]:
        made = self.arrays.empty((nbytes,), BYTE)
        assert made is not None
        return made


@pytest_asyncio.fixture
async def owner() -> AsyncIterator[Owner]:
    before = open_fds()
    made = Owner()
    yield made
    made.arrays.close()
    left = {fd: what for fd, what in open_fds().items() if before.get(fd) != what and "memfd" in what}
    assert not left


async def test_shape_dtype_and_place(owner: Owner) -> None:
    array = owner.arrays.empty((3, 5), np.dtype(np.complex128))
    assert array is not None
    assert array.shape == (3, 5)
    assert array.dtype == np.complex128
    assert array.flags.c_contiguous
    assert array.flags.writeable
    array[...] = np.arange(15).reshape(3, 5)
    view = memoryview(array.reshape(-1)[4:].view(np.uint8))
    found = owner.arrays.find(address_of(view), len(view))
    assert found is not None
    segment = owner.arrays.segment(found[0])
    there = np.frombuffer(segment.view[found[1] : found[1] + len(view)], np.complex128)
    assert (there == np.arange(4, 15)).all()


async def test_arrays_without_elements_are_not_shared(owner: Owner) -> None:
    assert owner.arrays.empty((0,), BYTE) is None
    assert len(owner.arrays) == 0


async def test_what_is_elsewhere_is_not_found(owner: Owner) -> None:
    other = np.empty(1000, np.uint8)
    assert owner.arrays.find(address_of(memoryview(other)), 1000) is None
    array = owner.make(1000)
    assert owner.arrays.find(address_of(memoryview(other)), 1000) is None
    address = address_of(memoryview(array))
    assert owner.arrays.find(address, ARENA_BYTES + 1) is None
    assert owner.arrays.find(0, 1) is None
    with pytest.raises(LookupError):
        owner.arrays.segment(99)


async def test_memory_goes_with_the_last_view(owner: Owner) -> None:
    array = owner.make(ARENA_BYTES + 1)
    view = array[5:10].reshape(1, 5)
    octets = memoryview(view)
    array[5:10] = 7
    del array
    gc.collect()
    await asyncio.sleep(0)
    assert owner.arrays.nbytes > ARENA_BYTES
    assert (view == 7).all()
    del view
    await asyncio.sleep(0)
    assert len(owner.arrays) == 1
    del octets
    await eventually(lambda: not len(owner.arrays))
    assert owner.gone == [1]
    assert owner.arrays.nbytes == 0


async def test_an_unused_arena_is_kept_for_the_next_array(owner: Owner) -> None:
    first = owner.make(1000)
    address = address_of(memoryview(first))
    del first
    await eventually(lambda: not owner.arrays._freed)
    assert len(owner.arrays) == 1
    second = owner.make(1000)
    assert address_of(memoryview(second)) == address
    assert not owner.gone


async def test_arrays_freed_by_other_threads(owner: Owner) -> None:
    arrays = [owner.make(ARENA_BYTES + 4096 * index) for index in range(4)]
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join()
    await eventually(lambda: len(owner.arrays) <= 1)


async def test_arrays_outlive_their_owner() -> None:
    owner = Owner()
    array = owner.make(ARENA_BYTES)
    ends = array[:: ARENA_BYTES - 1]
    ends[...] = 3
    owner.arrays.close()
    owner.arrays.close()
    assert (ends == 3).all()
    assert owner.arrays.empty((1,), BYTE) is None
    del owner
    gc.collect()
    assert (ends == 3).all()
    del array, ends
    gc.collect()


@pytest.mark.parametrize("seed", range(4))
async def test_no_two_arrays_overlap(owner: Owner, seed: int) -> None:
    rng = random.Random(seed)
    alive: dict[int, np.ndarray[Any, Any]] = {}
    for number in range(600):
        if alive and rng.random() < 0.45:
            marked = rng.choice(list(alive))
            assert (alive.pop(marked) == marked % 251).all()
        else:
            made = owner.make(rng.choice((1, 63, 64, 65, 4095, 4096, 5000, 100_000, 1 << 20)))
            made[...] = number % 251
            alive[number] = made
        if number % 50 == 0:
            await asyncio.sleep(0)
    for marked, array in alive.items():
        assert (array == marked % 251).all()
    assert len(owner.arrays) < 20
    alive.clear()
    del made, array
    await eventually(lambda: len(owner.arrays) == 1 and owner.arrays._arenas[0].unused)


async def test_the_limit_holds_and_one_past_it_is_refused() -> None:
    owner = Owner(1 << 20)
    half = owner.make(1 << 19)
    other = owner.make(1 << 19)
    assert owner.arrays.empty((1,), BYTE) is None
    del other
    await eventually(lambda: not owner.arrays._freed)
    assert owner.arrays.empty(((1 << 19) + 1,), BYTE) is None
    again = owner.make(1 << 19)
    assert owner.arrays.nbytes == 1 << 20
    del half, again
    none = Owner(0)
    assert none.arrays.empty((1,), BYTE) is None
    owner.arrays.close()


async def test_many_arrays_lie_in_few_arenas(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arrays, "ARENA_BYTES", 1 << 16)
    arrays = [owner.make(1 << 16) for _ in range(FEW_ARENAS)]
    assert len(owner.arrays) == FEW_ARENAS
    arrays += [owner.make(1 << 16) for _ in range(4000)]
    assert len(owner.arrays) < 2 * FEW_ARENAS + 40
    arrays.clear()
    await eventually(lambda: len(owner.arrays) <= 1)


async def test_without_descriptors_there_is_none(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.memfd_create", refuse)
    assert owner.arrays.empty((10,), BYTE) is None
