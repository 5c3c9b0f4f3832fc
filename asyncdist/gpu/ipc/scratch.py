"""IpcScratch: one block of device memory per rank, cut into slots, that all ranks of a group can read.

Every rank allocates a block of its own, as handles are of whole allocations, and sends its handle to the others. They
open the block once per group and tag, as that takes far longer than an operation. The owner frees a block only once all
others have closed it: CUDA leaves undefined what happens otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Sequence
from typing import Final

from asyncdist.concurrency import trace as events
from asyncdist.concurrency.tasks import start_task
from asyncdist.cuda.interface import Memory, Runtime
from asyncdist.errors import DistBackendError
from asyncdist.gpu.extents import ALIGN_BYTES
from asyncdist.gpu.ipc.plan import Place
from asyncdist.gpu.path import Surroundings
from asyncdist.gpu.threads import close_all, in_thread, made_in_thread

SMALL_BYTES: Final = 256 << 10
"""Slot of a small operation: up to here kernel launches and signals take longer than moving the bytes."""
SMALL_SLOTS: Final = 8
"""Small operations of a tag that are on the GPU at once: enough to hide the time of signals."""
LARGE_BYTES: Final = 32 << 20
"""Slot of a chunk on a GPU with LEAST_MEMORY or less. More memory, up to MOST_MEMORY: larger in proportion.

Processes on one GPU take turns. A switch takes as long whatever is done in a turn, so a turn should do much.
"""
LEAST_MEMORY: Final = 16 << 30
MOST_MEMORY: Final = 64 << 30
LARGE_SLOTS: Final = 2
"""The others read one while the next is written."""
OTHER_TAGS_LARGE_BYTES: Final = 4 << 20
"""LARGE_BYTES for tags of a group after its first. As a rule a job has one tag with large operations."""

_OFFER: Final = struct.Struct("<Q64s")
_OFFERED: Final = 0
_OPENED: Final = 1
_EXCHANGE: Final = "ipc"


def large_slot(memory_bytes: int) -> int:
    """Bytes of a large slot of a group's first tag, on a GPU with so much memory."""
    return LARGE_BYTES * min(max(memory_bytes, LEAST_MEMORY), MOST_MEMORY) // LEAST_MEMORY


class IpcScratch:
    """The blocks of all ranks, as this rank sees them. All methods but `address` block: call them in threads."""

    def __init__(self, around: Surroundings, first: bool) -> None:
        """Allocate our block; `problem` says why there is none, if so."""
        self._runtime = runtime = around.runtime
        self._around = around
        self._own: Memory | None = None
        self._pointers: list[int] = []
        """By rank, where the block begins here."""
        self.small_bytes = SMALL_BYTES
        self.large_bytes = 0
        self.handle = b""
        self.problem = ""
        try:
            wanted_bytes = large_slot(runtime.memory_size(around.device)) if first else OTHER_TAGS_LARGE_BYTES
            self._own, self.large_bytes = _allocate(runtime, around.device, wanted_bytes)
            self.handle = runtime.ipc_handle(self._own.pointer)
        except Exception as error:  # out of memory, or no IPC, as in some containers
            if self._own is not None:
                close_all(self._own)
            self._own, self.large_bytes = None, 0
            self.problem = f"{type(error).__name__}: {error}"

    def address(self, place: Place, slot: int) -> int:
        """The address here of a place in a slot; for the caller's memory, the place's own."""
        if place.rank < 0:
            return place.offset
        start = slot * self.small_bytes
        if slot >= SMALL_SLOTS:
            start = SMALL_SLOTS * self.small_bytes + (slot - SMALL_SLOTS) * self.large_bytes
        return self._pointers[place.rank] + start + place.offset

    def open_others(self, handles: Sequence[bytes]) -> None:
        """Open all other ranks' blocks; `problem` says why not, if that fails."""
        around, own = self._around, self._own
        assert own is not None
        for rank, handle in enumerate(handles):
            try:
                is_own = rank == around.rank
                self._pointers.append(own.pointer if is_own else self._runtime.ipc_open(handle, around.device))
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                self.problem = f"the memory of rank {around.ranks[rank]} cannot be opened: {why}"
                return

    def close_others(self) -> None:
        """Close the blocks of all others, once nothing here reads them."""
        pointers, self._pointers = self._pointers, []
        for rank, pointer in enumerate(pointers):
            if rank != self._around.rank:
                with contextlib.suppress(DistBackendError):  # its owner has died, as a rule
                    self._runtime.ipc_close(pointer)

    def free(self) -> None:
        """Free our own block, once all others have closed it."""
        if self._own is not None:
            self._own.close()

    def undo(self) -> None:
        """Close and free everything: the blocks are not used."""
        self.close_others()
        self.free()


def _allocate(runtime: Runtime, device: int, large_bytes: int) -> tuple[Memory, int]:
    """Allocate a block; return it and the length of its large slots: LARGE_BYTES where memory is too short for more."""
    try:
        return runtime.allocate(SMALL_SLOTS * SMALL_BYTES + LARGE_SLOTS * large_bytes, device), large_bytes
    except DistBackendError:
        if large_bytes <= LARGE_BYTES:
            raise
    return _allocate(runtime, device, LARGE_BYTES)


async def open_scratch(around: Surroundings, tag: int, *, first: bool) -> IpcScratch | None:
    """Make the blocks of a tag, together with all ranks; None, on all of them, if some rank could not.

    Raises what the exchange does when a rank is gone. Cancelling frees our block (the others see a rank that is gone).
    """
    loop, on, exchange = around.loop, around.on, around.exchange
    scratch = await made_in_thread(loop, IpcScratch, around, first, on=on, discard=IpcScratch.free)
    working: asyncio.Future[None] | None = None
    try:
        offer = _OFFER.pack(scratch.large_bytes, scratch.handle)
        offers = [_OFFER.unpack(told) for told in await exchange.all_gather(_EXCHANGE, tag, _OFFERED, offer)]
        agreed_bytes = min(nbytes for nbytes, _ in offers)
        if agreed_bytes and not scratch.problem:
            working = in_thread(loop, scratch.open_others, [handle for _, handle in offers], on=on)
            await asyncio.shield(working)
        able = b"\1" if agreed_bytes and not scratch.problem else b"\0"
        told = await exchange.all_gather(_EXCHANGE, tag, _OPENED, able)
        if scratch.problem:
            events.info("group %x tag %d: no CUDA IPC: %s", around.group_id, tag, scratch.problem)
        if all(message == b"\1" for message in told):
            scratch.large_bytes = agreed_bytes // ALIGN_BYTES * ALIGN_BYTES
            return scratch
        working = in_thread(loop, scratch.close_others, on=on)
        await asyncio.shield(working)
        await exchange.barrier(_EXCHANGE, tag, _OPENED + 1)  # no rank has ours open any more
    except BaseException:
        undoing = _undo_after(working, scratch, around)
        await asyncio.shield(start_task(loop, undoing, name="close memory of others"))
        raise
    await in_thread(loop, scratch.undo, on=on)
    return None


async def _undo_after(working: asyncio.Future[None] | None, scratch: IpcScratch, around: Surroundings) -> None:
    """Undo once the thread that opens or closes blocks is through: the thread goes on when the caller is cancelled."""
    if working is not None:
        await asyncio.wait([working])
    await in_thread(around.loop, scratch.undo, on=around.on)
