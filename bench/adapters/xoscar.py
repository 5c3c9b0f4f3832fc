"""xoscar's collectives: gloo beneath, TCP on loopback, called as its rank actor calls them.

Its functions are coroutines only by name: the actor's methods call the C++ library at once and hold the event loop (and
the interpreter) until it returns. So calling the library from a coroutine here is what a user of xoscar gets, less the
actor's message. It has no barrier; an all_reduce of one element stands in.
Its scatter and reduce_scatter corrupt the heap of their process (0.12.2), so they are not measured.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np

from bench.adapters.base import Adapter, Start
from bench.operations import Buffers

LOCALHOST = "127.0.0.1"


class Xoscar(Adapter):
    """One rank."""

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
