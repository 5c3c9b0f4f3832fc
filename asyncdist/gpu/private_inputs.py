"""PrivateInputs: copies of what a call reads, where it would write over that before it has read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from asyncdist.arrays.device import DeviceArray
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.cuda.interface import Event, Memory, Stream
from asyncdist.gpu.closing import close_behind
from asyncdist.gpu.path import OnEnd, Surroundings
from asyncdist.gpu.runs import clash
from asyncdist.gpu.threads import Helpers

__all__ = ["PrivateInputs"]

ALIGN_BYTES: Final = 256
"""Where copies begin: what CUDA's own allocations are aligned to."""


class PrivateInputs:
    """Of one path. Host collectives copy such inputs as well; here the copies are on the device, and only for these."""

    def __init__(self, around: Surroundings, helpers: Helpers) -> None:
        self._around = around
        self._helpers = helpers
        self._stream: Stream | None = None
        self._blocks: set[Memory] = set()
        self._ready: set[Event] = set()

    def of(self, call: Call, on_end: OnEnd) -> tuple[Call, OnEnd]:
        """What to carry out in place of `call`, and what to call at its end: mostly the same.

        Memory is allocated here and now, as operations must keep their order; it is freed in a thread.
        """
        around = self._around
        if not clash(call, around.rank, len(around.ranks)):
            return call, on_end
        if self._stream is None:
            self._stream = around.runtime.new_stream(around.device)
        stream = self._stream
        for ready in call.ready:
            stream.wait_event(ready)
        memory: list[Memory] = []
        try:
            copied = self._copy(call, stream, memory)
        finally:  # also of a copy that failed, behind others
            self._blocks.update(memory)
        ready = around.events.recorded(stream)
        copied.ready = (ready,)
        self._ready.add(ready)

        def ended(work: CollectiveWork, error: BaseException | None) -> None:
            self._ready.discard(ready)
            around.events.give((ready,))
            self._free(memory)
            on_end(work, error)

        return copied, ended

    def close(self) -> None:
        """Nothing is under way any more; free also what belonged to operations that were dropped."""
        self._around.events.give(self._ready)
        self._ready.clear()
        if self._stream is None:
            return
        around, blocks = self._around, tuple(self._blocks)
        self._blocks.clear()
        self._helpers.start(close_behind, around.runtime, around.device, (self._stream,), blocks)
        self._stream = None

    def _free(self, blocks: Sequence[Memory]) -> None:
        for block in blocks:
            if block in self._blocks:
                self._blocks.discard(block)
                self._helpers.start(block.close)

    def _copy(self, call: Call, stream: Stream, memory: list[Memory]) -> Call:
        if call.members:
            return replace(call, members=[self._copy(member, stream, memory) for member in call.members])
        arrays: Sequence[Any] = call.inputs if call.pieces is None else call.pieces[0]
        total = sum(_aligned(array.nbytes) for array in arrays)
        block = self._around.runtime.allocate(max(total, ALIGN_BYTES), self._around.device)
        memory.append(block)
        copies: list[Any] = []
        at = block.pointer
        for array in arrays:
            self._around.runtime.copy(at, array.pointer, array.nbytes, stream)
            copies.append(DeviceArray(at, (array.size,), array.dtype, self._around.device, owner=(array, block)))
            at += _aligned(array.nbytes)
        if call.pieces is None:
            return replace(call, inputs=copies)
        return replace(call, pieces=(copies, call.pieces[1]))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
