"""Open MPI through mpi4py's buffer functions.

As mpirun starts it, so it spins over shared memory: it marks what one host can do, not what a program with an event
loop could get.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.adapters.base import Adapter, Start
from bench.operations import Buffers


class Mpi(Adapter):
    """One rank of COMM_WORLD."""

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
