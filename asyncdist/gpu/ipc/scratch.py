"""IpcScratch: one block of device memory per rank that all ranks of a group can read, cut into slots.

Every rank allocates a block of its own, as handles are of whole allocations, and sends its handle to the others, who
open it: once per group and tag, as opening costs far more than an operation. A block is freed by its owner only when
all others have closed it; CUDA leaves undefined what happens otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from asyncdist.concurrency import trace as events
from asyncdist.concurrency.tasks import start_task
from asyncdist.cuda.interface import Memory, Runtime
from asyncdist.errors import DistBackendError
from asyncdist.gpu.extents import ALIGN_BYTES
from asyncdist.gpu.ipc.plan import Place
from asyncdist.gpu.path import Surroundings
from asyncdist.gpu.threads import close_all, in_thread, made_in_thread

__all__ = ["LARGE_BYTES", "LARGE_SLOTS", "SMALL_BYTES", "SMALL_SLOTS", "IpcScratch", "large_slot", "open_scratch"]

SMALL_BYTES: Final = 256 << 10
"""Slot of a small operation: up to here launching kernels and telling others cost more than moving the bytes."""
SMALL_SLOTS: Final = 8
"""Small operations of a tag under way on the GPU at once: what it takes to hide the time that signals need."""
LARGE_BYTES: Final = 32 << 20
"""Slot of a chunk on a GPU with LEAST_MEMORY or less; with more memory, larger in proportion, up to MOST_MEMORY.

Processes on one GPU take turns, and to switch between them takes as long whatever is done in a turn: it should be much.
"""
LEAST_MEMORY: Final = 16 << 30
MOST_MEMORY: Final = 64 << 30
LARGE_SLOTS: Final = 2
"""One is read by the others while the next is written."""
OTHER_TAGS_LARGE_BYTES: Final = 4 << 20
"""The same for tags of a group after its first: a job has one tag with large operations as a rule."""

_OFFER: Final = struct.Struct("<Q64s")
_OFFERED: Final = 0
_OPENED: Final = 1
_EXCHANGE: Final = "ipc"


def large_slot(memory_bytes: int) -> int:
    """Bytes of a large slot of a group's first tag, on a GPU with so much memory."""
    return LARGE_BYTES * min(max(memory_bytes, LEAST_MEMORY), MOST_MEMORY) // LEAST_MEMORY


class IpcScratch:
    """The blocks of all ranks, as this one sees them. `pointers[rank]` is where that rank's begins here."""

    def __init__(self, runtime: Runtime, own: Memory, rank: int, pointers: Sequence[int], large_bytes: int) -> None:
        self._runtime = runtime
        self._own = own
        self._rank = rank
        self._pointers = list(pointers)
        self.small_bytes = SMALL_BYTES
        self.large_bytes = large_bytes

    def address(self, place: Place, slot: int) -> int:
        """The address here of a place in a slot; of the caller's memory, the place's own."""
        if place.rank < 0:
            return place.offset
        start = slot * self.small_bytes
        if slot >= SMALL_SLOTS:
            start = SMALL_SLOTS * self.small_bytes + (slot - SMALL_SLOTS) * self.large_bytes
        return self._pointers[place.rank] + start + place.offset

    def close_others(self) -> None:
        """Close what belongs to others; blocks, so to be called in a thread, once nothing here reads it."""
        for rank, pointer in enumerate(self._pointers):
            if rank != self._rank and pointer:
                with contextlib.suppress(DistBackendError):  # its owner has died, as a rule
                    self._runtime.ipc_close(pointer)

    def free(self) -> None:
        """Free our own block; blocks, so to be called in a thread, once all others have closed it."""
        self._own.close()

    def undo(self) -> None:
        """Close and free everything, in a thread: it was made in vain."""
        self.close_others()
        self.free()


