"""The libraries that are measured, behind one small interface; the floors' adapters are in `bench.floors`.

An adapter prepares an operation outside the timed part (views, tensors, argument lists) and hands out a function
without arguments, so that all libraries are timed by the same lines. A blocking library's function returns None when
it is done; an awaitable library's returns what is to be awaited.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.model import RankContext
from bench.operations import Array, Buffers

Start = Callable[[], Any]
"""Start an operation; return an awaitable, or None when it is done."""


class Adapter:
    """One rank of one library; a subclass overrides what its library offers."""

    in_place = True
    """Whether reductions and broadcasts work on one array, as a user of this library would call them."""
    verifies = True
    """Whether the results mean anything (raw copies have none)."""
    wait: Callable[[Any], object] | None = None
    """Wait for a handle of `send` or `receive`; None where handles are awaited."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.rank = context.rank
        self.size = context.world_size
        self._sub_worlds: list[Callable[[Any], Any]] = []

    async def open(self) -> None:
        """Join the world."""

    async def close(self) -> None:
        """Leave it."""

    def allocate(self, elements: int) -> Array:
        """Return an array of float32 that the library likes best."""
        return np.empty(elements, np.float32)

    def barrier(self) -> Any:
        """Enter a barrier; an awaitable, or None when it is over."""
        raise NotImplementedError

    async def pass_barrier(self) -> None:
        """Enter a barrier and wait for its end, outside the timed part."""
        work = self.barrier()
        if work is not None:
            await work

    def prepare(self, operation: str, buffers: Buffers) -> Start:
        """Return the function that starts ``operation`` on ``buffers`` once."""
        raise NotImplementedError

    def message(self, array: Array) -> Any:
        """Return what `send` and `receive` take in place of ``array``."""
        return array

    def send(self, array: Any, peer: int) -> Any:
        """Send what `message` made; a handle for `wait`, or None when the array may be reused."""
        raise NotImplementedError

    def receive(self, array: Any, peer: int) -> Any:
        """Post a receive into what `message` made; a handle for `wait`."""
        raise NotImplementedError

    def objects(self, operation: str) -> Callable[[Any], Any]:
        """Return the function that carries out ``operation`` on this rank's object (to scatter: on the root's list, and
        on anything elsewhere) and returns the list of objects it gets, or an awaitable of it.
        """
        raise NotImplementedError

    def issue(self, array: Any) -> Any:
        """Start an all_reduce of what `message` made without waiting; a handle for `wait`."""
        raise NotImplementedError

    def sub_worlds(self, count: int) -> list[Callable[[Any], Any]]:
        """Return `issue` for each of so many groups of all ranks, made when they are first asked for."""
        while len(self._sub_worlds) < count:
            self._sub_worlds.append(self.new_world())
        return self._sub_worlds[:count]

    def new_world(self) -> Callable[[Any], Any]:
        """Make another group of all ranks and return its `issue`."""
        raise NotImplementedError


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

        return {
            "all_gather_object": all_gather,
            "broadcast_object": broadcast,
            "gather_object": gather,
            "scatter_object": scatter,
        }[operation]

    def issue(self, array: Any) -> Any:
        return self._dist.all_reduce(array)

    def new_world(self) -> Callable[[Any], Any]:
        issue: Callable[[Any], Any] = self._dist.new_group().all_reduce
        return issue


class Gloo(Adapter):
    """One rank of torch.distributed with gloo: one torch thread, interface ``lo`` (by environment), file rendezvous."""

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

        return {
            "all_gather_object": all_gather,
            "broadcast_object": broadcast,
            "gather_object": gather,
            "scatter_object": scatter,
        }[operation]

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


