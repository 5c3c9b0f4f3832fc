"""In which order steps begin that wait for nothing; where they are many, the loop turns between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from turns import Loop

from asyncdist.collectives.executor.buffers import NO_BUFFER, FlatBuffer, ScratchPool
from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.executor.runner import START_STEPS, Execution, Resources
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.steps import Buffer, Slice
from asyncdist.transport.protocol.frame import EARLY_PULL_BYTES
from asyncdist.transport.protocol.operations import Receive, SendOp


class Copies(Execution):
    """So many copies of single elements, none of which waits for another."""

    __slots__ = ("ends", "loop", "target")

    def __init__(self, count: int) -> None:
        builder = PlanBuilder("all_gather", "test", 0, 1)
        for index in range(count):
            builder.copy(Slice(Buffer.INPUT, index, 1), Slice(Buffer.OUTPUT, index, 1))
        source, self.target = np.ones(count, np.int64), np.zeros(count, np.int64)
        self.loop = Loop()
        self.ends: list[BaseException | None] = []
        buffers = (FlatBuffer(source), FlatBuffer(self.target), NO_BUFFER)
        loop: Any = self.loop
        super().__init__(Resources(loop, [], ScratchPool()), Program(builder.build()), buffers, b"", 0, 8)

    def ended(self, error: BaseException | None) -> None:
        self.ends.append(error)


@pytest.mark.parametrize(("count", "turns"), [(1, 1), (START_STEPS, 1), (START_STEPS + 1, 2), (3 * START_STEPS, 3)])
def test_so_many_start_in_one_turn(count: int, turns: int) -> None:
    copies = Copies(count)
    copies.start()
    for turn in range(1, turns):
        assert copies.target.sum() == turn * START_STEPS
        assert not copies.ends
        copies.loop.turn()
    assert copies.target.sum() == count
    assert copies.ends == [None]
    assert not copies.loop.soon


def test_an_operation_that_was_stopped_starts_no_more() -> None:
    copies = Copies(START_STEPS + 1)
    copies.start()
    copies.stop()
    copies.loop.turn()
    assert copies.target.sum() == START_STEPS
    assert not copies.ends


class Connection:
    """Keeps what is posted, and ends nothing."""

    def __init__(self) -> None:
        self.posted: list[str] = []

    def post_send(self, _op: SendOp) -> bool:
        self.posted.append("send")
        return False

    def post_receive(self, _receive: Receive) -> bool:
        self.posted.append("receive")
        return False


class Exchange(Execution):
    """Two messages of so many bytes to another rank, and two from it."""

    __slots__ = ("connection",)

    def __init__(self, nbytes: int, itemsize: int) -> None:
        length = nbytes // itemsize
        builder = PlanBuilder("all_to_all", "test", 0, 2)
        for number in range(2):
            builder.send(1, Slice(Buffer.INPUT, number * length, length))
            builder.recv(1, Slice(Buffer.OUTPUT, number * length, length))
        array = np.zeros(2 * length, f"V{itemsize}")
        self.connection = Connection()
        loop: Any = Loop()
        peers: Any = [None, self.connection]
        buffers = (FlatBuffer(array), FlatBuffer(array.copy()), NO_BUFFER)
        super().__init__(Resources(loop, peers, ScratchPool()), Program(builder.build()), buffers, b"", 0, itemsize)


@pytest.mark.parametrize("itemsize", [1, 8])
def test_large_messages_are_asked_for_before_any_is_sent(itemsize: int) -> None:
    exchange = Exchange(EARLY_PULL_BYTES + itemsize, itemsize)
    exchange.start()
    assert exchange.connection.posted == ["receive", "receive", "send", "send"]


@pytest.mark.parametrize("itemsize", [1, 8])
def test_messages_that_nobody_asks_for_are_sent_first(itemsize: int) -> None:
    exchange = Exchange(EARLY_PULL_BYTES, itemsize)
    exchange.start()
    assert exchange.connection.posted == ["send", "receive", "send", "receive"]
