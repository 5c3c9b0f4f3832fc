"""Which messages of an operation come unasked: all it sends to a rank, if that is little, else the short ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from turns import Loop

from asyncdist.collectives.executor.buffers import NO_BUFFER, FlatBuffer, ScratchPool
from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.executor.runner import BULK_BYTES, Execution, Resources
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.selection.selector import algorithms, plan_for
from asyncdist.plan.steps import Buffer, Recv, RecvReduce, Send, Slice
from asyncdist.plan.summary import traffic
from asyncdist.transport.protocol.operations import Receive, SendOp


class Connection:
    """Keeps what is posted, and ends nothing."""

    def __init__(self) -> None:
        self.bulk: list[bool] = []

    def post_send(self, op: SendOp) -> bool:
        self.bulk.append(op.bulk)
        return False

    def post_receive(self, receive: Receive) -> bool:
        self.bulk.append(receive.bulk)
        return False


class Several(Execution):
    """Two messages to rank 1 and one from it, and one of each kind with rank 2, which is little."""

    __slots__ = ("far", "near")

    def __init__(self, sent: int, received: int, itemsize: int, times: int = 1) -> None:
        builder = PlanBuilder("all_to_all", "test", 0, 3)
        builder.send(1, Slice(Buffer.INPUT, 0, sent - 1))
        builder.send(1, Slice(Buffer.INPUT, sent - 1, 1))
        builder.recv(1, Slice(Buffer.OUTPUT, 0, received))
        builder.send(2, Slice(Buffer.INPUT, sent, 1))
        builder.recv(2, Slice(Buffer.OUTPUT, received, 1))
        self.near, self.far = Connection(), Connection()
        loop: Any = Loop()
        peers: Any = [None, self.near, self.far]
        array = np.zeros(sent + received + 1, f"V{itemsize}")
        buffers = (FlatBuffer(array), FlatBuffer(array.copy()), NO_BUFFER)
        program = Program(builder.build())
        if times > 1:
            program = program.renumbered(times, 0)
        super().__init__(Resources(loop, peers, ScratchPool()), program, buffers, b"", 0, itemsize)


@pytest.mark.parametrize("itemsize", [1, 8])
def test_the_sum_decides_for_each_rank_and_direction(itemsize: int) -> None:
    fits = BULK_BYTES // itemsize
    for sent, received, expected in (
        (fits, fits, [False, False, False]),
        (fits + 1, fits, [True, True, False]),
        (fits, fits + 1, [False, False, True]),
    ):
        several = Several(sent, received, itemsize)
        several.start()
        assert sorted(several.near.bulk) == sorted(expected)
        assert several.far.bulk == [False, False]


def test_of_a_program_that_runs_several_times_all_runs_count() -> None:
    for times, expected in ((2, False), (3, True)):
        several = Several(BULK_BYTES // 2, 1, 1, times)
        several.start()
        assert several.near.bulk.count(expected) >= 2


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_both_ends_count_the_same(world: int) -> None:
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scan"):
        for algorithm in algorithms(collective):
            count = tuple(range(1, world + 1)) if collective in ("all_gather", "reduce_scatter") else 300_000 * world
            plans = [plan_for(collective, rank, world, count, 4, algorithm=algorithm) for rank in range(world)]
            sums = [traffic(plan.steps) for plan in plans]
            for rank in range(world):
                for peer in range(world):
                    assert sums[rank].sent.get(peer, 0) == sums[peer].received.get(rank, 0), (collective, algorithm)
            assert sum(sums[0].sent.values()) == sum(s.source.length for s in plans[0].steps if isinstance(s, Send))
            received = [s.target.length for s in plans[0].steps if isinstance(s, Recv | RecvReduce)]
            assert sum(sums[0].received.values()) == sum(received)
