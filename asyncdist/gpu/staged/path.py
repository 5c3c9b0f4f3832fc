"""StagedPath: collectives on device arrays through the host's memory, by the collectives that host arrays have.

It works wherever the host's do: between hosts without NCCL, for several ranks on one GPU, for every dtype, every
reduction (functions of the user's among them) and prefixes. It costs two copies over PCIe and the host collective;
they overlap: see `staged.line`. User memory that is pinned or shared is not used in place: the data is on the device.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Self

from asyncdist.arrays.reduce_op import ReduceOpLike
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.cuda import Provider
from asyncdist.gpu.path import DevicePath, OnEnd, Surroundings
from asyncdist.gpu.private_inputs import PrivateInputs
from asyncdist.gpu.staged.line import StagedLine, backend_name, drop_unbegun
from asyncdist.gpu.threads import Helpers

__all__ = ["StagedPath"]

CLOSE_LIMIT_S: Final = 5.0
"""How long closing waits for copies under way, which wait for nothing but the caller's kernels before them."""


class StagedPath(DevicePath):
    """See the module."""

    name: ClassVar[str] = "staged"

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._lines: dict[int, StagedLine] = {}
        self._helpers = Helpers(around.loop, (around.runtime, around.device))
        self._private = PrivateInputs(around, self._helpers)

    @classmethod
    async def open(cls, around: Surroundings) -> Self:
        """Make the path; nothing is allocated before the first operation."""
        return cls(around)

    @classmethod
    def refusal(cls, provider: Provider, device: int, collective: str, dtype: Any, op: ReduceOpLike | None) -> str:
        """What host arrays can, these can."""
        return ""

    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
        """See DevicePath."""
        if any(member.device != self._around.device for member in call.members):
            why = f"{work.operation} with arrays on several GPUs needs the nccl path, which this group does not have"
            on_end(work, TypeError(why))
            return
        line = self._lines.get(work.tag)
        if line is None:
            line = self._lines[work.tag] = StagedLine(self._around, work.tag, self._helpers)
        call, on_end = self._private.of(call, on_end)
        line.start(call, work, on_end)

    def drop(self, tag: int, sequence: int) -> None:
        """See DevicePath."""
        line = self._lines.get(tag)
        if line is None:
            drop_unbegun(self._around.exchange.host_backend(backend_name(tag)), sequence)
        else:
            line.drop(sequence)

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """See DevicePath."""
        line = self._lines.get(tag)
        return () if line is None else line.waiting_for(sequence)

    def abort(self, error: BaseException) -> None:
        """See DevicePath."""
        for line in self._lines.values():
            line.stop()

    def close(self) -> None:
        """See DevicePath."""

    async def wait_closed(self) -> None:
        """Wait, bounded, for copies under way, and give buffers back."""
        for line in self._lines.values():
            line.shut()
        self._lines.clear()
        await self._helpers.wait(CLOSE_LIMIT_S)  # lines read what is private
        self._private.close()
        await self._helpers.wait(CLOSE_LIMIT_S)
