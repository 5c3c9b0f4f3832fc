"""StagedPath: collectives on GPU arrays through the host's memory, by the collectives of host arrays.

The path works wherever the host's collectives do: between hosts without NCCL, for several ranks on one GPU, for every
dtype, every reduction (also functions of the user) and prefixes. It costs two copies over PCIe and the host collective,
which overlap: see `staged.pipeline`. `PrivateInputs` serve all paths that would overwrite an input before it is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from asyncdist.arrays.device import DeviceArray
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.cuda.interface import Event, Memory, Stream
from asyncdist.gpu.extents import ALIGN_BYTES, aligned, clash
from asyncdist.gpu.path import DevicePath, OnEnd, Surroundings
from asyncdist.gpu.staged.pipeline import DROPPED_KEPT, StagedPipeline, backend_name, drop_unbegun
from asyncdist.gpu.threads import Helpers, close_behind

CLOSE_LIMIT_S: Final = 5.0
"""How long closing waits for copies under way. They wait only for the caller's kernels."""


class StagedPath(DevicePath):
    """See the module."""

    name: ClassVar[str] = "staged"

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._pipelines: dict[int, StagedPipeline] = {}
        self._dropped: dict[int, deque[int]] = {}  # by tag, before there is a pipeline
        self._private = PrivateInputs(around, self._helpers)

    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
        """See DevicePath."""
        if any(member.device != self._around.device for member in call.members):
            why = f"{work.operation} with arrays on several GPUs needs the nccl path, which this group does not have"
            on_end(work, TypeError(why))
            return
        pipeline = self._pipelines.get(work.tag)
        if pipeline is None:
            dropped = self._dropped.pop(work.tag, ())
            pipeline = self._pipelines[work.tag] = StagedPipeline(self._around, work.tag, self._helpers, dropped)
            self._around.owner.watch_parts(pipeline.parts_id, work.tag)
        call, on_end = self._private.of(call, on_end)
        pipeline.start(call, work, on_end)

    def drop(self, tag: int, sequence: int) -> None:
        """See DevicePath."""
        pipeline = self._pipelines.get(tag)
        if pipeline is None:
            self._dropped.setdefault(tag, deque(maxlen=DROPPED_KEPT)).append(sequence)
            drop_unbegun(self._around, self._around.exchange.host_backend(backend_name(tag)), sequence)
        else:
            pipeline.drop(sequence)

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """See DevicePath."""
        pipeline = self._pipelines.get(tag)
        return () if pipeline is None else pipeline.waiting_for(sequence)

    def abort(self, error: BaseException) -> None:
        """See DevicePath."""
        for pipeline in self._pipelines.values():
            pipeline.stop()

    async def wait_closed(self) -> None:
        """Wait, bounded, for copies under way, and give buffers back."""
        for pipeline in self._pipelines.values():
            pipeline.shut()
        self._pipelines.clear()
        await self._helpers.wait(CLOSE_LIMIT_S)  # pipelines read what is private
        self._private.close()
        await self._helpers.wait(CLOSE_LIMIT_S)


class PrivateInputs:
    """Copies, on the device, of inputs that a call would overwrite before it has read them. Of one path."""

    def __init__(self, around: Surroundings, helpers: Helpers) -> None:
        self._around = around
        self._helpers = helpers
        self._stream: Stream | None = None
        self._blocks: set[Memory] = set()
        self._ready: set[Event] = set()

    def of(self, call: Call, on_end: OnEnd) -> tuple[Call, OnEnd]:
        """The call to carry out in place of `call`, and the callback at its end: mostly the same.

        Memory is allocated here and now, as operations must keep their order. A thread frees it.
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
        """Free everything, also for operations that were dropped. Nothing is under way any more."""
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
        total = sum(aligned(array.nbytes) for array in arrays)
        block = self._around.runtime.allocate(max(total, ALIGN_BYTES), self._around.device)
        memory.append(block)
        copies: list[Any] = []
        at = block.pointer
        for array in arrays:
            self._around.runtime.copy(at, array.pointer, array.nbytes, stream)
            copies.append(DeviceArray(at, (array.size,), array.dtype, self._around.device, owner=(array, block)))
            at += aligned(array.nbytes)
        if call.pieces is None:
            return replace(call, inputs=copies)
        return replace(call, pieces=(copies, call.pieces[1]))
