"""CudaIpcPath: collectives of ranks on one host that can address each other's device memory, mostly on one GPU.

NCCL refuses several ranks on one GPU. Here every rank has a block of device memory that the others have opened by CUDA
IPC, and copies and reductions go through these blocks. `ipc.plan` says which, `ipc.channel` in what order, and what
ranks tell each other meanwhile. The first operation of a tag makes the blocks. If some rank cannot open another's block
(no access from GPU to GPU, no IPC in a container), that tag goes through the host, on all ranks. So do operations that
`ipc.plan` does not know.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from asyncdist.arrays.reduce_op import CustomOp, PremulSum, ReduceOp
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.concurrency import trace as events
from asyncdist.concurrency.tasks import start_task
from asyncdist.cuda.interface import MAX_SOURCES
from asyncdist.errors import DistError
from asyncdist.gpu.ipc.channel import IpcChannel, open_channel
from asyncdist.gpu.ipc.plan import PLANNED
from asyncdist.gpu.path import DevicePath, OnEnd, Surroundings
from asyncdist.gpu.staged.path import PrivateInputs, StagedPath
from asyncdist.plan.selection.selector import plan_id

CLOSE_LIMIT_S: Final = 30.0
"""How long a closing group waits until others have read what was written for them, as for sends without a receive."""

FINGERPRINTS_KEPT: Final = 256
"""Kinds of operations that are remembered, as many as the host backend keeps plans of."""

REDUCED: Final = frozenset(
    {"bool", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""Dtypes that kernels reduce. Other dtypes that the CPU reduces go through the host."""

_PLAIN: Final = frozenset(np.dtype(code) for code in "?bBhHiIlLqQefdFD")
"""The dtypes of REDUCED that numpy has itself: most arrays pass with one look-up."""

ABORT_LIMIT_S: Final = 5.0
"""How long an aborted group waits for its own work on the GPU. That work waits only for the caller's kernels."""


@dataclass(slots=True)
class _Tag:
    """A tag's channel, or what waits for the channel. `staged`: there is none, and operations go through the host."""

    channel: IpcChannel | None = None
    staged: bool = False
    held: deque[tuple[Call, CollectiveWork, OnEnd]] = field(default_factory=deque)
    dropped: list[int] = field(default_factory=list)
    opening: asyncio.Task[None] | None = None


class CudaIpcPath(DevicePath):
    """See the module."""

    name: ClassVar[str] = "ipc"

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._staged = StagedPath(around)
        self._tags: dict[int, _Tag] = {}
        self._fingerprints: dict[tuple[Any, ...], int] = {}
        self._private = PrivateInputs(around, self._helpers)

    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
        """See DevicePath."""
        if not self._is_planned(call):
            self._staged.start(call, work, on_end)
            return
        tag = self._tags.get(work.tag)
        if tag is None:
            tag = self._tags[work.tag] = _Tag()
            first = len(self._tags) == 1
            tag.opening = start_task(self._around.loop, self._open(work.tag, tag, first), name="open device memory")
        if tag.channel is not None:
            call, on_end = self._private.of(call, on_end)
            tag.channel.start(call, work, on_end, self._fingerprint(call))
        elif tag.staged:
            self._staged.start(call, work, on_end)
        else:
            tag.held.append((call, work, on_end))

    def drop(self, tag: int, sequence: int) -> None:
        """See DevicePath."""
        self._staged.drop(tag, sequence)
        found = self._tags.get(tag)
        if found is None:
            return
        if found.channel is not None:
            found.channel.drop(sequence)
        else:
            found.held = deque(entry for entry in found.held if entry[1].number != sequence)
            found.dropped.append(sequence)

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """See DevicePath."""
        found = self._tags.get(tag)
        members: tuple[int, ...] = ()
        if found is not None and found.channel is not None:
            members = found.channel.waiting_for(sequence)
        elif found is not None and any(work.number == sequence for _, work, _ in found.held):
            return next(filter(None, (self._around.exchange.waiting_for("ipc", tag, step) for step in range(3))), ())
        return tuple(self._around.ranks[member] for member in members) or self._staged.waiting_for(tag, sequence)

    def describe(self) -> str:
        """`ipc`, and how many tags go through the host."""
        staged = sum(tag.staged for tag in self._tags.values())
        return f"{self.name} ({staged} of {len(self._tags)} tags staged)" if staged else self.name

    # Opening.

    async def _open(self, number: int, tag: _Tag, first: bool) -> None:
        error: DistError | None = None
        try:
            tag.channel = await open_channel(self._around, number, first=first)
            tag.staged = tag.channel is None
        except DistError as failure:
            error = failure
        tag.opening = None
        events.info("group %x tag %d: path %s", self._around.group_id, number, "staged" if tag.staged else "ipc")
        held, tag.held = tag.held, deque()
        dropped, tag.dropped = tag.dropped, []
        if tag.channel is not None:
            for sequence in dropped:
                tag.channel.drop(sequence)
        for call, work, on_end in held:
            if error is not None:
                on_end(work, error)
            else:
                self.start(call, work, on_end)

    def _is_planned(self, call: Call) -> bool:
        """Whether a call goes through device memory; all ranks say the same."""
        if call.collective not in PLANNED or call.shares != 1 or isinstance(call.op, CustomOp):
            return False
        if len(self._around.ranks) > MAX_SOURCES:  # as many as one kernel reads
            return False
        if call.op is not None and call.dtype not in _PLAIN and call.dtype.name not in REDUCED:
            return False
        return all(member.device == self._around.device for member in call.members)

    def _fingerprint(self, call: Call) -> int:
        found = self._fingerprints.get(call.recipe_key)
        if found is None:
            if len(self._fingerprints) >= FINGERPRINTS_KEPT:
                self._fingerprints.clear()
            op = ReduceOp.PREMUL_SUM if isinstance(call.op, PremulSum) else call.op  # factors may differ between ranks
            detail = f"{call.dtype.name} {op!r} {call.detail} on GPUs"
            found = plan_id(call.collective, self.name, len(self._around.ranks), call.counts, call.root, detail)
            self._fingerprints[call.recipe_key] = found
        return found

    # The end.

    def abort(self, error: BaseException) -> None:
        """See DevicePath."""
        self._staged.abort(error)
        self._cancel_opening()
        for tag in self._tags.values():
            tag.held.clear()
            if tag.channel is not None:
                tag.channel.stop()

    def close(self) -> None:
        """See DevicePath."""
        self._staged.close()
        self._cancel_opening()

    async def wait_closed(self) -> None:
        """Close the others' blocks once nothing here reads them, and free ours once no rank reads it."""
        opening = [tag.opening for tag in self._tags.values() if tag.opening is not None]
        if opening:
            await asyncio.wait(opening)
        await asyncio.gather(*(self._close_tag(tag) for tag in self._tags.values()))
        self._tags.clear()
        self._private.close()
        await self._staged.wait_closed()
        await self._helpers.wait(ABORT_LIMIT_S)

    def _cancel_opening(self) -> None:
        for tag in self._tags.values():
            if tag.opening is not None:
                tag.opening.cancel()

    async def _close_tag(self, tag: _Tag) -> None:
        channel, tag.channel = tag.channel, None
        if channel is not None:
            await channel.shut(self._helpers, ABORT_LIMIT_S if channel.closed else CLOSE_LIMIT_S)