class Mpi(Adapter):
    """One rank of COMM_WORLD of Open MPI, through mpi4py's buffer functions.

    As mpirun starts it, so it spins over shared memory: it marks what one host can do, not what a program with an event
    loop could get.
    """

    _mpi: Any
    _comm: Any

    async def open(self) -> None:
        """Initialize MPI (importing does)."""
        self._mpi = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD
        self._comm.Barrier()

    async def close(self) -> None:
        self._mpi.Finalize()

    def barrier(self) -> Any:
        self._comm.Barrier()

    def prepare(self, operation: str, buffers: Buffers) -> Start:
        comm, here = self._comm, self._mpi.IN_PLACE
        source, target = buffers.input, buffers.output
        root, (sent, received) = self.rank == 0, buffers.splits
        starts: dict[str, Start] = {
            "all_reduce": lambda: comm.Allreduce(here, target),
            "broadcast": lambda: comm.Bcast(target, 0),
            "reduce": lambda: comm.Reduce(here if root else target, target if root else None, root=0),
            "all_gather": lambda: comm.Allgather(source, target),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(source, target),
            "all_to_all": lambda: comm.Alltoall(source, target),
            "all_to_all_uneven": lambda: comm.Alltoallv((source, sent), (target, received)),
            "gather": lambda: comm.Gather(source, target if root else None, 0),
            "scatter": lambda: comm.Scatter(source if root else None, target, 0),
            "barrier": lambda: comm.Barrier(),
        }
        return starts[operation]

    def send(self, array: Any, peer: int) -> Any:
        """Send; blocking, which is MPI's fastest way."""
        self._comm.Send(array, peer)

    def receive(self, array: Any, peer: int) -> Any:
        return self._comm.Irecv(array, peer)

    def objects(self, operation: str) -> Callable[[Any], Any]:
        comm, root = self._comm, self.rank == 0
        functions: dict[str, Callable[[Any], Any]] = {
            "all_gather_object": comm.allgather,
            "broadcast_object": lambda own: [comm.bcast(own if root else None, 0)],
            "gather_object": lambda own: comm.gather(own, 0) or [],
            "scatter_object": lambda given: [comm.scatter(given if root else None, 0)],
        }
        return functions[operation]

    def issue(self, array: Any) -> Any:
        return self._comm.Iallreduce(self._mpi.IN_PLACE, array)

    def new_world(self) -> Callable[[Any], Any]:
        return partial(self._comm.Dup().Iallreduce, self._mpi.IN_PLACE)

    @staticmethod
    def wait(handle: Any) -> object:
        """Wait for a message or an all_reduce."""
        return handle.Wait()


LOCALHOST = "127.0.0.1"


class Xoscar(Adapter):
    """One rank of xoscar's collectives: gloo beneath, TCP on loopback, called as its rank actor calls them.

    Its functions are coroutines only by name: the actor's methods call the C++ library at once and hold the event loop
    (and the interpreter) until it returns. So calling the library from a coroutine here is what a user of xoscar gets,
    less the actor's message. It has no barrier; an all_reduce of one element stands in. Its scatter and reduce_scatter
    corrupt the heap of their process (0.12.2), so they are not measured.
    """

    in_place = False
    _group: Any

    async def open(self) -> None:
        """Join through a store that rank 0 hosts."""
        module = importlib.import_module("xoscar.collective.process_group")
        options = module.ProcessGroup.Options()
        options.master_ip, port = self.context.address.split(":")
        options.master_port = int(port)
        self._group = module.ProcessGroupGloo(LOCALHOST, self.rank, self.size, group_name="default", pg_options=options)
        self._one = np.zeros(1, np.float32)
        self._sum = np.zeros(1, np.float32)
        self.barrier()

    def barrier(self) -> Any:
        self._group.allreduce(self._one, self._sum)

    def prepare(self, operation: str, buffers: Buffers) -> Start:
        group, source, target = self._group, buffers.input, buffers.output
        if operation == "broadcast":
            return partial(group.broadcast, source if self.rank == 0 else None, target, root=0)
        starts: dict[str, Start] = {
            "all_reduce": partial(group.allreduce, source, target),
            "reduce": partial(group.reduce, source, target, root=0),
            "all_gather": partial(group.allgather, source, target),
            "all_to_all": partial(group.alltoall, source, target),
            "gather": partial(group.gather, source, target, root=0),
            "barrier": self.barrier,
        }
        return starts[operation]
