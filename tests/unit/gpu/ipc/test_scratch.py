"""How much device memory ranks share: by the GPU's memory, and by what is free of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from device_paths_kit import PathRank, run_ranks
from waiting import eventually

from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.collectives.arguments import call as calls
from asyncdist.cuda.interface import Memory
from asyncdist.errors import DistBackendError, PeerLostError
from asyncdist.gpu.ipc import scratch as ipc_scratch
from asyncdist.gpu.ipc.path import CudaIpcPath
from asyncdist.gpu.ipc.scratch import LARGE_SLOTS, SMALL_SLOTS, large_slot, open_scratch
from asyncdist.gpu.path import HostExchange
from asyncdist.gpu.staged.path import StagedPath
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


def test_cancelling_while_memory_is_opened_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(mode="threads")
    ipc_open, ipc_close = runtime.ipc_open, runtime.ipc_close
    entered, go_on, is_open = threading.Event(), threading.Event(), list[int]()

    def slowly(handle: bytes, device: int) -> int:
        entered.set()
        assert go_on.wait(60)
        is_open.append(ipc_open(handle, device))
        return is_open[-1]

    def closed(pointer: int) -> None:
        is_open.remove(pointer)
        ipc_close(pointer)

    monkeypatch.setattr(runtime, "ipc_open", slowly)
    monkeypatch.setattr(runtime, "ipc_close", closed)

    async def main(rank: PathRank) -> None:
        opening = asyncio.ensure_future(open_scratch(rank.around, 0, first=True))
        await eventually(entered.is_set if rank.rank == 0 else go_on.is_set)
        opening.cancel()
        await asyncio.sleep(0.05)
        go_on.set()  # rank 1 has its memory still
        await asyncio.wait([opening])
        await eventually(lambda: not is_open)

    run_ranks(2, StagedPath, main, runtime)
    assert not is_open
    runtime.close()


def test_who_cannot_share_memory_frees_it_though_others_leave(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is gone before it has said that it has nobody's memory open any more."""
    made: list[Memory] = []
    allocate, barrier = runtime.allocate, HostExchange.barrier

    def remembered(nbytes: int, device: int) -> Memory:
        made.append(allocate(nbytes, device))
        return made[-1]

    def refuse_to_open(handle: bytes, device: int) -> int:
        raise DistBackendError("not here")

    async def leaving(self: HostExchange, name: str, *arguments: int) -> None:
        if name == "ipc":
            raise PeerLostError("rank 0 is gone", 0)
        await barrier(self, name, *arguments)

    monkeypatch.setattr(runtime, "allocate", remembered)
    monkeypatch.setattr(runtime, "ipc_open", refuse_to_open)
    monkeypatch.setattr(HostExchange, "barrier", leaving)

    async def main(rank: PathRank) -> None:
        with pytest.raises(PeerLostError):
            await rank.run(calls.all_reduce(rank.array(np.ones(9, np.float32)), ReduceOp.SUM))
        await eventually(lambda: made and all(memory._block.freed for memory in made))  # type: ignore[attr-defined]

    run_ranks(2, CudaIpcPath, main, runtime)
