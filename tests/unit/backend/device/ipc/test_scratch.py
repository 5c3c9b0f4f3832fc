"""How much device memory ranks share: by the GPU's memory, and by what is free of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from device_paths_kit import PathRank, run_ranks

from asyncdist.backend.calls import call as calls
from asyncdist.backend.device.ipc import scratch as ipc_scratch
from asyncdist.backend.device.ipc.path import CudaIpcPath
from asyncdist.backend.device.ipc.scratch import LARGE_SLOTS, SMALL_SLOTS, large_slot
from asyncdist.cuda.interface import Memory
from asyncdist.errors import DistBackendError
from asyncdist.reduce_op import ReduceOp
from asyncdist.testing.fake_cuda import FakeRuntime

SMALL, LARGE = 1 << 9, 1 << 12
"""So that the fake's host memory does for any GPU's share."""


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    yield made
    made.close()


def slots(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, size: int, tags: int = 1) -> list[list[int]]:
    """By rank and tag, the bytes of a large slot, 0 of a tag without any; results are right in any case."""
    monkeypatch.setattr(ipc_scratch, "SMALL_BYTES", SMALL)
    monkeypatch.setattr(ipc_scratch, "LARGE_BYTES", LARGE)
    monkeypatch.setattr(ipc_scratch, "OTHER_TAGS_LARGE_BYTES", LARGE // 2)

    async def main(rank: PathRank) -> list[int]:
        for tag in range(tags):
            x = rank.array(np.ones(20_000, np.float32))
            await rank.run(calls.all_reduce(x, ReduceOp.SUM), tag)
            np.testing.assert_array_equal(x._array, size)
        made = [rank.path._tags[tag] for tag in range(tags)]
        return [tag.channel.scratch.large_bytes if tag.channel is not None else 0 for tag in made]

    return run_ranks(size, CudaIpcPath, main, runtime)


def refuse(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, more_than: int, times: int) -> None:
    """Let that many allocations fail that are larger."""
    allocate, left = runtime.allocate, times

    def short(nbytes: int, device: int) -> Memory:
        nonlocal left
        if nbytes > more_than and left:
            left -= 1
            raise DistBackendError("out of memory")
        return allocate(nbytes, device)

    monkeypatch.setattr(runtime, "allocate", short)


@pytest.mark.parametrize(
    ("memory_gib", "slot_mib"),
    [(1, 32), (15.7, 32), (16, 32), (24, 48), (63.5, 127), (64, 128), (192, 128)],
)
def test_a_slot_is_a_512th_of_the_memory_within_bounds(memory_gib: float, slot_mib: int) -> None:
    assert large_slot(int(memory_gib * (1 << 30))) == slot_mib << 20


def test_only_the_first_tag_grows_with_the_memory(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "memory_size", lambda device: 80 << 30)
    assert slots(runtime, monkeypatch, 2, tags=2) == [[4 * LARGE, LARGE // 2]] * 2


def test_the_rank_with_the_least_memory_counts(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([80 << 30, 24 << 30, 32 << 30])
    monkeypatch.setattr(runtime, "memory_size", lambda device: next(sizes))
    assert slots(runtime, monkeypatch, 3) == [[LARGE * 3 // 2]] * 3


def test_slots_are_smaller_where_one_rank_finds_too_little_free(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "memory_size", lambda device: 80 << 30)
    refuse(runtime, monkeypatch, SMALL_SLOTS * SMALL + LARGE_SLOTS * LARGE, times=1)
    assert slots(runtime, monkeypatch, 3) == [[LARGE]] * 3


def test_no_memory_at_all_goes_through_the_host(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "memory_size", lambda device: 80 << 30)
    refuse(runtime, monkeypatch, SMALL_SLOTS * SMALL, times=1000)
    assert slots(runtime, monkeypatch, 2) == [[0]] * 2
