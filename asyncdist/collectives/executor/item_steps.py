"""ItemSteps: how an execution gives its lane items, and takes those of others (`shared.operation.SharedExecution`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.collectives.executor.buffers import Bound
from asyncdist.collectives.executor.program import COPY, FETCH, REDUCE, Instruction, Program
from asyncdist.collectives.executor.scratch import ScratchPool
from asyncdist.collectives.shared.operation import another_length, different
from asyncdist.transport.shared_memory.process_memory import RemoteBytes

__all__ = ["ItemSteps"]

READ_BYTES: Final = 512 << 10
"""What is read of another process's memory at a time to be reduced: it is still in this core's cache then."""


class ItemSteps:
    """A part of `runner.Execution`, which has what is declared here."""

    __slots__ = ()

    _buffers: Sequence[Bound]
    _itemsize: int
    _pool: ScratchPool
    _program: Program

    def _apply(self, kind: int, source: Array, target: Array, left: bool) -> None:
        raise NotImplementedError

    def payload(self, step: Instruction) -> memoryview:
        """The bytes that a step publishes."""
        return self._buffers[step.buffer].octets(step.start, step.stop)

    def take(self, step: Instruction, item: memoryview | RemoteBytes, begin: int, most: int) -> int:
        """Copy or reduce a part of a published item into the step's target, from byte `begin` of that on.

        Where more than `most` bytes are left, takes so many, and returns where to go on; 0 once all is taken.

        Raises CollectiveMismatchError, Unreadable.
        """
        target, itemsize, offset = self._buffers[step.buffer].elements(step.start, step.stop), self._itemsize, 0
        if self._program.whole:
            self._check_length(step, target.nbytes, len(item))
        else:
            offset = step.source_start * itemsize
            if len(item) < step.source_stop * itemsize:
                raise different(self.rank_of(step.peer))
        nbytes = target.nbytes
        end = nbytes if nbytes - begin <= most else begin + max(1, most // itemsize) * itemsize
        if end - begin < nbytes:
            target = target[begin // itemsize : end // itemsize]
        if isinstance(item, RemoteBytes):
            self._read(step, item, offset + begin, target)
        else:
            source = np.frombuffer(item, target.dtype, target.size, offset + begin)
            self._apply(COPY if step.kind == FETCH else REDUCE, source, target, step.left)
        return end if end < nbytes else 0

    def _check_length(self, step: Instruction, expected: int, nbytes: int) -> None:
        if nbytes != expected:
            raise another_length(self.rank_of(step.peer), nbytes, expected)

    def _read(self, step: Instruction, item: RemoteBytes, begin: int, target: Array) -> None:
        """The same of memory that only the kernel can read, from byte `begin` of it on."""
        itemsize = self._itemsize
        if step.kind == FETCH:
            item.read(begin, target)
            return
        length = max(1, READ_BYTES // itemsize)
        staging = self._pool.take(min(length, target.size) * itemsize)
        try:
            for start in range(0, target.size, length):
                part = target[start : start + length]
                source = staging[: part.nbytes].view(part.dtype)
                item.read(begin + start * itemsize, source)
                self._apply(REDUCE, source, part, step.left)
        finally:
            self._pool.give(staging)

    def rank_of(self, member: int) -> int:
        """The global rank of a group rank, for messages."""
        raise NotImplementedError
