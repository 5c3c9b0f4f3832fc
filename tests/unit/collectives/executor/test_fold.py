"""What is reduced out of a sender's memory: each element once, also where the message comes after all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from turns import Loop

from asyncdist.collectives.executor.buffers import NO_BUFFER, FlatBuffer, ScratchPool
from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.executor.runner import EXPOSED_BULK_BYTES, Execution, Resources
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.steps import Buffer, Slice
from asyncdist.transport.protocol.operations import Receive

LENGTH = EXPOSED_BULK_BYTES // 8


class Connection:
    """Keeps the receive that is posted."""

    receive: Receive

    def post_receive(self, receive: Receive) -> bool:
        self.receive = receive
        return False


class Reducing(Execution):
    """Reduces a vector of rank 1 into its own."""

    def __init__(self, length: int, kernel: Any = np.add) -> None:
        builder = PlanBuilder("all_reduce", "test", 0, 2)
        builder.recv_reduce(1, Slice(Buffer.OUTPUT, 1, length), incoming_left=False)
        self.own = np.arange(length + 2.0)
        self.connection: Any = Connection()
        self.ends: list[BaseException | None] = []
        loop: Any = Loop()
        resources = Resources(loop, [None, self.connection], ScratchPool())
        buffers = (NO_BUFFER, FlatBuffer(self.own), NO_BUFFER)
        super().__init__(resources, Program(builder.build()), buffers, b"", 0, 8, kernel)
        self.start()

    def ended(self, error: BaseException | None) -> None:
        self.ends.append(error)

    def fold(self, operand: Any, start: int, stop: int) -> None:
        self.connection.receive.fold(operand[start:stop].view(np.uint8), start * 8)

    def end(self) -> None:
        receive = self.connection.receive
        self.message_received(receive.token, receive)


@pytest.mark.parametrize("folded", [0, 1, LENGTH // 2, LENGTH])
def test_the_rest_is_reduced_once_it_is_here(folded: int) -> None:
    reducing, operand = Reducing(LENGTH), np.random.default_rng(1).random(LENGTH)
    expected = np.arange(LENGTH + 2.0)
    expected[1:-1] += operand
    if folded:
        reducing.fold(operand, 0, folded // 2)
        reducing.fold(operand, folded // 2, folded)
    if folded < LENGTH:
        reducing.connection.receive.target[:] = operand.data.cast("B")
    reducing.end()
    assert reducing.ends == [None]
    assert (reducing.own == expected).all()


def test_short_ones_are_not_folded() -> None:
    assert Reducing(LENGTH - 1).connection.receive.fold is None


def test_an_operation_that_has_stopped_writes_nothing() -> None:
    reducing = Reducing(LENGTH)
    reducing.stop()
    reducing.fold(np.ones(LENGTH), 0, LENGTH)
    assert (reducing.own == np.arange(LENGTH + 2.0)).all()


def test_a_reduction_that_fails_ends_the_operation_once() -> None:
    error = ValueError("a reduction of the user's own")

    def kernel(*_arrays: object) -> None:
        raise error

    reducing = Reducing(LENGTH, kernel)
    for start in (0, LENGTH // 2):
        reducing.fold(np.ones(LENGTH), start, start + LENGTH // 2)
    reducing.end()
    assert reducing.ends == [error]
