"""HostExchange: small messages among the ranks of a group, beside its operations: what GPU paths agree about.

The messages are collectives of a hidden group, whose id is derived from the visible one's, over the same authenticated
connections.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import numpy as np

from asyncdist.collectives.arguments.call import Call, barrier
from asyncdist.collectives.arguments.items import Terms, all_gather_array
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.collectives.executor.scratch import ScratchPool
from asyncdist.collectives.host.backend import HostBackend
from asyncdist.concurrency.integers import derive_group_id
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.transport.base_mesh import BaseMesh

__all__ = ["MAX_MESSAGE_BYTES", "HostExchange"]

MAX_MESSAGE_BYTES: Final = 1 << 16
"""Largest message of a rank: some identifiers and memory handles, so that no peer makes us allocate more."""


class HostExchange:
    """The exchanges of one group. `number`s, per tag, are what ranks must agree on: each names one exchange."""

    def __init__(
        self,
        mesh: BaseMesh,
        group_id: int,
        ranks: tuple[int, ...],
        rank: int,
        *,
        loop: asyncio.AbstractEventLoop,
        pool: ScratchPool,
        tuning: Tuning,
    ) -> None:
        self._mesh = mesh
        self._group_id = group_id
        self._ranks = ranks
        self._rank = rank
        self._loop = loop
        self._pool = pool
        self._tuning = tuning
        self._backends: dict[str, HostBackend] = {}
        total = MAX_MESSAGE_BYTES * len(ranks)
        self._terms = Terms(rank, ranks, False, MAX_MESSAGE_BYTES, total)

    def host_backend(self, name: str) -> HostBackend:
        """Host collectives of their own: a backend for each `name`, the same on all ranks."""
        backend = self._backends.get(name)
        if backend is None:
            group_id = derive_group_id(self._group_id, "device", name)
            backend = HostBackend(
                self._mesh, group_id, self._ranks, self._rank, loop=self._loop, pool=self._pool, tuning=self._tuning
            )
            self._backends[name] = backend
        return backend

    async def all_gather(self, name: str, tag: int, number: int, message: bytes) -> list[bytes]:
        """Every rank's `message` (at most MAX_MESSAGE_BYTES), in rank order. Cancelling forgets the exchange here.

        Raises PeerLostError when a rank is gone, CollectiveMismatchError where ranks exchange something else, or more.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes, at most {MAX_MESSAGE_BYTES} are exchanged")
        call = all_gather_array(np.frombuffer(message, np.uint8), self._terms)
        arrays = await _run_call(self.host_backend(name), call, tag, number)
        return [array.tobytes() for array in arrays]

    async def barrier(self, name: str, tag: int, number: int) -> None:
        """Done once every rank has called it. Raises as `all_gather`."""
        await _run_call(self.host_backend(name), barrier(), tag, number)

    def waiting_for(self, name: str, tag: int, number: int) -> tuple[int, ...]:
        """Global ranks that an exchange under way has not heard from."""
        backend = self._backends.get(name)
        return () if backend is None else backend.waiting_for(tag, number)

    def abort(self, error: BaseException) -> None:
        """Forget everything under way; the caller cancels the tasks that wait here."""
        for backend in self._backends.values():
            backend.abort(error)

    def close(self) -> None:
        """The group is closed."""
        for backend in self._backends.values():
            backend.close()


async def _run_call(backend: HostBackend, call: Call, tag: int, number: int) -> Any:
    """Carry out one host collective and return its result. Cancelling forgets it here."""
    loop = backend.loop
    ended: asyncio.Future[None] = loop.create_future()
    work = CollectiveWork(loop, f"{call.collective} of a GPU path", call.nbytes, tag, number, call.result)

    def on_end(_work: CollectiveWork, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    try:
        backend.start(call, work, on_end)
        await ended
    except asyncio.CancelledError:
        backend.drop(tag, number)
        raise
    return work.value
