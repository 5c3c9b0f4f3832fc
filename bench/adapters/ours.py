"""asyncdist itself, written as a user would write it. Transport and spinning come from the environment."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from bench.adapters.base import Adapter, Start
from bench.cases import RankContext
from bench.object_calls import OPERATIONS as OBJECTS
from bench.operations import Buffers
from bench.verify import Array


class Asyncdist(Adapter):
    """One rank. Option ``shared_arrays``: its arrays come from `asyncdist.empty`."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._dist: Any = importlib.import_module("asyncdist")
        self._group: Any = None
        self.run = self._dist.run
        self._shared_arrays = bool(context.options.get("shared_arrays"))

    async def open(self) -> None:
        self._group = self._dist.init_process_group(
            init_method=f"tcp://{self.context.address}", rank=self.rank, world_size=self.size
        )
        await self._group.__aenter__()
        await self._dist.barrier()

    async def close(self) -> None:
        await self._group.__aexit__(None, None, None)

    def allocate(self, elements: int) -> Array:
        """Return an array, in shared memory if asked to."""
        if not self._shared_arrays:
            return super().allocate(elements)
        array: Array = self._dist.empty((elements,), "float32")
        return array

    def barrier(self) -> Any:
        return self._dist.barrier()

    def prepare(self, operation: str, buffers: Buffers) -> Start:
        dist, source, target = self._dist, buffers.input, buffers.output
        root = self.rank == 0
        if operation == "gather":
            blocks = buffers.blocks(target) if root else None
            return lambda: dist.gather(source, blocks, 0)
        if operation == "scatter":
            blocks = buffers.blocks(source) if root else None
            return lambda: dist.scatter(target, blocks, 0)
        starts: dict[str, Start] = {
            "all_reduce": lambda: dist.all_reduce(target),
            "broadcast": lambda: dist.broadcast(target, 0),
            "reduce": lambda: dist.reduce(target, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(target, source),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(target, source),
            "all_to_all": lambda: dist.all_to_all_single(target, source),
            "all_to_all_uneven": lambda: dist.all_to_all_single(target, source, buffers.splits[1], buffers.splits[0]),
            "barrier": lambda: dist.barrier(),
        }
        return starts[operation]

    def send(self, array: Any, peer: int) -> Any:
        return self._dist.isend(array, peer)

    def receive(self, array: Any, peer: int) -> Any:
        return self._dist.irecv(array, peer)

    def objects(self, operation: str) -> Callable[[Any], Any]:
        dist, size, root = self._dist, self.size, self.rank == 0

        async def all_gather(own: Any) -> list[Any]:
            found: list[Any] = [None] * size
            await dist.all_gather_object(found, own)
            return found

        async def broadcast(own: Any) -> list[Any]:
            found = [own if root else None]
            await dist.broadcast_object_list(found, 0)
            return found

        async def gather(own: Any) -> list[Any]:
            found: list[Any] = [None] * size if root else []
            await dist.gather_object(own, found if root else None, 0)
            return found

        async def scatter(given: Any) -> list[Any]:
            found: list[Any] = [None]
            await dist.scatter_object_list(found, given if root else None, 0)
            return found

        functions = (all_gather, broadcast, gather, scatter)
        return dict(zip(OBJECTS, functions, strict=True))[operation]

    def issue(self, array: Any) -> Any:
        return self._dist.all_reduce(array)

    def new_world(self) -> Callable[[Any], Any]:
        issue: Callable[[Any], Any] = self._dist.new_group().all_reduce
        return issue
