"""The floors: the bare-socket program of `bench.floors`, and raw copies of memory."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np

from bench.adapters.base import Adapter, Start
from bench.cases import RankContext
from bench.floors import FloorMesh
from bench.operations import Buffers
from bench.verify import Array, bytes_of


class Floor(Adapter):
    """One rank of the least honest program. Option ``family``: unix, else TCP over loopback."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._mesh = FloorMesh(self.rank, self.size, context.directory, unix=context.options.get("family") == "unix")
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    async def open(self) -> None:
        await self._mesh.open()

    async def close(self) -> None:
        self._mesh.close()

    def barrier(self) -> Any:
        return self._mesh.barrier()

    def prepare(self, operation: str, buffers: Buffers) -> Start:
        if operation == "barrier":
            return self._mesh.barrier
        return partial(self._mesh.all_reduce, buffers.output, np.empty_like(buffers.output))

    def message(self, array: Array) -> Any:
        """Messages are views of bytes."""
        return bytes_of(array)

    def send(self, array: Any, peer: int) -> Any:
        """Send under the next tag; both sides count alike."""
        number = self._sent[peer] = self._sent.get(peer, 0) + 1
        return self._mesh.send(array, peer, number)

    def receive(self, array: Any, peer: int) -> Any:
        """Post a receive under the next tag."""
        number = self._received[peer] = self._received.get(peer, 0) + 1
        return self._mesh.receive(array, peer, number)


class Memcpy(Floor):
    """Raw copies: every rank copies as many bytes as the case's size once, at the same time as the others.

    A message is one copy by its receiver. Nothing travels, so there is nothing to verify; it bounds from below what any
    program can do that leaves the result where its user wants it.
    """

    verifies = False

    def allocate(self, elements: int) -> Array:
        """Return an array that has its pages."""
        return np.zeros(elements, np.float32)

    def prepare(self, operation: str, buffers: Buffers) -> Start:
        larger = max(buffers.input, buffers.output, key=lambda array: array.size)
        source, target = np.ones_like(larger), larger
        return partial(np.copyto, target, source)

    def message(self, array: Array) -> Any:
        """A message is where it goes and what is copied there."""
        return array, np.ones_like(array)

    def send(self, array: Any, peer: int) -> Any:
        """Nothing: the receiver copies."""

    def receive(self, array: Any, peer: int) -> Any:
        """Return the copy, made when it is awaited."""
        return _copy(*array)


async def _copy(target: Array, source: Array) -> None:
    np.copyto(target, source)
    await asyncio.sleep(0)
