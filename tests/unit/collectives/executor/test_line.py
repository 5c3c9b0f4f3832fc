"""Work on memory that is too much for one turn of the loop waits in line, and is forgotten with its operation."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from turns import Loop

from asyncdist.collectives.executor.buffers import NO_BUFFER, FlatBuffer, ScratchPool
from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.executor.runner import SLICE_BYTES, Execution, Resources
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.steps import Buffer, Slice


class Steps(Execution):
    """So many copies, or reductions, of `nbytes` each, none of which waits for another."""

    __slots__ = ("__weakref__", "applied", "ends", "fails_at", "loop", "source", "target")

    def __init__(self, count: int, nbytes: int, *, reduces: bool = False, fails_at: int = -1) -> None:
        builder = PlanBuilder("all_reduce", "test", 0, 1)
        for index in range(count):
            source = Slice(Buffer.INPUT, index * nbytes, nbytes)
            target = Slice(Buffer.OUTPUT, index * nbytes, nbytes)
            if reduces:
                builder.reduce(source, target, source_left=True)
            else:
                builder.copy(source, target)
        self.source = np.resize(np.arange(1, 252, dtype=np.uint8), count * nbytes)  # no slice is like the first
        self.target = np.zeros(count * nbytes, np.uint8)
        self.loop = Loop()
        self.ends: list[BaseException | None] = []
        self.applied = 0
        self.fails_at = fails_at
        buffers = (FlatBuffer(self.source), FlatBuffer(self.target), NO_BUFFER)
        loop: Any = self.loop
        super().__init__(Resources(loop, [], ScratchPool()), Program(builder.build()), buffers, b"", 0)

    def _apply(self, kind: int, source: Any, target: Any, left: bool) -> None:
        if self.applied == self.fails_at:
            raise ArithmeticError("of the user's own")
        self.applied += 1
        target[...] = source

    def ended(self, error: BaseException | None) -> None:
        self.ends.append(error)
        if error is not None:
            self.stop()


def test_one_turn_copies_no_more_than_a_slice() -> None:
    steps = Steps(6, SLICE_BYTES // 2)
    steps.start()
    assert np.count_nonzero(steps.target) == SLICE_BYTES
    turns = 0
    while steps.loop.soon:
        before = np.count_nonzero(steps.target)
        steps.loop.turn()
        assert np.count_nonzero(steps.target) - before <= SLICE_BYTES
        turns += 1
    assert turns <= 4
    assert steps.ends == [None]
    assert np.array_equal(steps.target, steps.source)


def test_what_waits_in_line_is_forgotten_with_its_operation() -> None:
    steps = Steps(50, 2 * SLICE_BYTES)
    steps.start()
    steps.loop.turn()
    steps.stop()
    loop, target = steps.loop, weakref.ref(steps)
    done = steps.applied
    del steps
    for _ in range(3):
        loop.turn()
    assert not loop.soon
    assert target() is None, "neither kept by what waits, nor left to the garbage collector"
    assert done == 1


def test_a_reduction_that_fails_ends_the_line_once() -> None:
    steps = Steps(5, 2 * SLICE_BYTES, reduces=True, fails_at=3)
    steps.start()
    for _ in range(20):
        steps.loop.turn()
    assert [type(error) for error in steps.ends] == [ArithmeticError]
    assert steps.applied == 3
    assert not steps.loop.soon


def test_an_operation_whose_last_step_waited_in_line_is_no_garbage() -> None:
    steps = Steps(2, 2 * SLICE_BYTES)
    steps.start()
    while steps.loop.soon:
        steps.loop.turn()
    assert steps.ends == [None]
    assert np.array_equal(steps.target, steps.source)
    target = weakref.ref(steps)
    del steps
    assert target() is None