async def open_scratch(around: Surroundings, tag: int, *, first: bool) -> IpcScratch | None:
    """Make the blocks of a tag, together with all ranks; None, on all of them, if some rank could not.

    Raises what the exchange does when a rank is gone. Cancelling frees our block (the others see a rank that is gone).
    """
    loop, runtime = around.loop, around.runtime
    on = around.on
    own, large_bytes, handle, problem = await made_in_thread(
        loop, _make_block, runtime, around.device, first, on=on, discard=_free_made
    )
    opened: list[int] = []
    working: asyncio.Future[Any] | None = None
    try:
        offer = _OFFER.pack(large_bytes, handle)
        offers = [
            _OFFER.unpack(message) for message in await around.exchange.all_gather(_EXCHANGE, tag, _OFFERED, offer)
        ]
        agreed_bytes = min(nbytes for nbytes, _ in offers)
        if agreed_bytes and own is not None:
            handles = [handle for _, handle in offers]
            working = in_thread(loop, _open_blocks, around, own, handles, opened, on=on)
            problem = await asyncio.shield(working)
        able = await around.exchange.all_gather(
            _EXCHANGE, tag, _OPENED, b"\0" if problem or not agreed_bytes else b"\1"
        )
        if problem:
            events.info("group %x tag %d: no CUDA IPC: %s", around.group_id, tag, problem)
        if own is not None and all(message == b"\1" for message in able):
            return IpcScratch(runtime, own, around.rank, opened, agreed_bytes // ALIGN_BYTES * ALIGN_BYTES)
        working = in_thread(loop, _close_opened, around, opened, on=on)
        await asyncio.shield(working)
        await around.exchange.barrier(_EXCHANGE, tag, _OPENED + 1)  # no rank has ours open any more
    except BaseException:
        undoing = _undo_after(working, around, own, opened)
        await asyncio.shield(start_task(loop, undoing, name="close memory of others"))
        raise
    await in_thread(loop, _undo, around, own, opened, on=on)
    return None


_Made: TypeAlias = tuple[Memory | None, int, bytes, str]
"""Our block, the length of its large slots, and its handle; or None, 0, b"", and why there is none."""


def _make_block(runtime: Runtime, device: int, first: bool) -> _Made:
    own: Memory | None = None
    try:
        wanted_bytes = large_slot(runtime.memory_size(device)) if first else OTHER_TAGS_LARGE_BYTES
        own, large_bytes = _allocate(runtime, device, wanted_bytes)
        return own, large_bytes, runtime.ipc_handle(own.pointer), ""
    except Exception as error:  # out of memory, or no IPC, as in some containers
        if own is not None:
            close_all(own)
        return None, 0, b"", f"{type(error).__name__}: {error}"


def _allocate(runtime: Runtime, device: int, large_bytes: int) -> tuple[Memory, int]:
    """Allocate a block; return it and the length of its large slots: LARGE_BYTES where memory is too short for more."""
    try:
        return runtime.allocate(SMALL_SLOTS * SMALL_BYTES + LARGE_SLOTS * large_bytes, device), large_bytes
    except DistBackendError:
        if large_bytes <= LARGE_BYTES:
            raise
    return _allocate(runtime, device, LARGE_BYTES)


def _free_made(made: _Made) -> None:
    """Free a block whose caller was cancelled."""
    if made[0] is not None:
        made[0].close()


def _open_blocks(around: Surroundings, own: Memory, handles: Sequence[bytes], opened: list[int]) -> str:
    """Open all other ranks' blocks, into `opened`; return why not, if that fails."""
    for rank, handle in enumerate(handles):
        try:
            opened.append(own.pointer if rank == around.rank else around.runtime.ipc_open(handle, around.device))
        except Exception as error:
            return f"the memory of rank {around.ranks[rank]} cannot be opened: {type(error).__name__}: {error}"
    return ""


def _close_opened(around: Surroundings, opened: list[int]) -> None:
    """Close all others' blocks, and empty `opened`."""
    while opened:
        pointer = opened.pop()
        if len(opened) != around.rank:
            with contextlib.suppress(DistBackendError):
                around.runtime.ipc_close(pointer)


async def _undo_after(
    working: asyncio.Future[Any] | None, around: Surroundings, own: Memory | None, opened: list[int]
) -> None:
    """Close all blocks, once the thread that opens or closes them is through: it goes on when we are cancelled."""
    if working is not None:
        await asyncio.wait([working])
    await in_thread(around.loop, _undo, around, own, opened, on=around.on)


def _undo(around: Surroundings, own: Memory | None, opened: list[int]) -> None:
    _close_opened(around, opened)
    if own is not None:
        own.close()
