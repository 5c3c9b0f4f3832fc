"""torch.distributed with its gloo backend: one torch thread, interface ``lo`` (by environment), file rendezvous."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.adapters.base import Adapter, Start
from bench.object_calls import OPERATIONS as OBJECTS
from bench.operations import Buffers
from bench.verify import Array


class Gloo(Adapter):
    """One rank."""

    _torch: Any
    _dist: Any

    async def open(self) -> None:
        self._torch = importlib.import_module("torch")
        self._dist = importlib.import_module("torch.distributed")
        self._torch.set_num_threads(1)
        self._dist.init_process_group(
            "gloo", init_method=f"file://{self.context.directory}/gloo", rank=self.rank, world_size=self.size
        )
        self._dist.barrier()

    async def close(self) -> None:
        self._dist.destroy_process_group()

    def barrier(self) -> Any:
        self._dist.barrier()

    def message(self, array: Array) -> Any:
        """Messages are tensors that share the array's memory."""
        return self._torch.from_numpy(array)

    def prepare(self, operation: str, buffers: Buffers) -> Start:
        dist = self._dist
        source, target = self.message(buffers.input), self.message(buffers.output)
        root = self.rank == 0
        if operation == "gather":
            blocks = [self.message(block) for block in buffers.blocks(buffers.output)] if root else None
            return partial(_done, dist.gather, source, blocks, 0)
        if operation == "scatter":
            blocks = [self.message(block) for block in buffers.blocks(buffers.input)] if root else None
            return partial(_done, dist.scatter, target, blocks, 0)
        starts: dict[str, Start] = {
            "all_reduce": lambda: dist.all_reduce(target),
            "broadcast": lambda: dist.broadcast(target, 0),
            "reduce": lambda: dist.reduce(target, 0),
            "all_gather": lambda: dist.all_gather_single(target, source),
            "reduce_scatter": lambda: dist.reduce_scatter_single(target, source),
            "all_to_all": lambda: dist.all_to_all_single(target, source),
            "all_to_all_uneven": lambda: dist.all_to_all_single(target, source, buffers.splits[1], buffers.splits[0]),
            "barrier": lambda: dist.barrier(),
        }
        return partial(_done, starts[operation])

    def send(self, array: Any, peer: int) -> Any:
        return self._dist.isend(array, peer)

    def receive(self, array: Any, peer: int) -> Any:
        return self._dist.irecv(array, peer)

    def objects(self, operation: str) -> Callable[[Any], Any]:
        dist, size, root = self._dist, self.size, self.rank == 0

        def all_gather(own: Any) -> list[Any]:
            found: list[Any] = [None] * size
            dist.all_gather_object(found, own)
            return found

        def broadcast(own: Any) -> list[Any]:
            found = [own if root else None]
            dist.broadcast_object_list(found, 0)
            return found

        def gather(own: Any) -> list[Any]:
            found: list[Any] = [None] * size if root else []
            dist.gather_object(own, found if root else None, 0)
            return found

        def scatter(given: Any) -> list[Any]:
            found: list[Any] = [None]
            dist.scatter_object_list(found, given if root else None, 0)
            return found

        functions = (all_gather, broadcast, gather, scatter)
        return dict(zip(OBJECTS, functions, strict=True))[operation]

    def issue(self, array: Any) -> Any:
        return self._dist.all_reduce(array, async_op=True)

    def new_world(self) -> Callable[[Any], Any]:
        return partial(self._dist.all_reduce, group=self._dist.new_group(), async_op=True)

    @staticmethod
    def wait(handle: Any) -> object:
        """Wait for a message or an all_reduce."""
        return handle.wait()


def _done(function: Callable[..., object], *arguments: Any) -> None:
    """Call a blocking function and forget what it returns."""
    function(*arguments)
