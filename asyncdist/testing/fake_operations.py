"""What a fake communicator queues on its stream: one rank's side of an operation, and several launched together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.collectives.executor.reduction import finish, kernel, prepare
from asyncdist.testing.fake_queues import Span, Step

if TYPE_CHECKING:
    from asyncdist.testing.fake_nccl import FakeCommunicator

__all__ = ["Call", "Launch", "Op"]

Op: TypeAlias = ReduceOp | PremulSum


@dataclass(slots=True)
class Call:
    """One operation of one rank."""

    communicator: FakeCommunicator
    who: int
    """The rank, as `Meeting.bring` wants it."""

    slot: str
    expected: tuple[int, ...]
    words: str
    source: Span | None
    target: Span | None
    dtype: np.dtype[Any]
    op: Op | None = None
    part: int | None = None
    """Which rank's part of the contributions, or of the result, is meant; None for all of it."""

    brought: bool = False
    results: dict[int, bytes] | None = None

    def ready(self) -> bool:
        """Bring what this rank has, the first time; then see whether everybody has come."""
        communicator = self.communicator
        if communicator.state == "aborted":
            return True
        if not self.brought:
            self.brought = True
            communicator.meeting.bring(self.slot, self.who, self.expected, self.words, self._contribution())
            communicator.nccl.runtime.scheduler.news += 1
        if self.results is None:
            self.results = communicator.meeting.take(self.slot, self.who)
        return self.results is not None

    def _contribution(self) -> bytes:
        if self.source is None:
            return b""
        octets = self.communicator.nccl.runtime.view(*self.source).copy()
        if self.op is not None:
            prepare(self.op, octets.view(self.dtype))
        return octets.tobytes()

    def run(self) -> None:
        self.communicator.pending -= 1
        if self.results is None or self.target is None or self.communicator.state == "aborted":
            return
        pointer, nbytes = self.target
        if self.op is not None:
            octets = _reduced([self.results[rank] for rank in sorted(self.results)], self.dtype, self.op)
            start = self.part * nbytes if self.part is not None else 0
            octets = octets[start : start + nbytes]
        elif self.part is not None:
            octets = self.results[self.part]
        else:
            octets = b"".join(self.results[rank] for rank in sorted(self.results))
        self.communicator.nccl.runtime.view(pointer, nbytes)[:] = np.frombuffer(octets, np.uint8)


class Launch(Step):
    """Operations that progress together."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__([span for call in calls for span in (call.source, call.target) if span is not None])
        self._calls = calls

    def ready(self) -> bool:
        return sum(call.ready() for call in self._calls) == len(self._calls)  # not all(): each must bring its part

    def run(self) -> None:
        for call in self._calls:
            call.run()


def _reduced(contributions: Sequence[bytes], dtype: np.dtype[Any], op: Op) -> bytes:
    operands = [np.frombuffer(contribution, np.uint8).view(dtype).copy() for contribution in contributions]
    function = kernel(op, dtype)
    for operand in operands[1:]:
        function(operands[0], operand, operands[0])
    finish(op, operands[0], len(operands))
    return operands[0].tobytes()
