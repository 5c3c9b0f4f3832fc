"""Probes: plans of two ranks whose time is one constant of the cost model, run as collectives are.

They go through the same runner, connection and frames as a collective, so that what is measured is what plans pay;
only the call around it (arguments, sequence numbers, the Work) is left out.
"""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np

from asyncdist.collectives.executor.buffers import FlatBuffer
from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.executor.runner import Execution
from asyncdist.group.process_group import ProcessGroup
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.steps import Buffer, Plan, Slice
from asyncdist.transport.protocol.frame import key_prefix

__all__ = ["PROBE_WORLD", "Probe", "both_ways", "one_way", "ping_pong"]

PROBE_WORLD: Final = 2

PROBE_TAG: Final = 1
"""Collectives of the tuning group, if any, have tag 0."""


def ping_pong(rank: int, trips: int, nbytes: int) -> Plan:
    """A message to and fro, `trips` times: 2 x trips messages, each sent when the one before has arrived."""
    builder = PlanBuilder("barrier", "ping_pong", rank, PROBE_WORLD)
    piece = Slice(Buffer.INPUT, 0, nbytes)
    arrived: int | None = None
    for trip in range(trips):
        target = Slice(Buffer.OUTPUT, trip * nbytes, nbytes)
        if rank == 0:
            builder.send(1, piece, after=(arrived,))
            arrived = builder.recv(1, target)
        else:
            arrived = builder.recv(0, target)
            builder.send(0, piece, after=(arrived,))
    return builder.build()


def one_way(rank: int, messages: int, nbytes: int) -> Plan:
    """`messages` messages from rank 0 to rank 1, as many at a time as the connection takes, and a signal back."""
    builder = PlanBuilder("barrier", "one_way", rank, PROBE_WORLD)
    if rank == 0:
        for number in range(messages):
            builder.send(1, Slice(Buffer.INPUT, number * nbytes, nbytes))
        builder.await_signal(1)
    else:
        arrived = [builder.recv(0, Slice(Buffer.OUTPUT, number * nbytes, nbytes)) for number in range(messages)]
        builder.signal(0, after=arrived)
    return builder.build()


def both_ways(rank: int, messages: int, nbytes: int) -> Plan:
    """The same in both directions at once, without a signal."""
    builder = PlanBuilder("barrier", "both_ways", rank, PROBE_WORLD)
    for number in range(messages):
        builder.send(1 - rank, Slice(Buffer.INPUT, number * nbytes, nbytes))
        builder.recv(1 - rank, Slice(Buffer.OUTPUT, number * nbytes, nbytes))
    return builder.build()


class Probe(Execution):
    """One run of a compiled probe on `group`, of two ranks. Make it, then await `run`."""

    __slots__ = ("_done",)

    def __init__(
        self, group: ProcessGroup, program: Program, number: int, source: FlatBuffer, target: FlatBuffer
    ) -> None:
        world = group.world
        self._done: asyncio.Future[None] = world.loop.create_future()
        peers = [None if rank == group.rank else world.mesh.peer(group.ranks[rank]) for rank in range(PROBE_WORLD)]
        super().__init__(
            world.loop,
            program,
            (source, target, FlatBuffer(np.empty(0, np.uint8))),
            peers,
            key_prefix(group.group_id, PROBE_TAG, number),
            0,
            1,
            None,
            world.pool,
        )

    def ended(self, error: BaseException | None) -> None:
        if not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)

    async def run(self) -> None:
        """Start and wait for the end; raises what a message failed with. Cancelling leaves the group unusable."""
        self.start()
        await self._done
