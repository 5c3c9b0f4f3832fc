"""How much Python an awaited operation on small GPU arrays is: little else is its cost, so it is counted and bounded.

Objects and calls of Python by C (`partial`, `map`, generators) take the longest; they are calls of functions as well.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cupy_kit import Bindings, install, uninstall

import asyncdist as dist
from asyncdist import HashStore
from asyncdist.concurrency import spin
from asyncdist.cuda import Provider, provider

TIMES = 10

LAUNCHED = ["eventRecord", "streamWaitEvent", "{}", "eventRecord"]
"""What is asked of cupy, the device and whether the event is done aside."""

Once = Callable[[Any, Any], Awaitable[Any]]

OPERATIONS: dict[str, tuple[Once, str, int]] = {
    "all_reduce": (lambda x, y: dist.all_reduce(x), "allReduce", 52),
    "broadcast": (lambda x, y: dist.broadcast(x, 0), "broadcast", 64),
    "reduce": (lambda x, y: dist.reduce(x, 0), "reduce", 62),
    "all_gather_into_tensor": (lambda x, y: dist.all_gather_into_tensor(y, x), "allGather", 66),
    "reduce_scatter_tensor": (lambda x, y: dist.reduce_scatter_tensor(y, x), "reduceScatter", 66),
}
"""By name: what begins it, what becomes of it in NCCL, and how many functions of asyncdist's it may call."""


class CupyArray:
    """cupy's array, as far as it is asked."""

    def __init__(self, pointer: int) -> None:
        self.data = SimpleNamespace(ptr=pointer, device_id=0)
        self.shape = (256,)
        self.dtype = np.dtype(np.float32)
        self.flags = SimpleNamespace(c_contiguous=True)


@pytest.fixture(name="bindings")
def a_gpu_through_cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bindings]:
    bindings = Bindings()
    cuda = install(bindings, monkeypatch)
    monkeypatch.setattr(sys.modules["cupy"], "ndarray", CupyArray, raising=False)
    monkeypatch.setattr(sys.modules["asyncdist.cuda.cupy_runtime"], "device_uuid", lambda device: f"gpu-{device}")
    monkeypatch.setattr(spin, "TURN_S", math.inf)  # a turn of the loop between two of them would count too
    with provider.override(Provider(cuda.runtime, cuda.nccl)):
        yield bindings
    uninstall()


async def calls_of(once: Callable[[], Awaitable[Any]]) -> float:
    """Functions of asyncdist's that are called each time."""
    calls = 0

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and str(frame.f_globals.get("__name__")).startswith("asyncdist.")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(TIMES):
            await once()
    finally:
        sys.setprofile(before)
    return calls / TIMES


@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_awaited_operation_is_so_many_calls_at_most(name: str, bindings: Bindings) -> None:
    begin, in_nccl, most = OPERATIONS[name]
    x, y = CupyArray(0x1000), CupyArray(0x2000)
    async with dist.init_process_group(store=HashStore(), rank=0, world_size=1):
        for _ in range(3):  # the first opens communicators, and what follows may be remembered
            await begin(x, y)
        bindings.calls.clear()
        assert await calls_of(lambda: begin(x, y)) <= most
        asked = [call for call in bindings.names() if call != "eventQuery"]
        assert asked == [what.format(in_nccl) for what in LAUNCHED] * TIMES


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "reduce_scatter_tensor"])
async def test_what_shares_memory_with_its_result_is_copied_first(name: str, bindings: Bindings) -> None:
    """So that looking for that once, quickly, does not miss it."""
    begin, in_nccl, _ = OPERATIONS[name]
    whole = CupyArray(0x1000)
    async with dist.init_process_group(store=HashStore(), rank=0, world_size=1):
        for offset, copied in ((0, False), (4, True), (-4, True), (1023, True), (1024, False), (-1024, False)):
            bindings.calls.clear()
            await begin(CupyArray(0x1000 + offset), whole)
            assert bindings.names().count(in_nccl) == 1
            assert ("memcpyAsync" in bindings.names()) is copied, offset


async def test_they_are_counted() -> None:
    async def once() -> None:
        dist.is_initialized()

    assert await calls_of(once) >= 1
