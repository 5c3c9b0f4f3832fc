"""Members of a lane in one process: loops whose callbacks a test runs one by one, and programs on arrays."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncdist.collectives.executor.buffers import FlatBuffer
from asyncdist.collectives.executor.program import Instruction, Program
from asyncdist.collectives.shared.layout import LANE_HEAD_BYTES
from asyncdist.collectives.shared.runner import Lane, LaneRunner, SharedSteps
from asyncdist.errors import CollectiveMismatchError
from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.problem import Problem

POOL_BYTES = 1 << 20
CHUNK_LENGTH = (256 << 10) // 8


class FakeLoop:
    """Callbacks in order; nothing runs by itself."""

    def __init__(self) -> None:
        self.ready: deque[tuple[FakeHandle, Callable[..., object], tuple[object, ...]]] = deque()

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> FakeHandle:
        handle = FakeHandle()
        self.ready.append((handle, callback, arguments))
        return handle

    def run_one(self) -> None:
        if self.ready:
            handle, callback, arguments = self.ready.popleft()
            if not handle.cancelled:
                callback(*arguments)


class FakeHandle:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeRinger:
    """Wakes a rank, which is always asleep, by putting a look at its lane into its loop."""

    words = (1,)

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.rings = 0

    def knock(self) -> None:
        self.ring()

    def ring(self) -> None:
        self.rings += 1
        if not self.rank.rung:
            self.rank.rung = True
            self.rank.loop.call_soon(self.rank.look)


class Rank:
    """One member."""

    def __init__(self, world: list[Rank], index: int) -> None:
        self.world = world
        self.index = index
        self.loop = FakeLoop()
        self.rung = False
        self.faults: list[tuple[int, Exception]] = []
        self.lane: LaneRunner

    def join(self, segments: list[memoryview]) -> None:
        seen = [view if index == self.index else view.toreadonly() for index, view in enumerate(segments)]
        ringers: list[Any] = [None if rank is self else FakeRinger(rank) for rank in self.world]
        loop: Any = self.loop
        self.lane = LaneRunner(
            loop,
            Lane(self.index, seen),
            [rank.index + 100 for rank in self.world],
            ringers,
            lambda rank, error: self.faults.append((rank, error)),
        )

    def look(self) -> None:
        self.rung = False
        self.most = max(getattr(self, "most", 0), self.moved(self.lane.poll))

    def moved(self, action: Callable[[], object]) -> int:
        action()
        return self.lane.moved


class Execution:
    """A program on arrays; what a runner does, without messages."""

    def __init__(self, rank: Rank, program: Program, buffers: list[np.ndarray[Any, Any]]) -> None:
        self.rank = rank
        self.program = program
        self.arrays = buffers
        self.buffers = [FlatBuffer(array) for array in buffers]
        self.itemsize = 8
        self.pending = program.pending.copy()
        self.left = len(program.pending)
        self.error: BaseException | None = None
        self.part: SharedSteps

    def start(self, fingerprint: int = 1) -> Execution:
        lane: Any = self.rank.lane
        self.part = lane.add(fingerprint, self.program, self)
        self.advance(list(self.program.first_steps(itemsize=1)))
        lane.flush()
        return self

    @property
    def done(self) -> bool:
        return not self.left and self.error is None

    def advance(self, ready: list[int]) -> None:
        try:
            for index in ready:
                step = self.program.instructions[index]
                if self.error is None and self.issue(index, step):
                    self.complete(index, ready)
        except CollectiveMismatchError as error:
            self.message_failed(None, error)

    def complete(self, index: int, ready: list[int]) -> None:
        self.left -= 1
        for successor in self.program.instructions[index].successors:
            self.pending[successor] -= 1
            if not self.pending[successor]:
                ready.append(successor)
        if not self.left:
            self.part.end()

    def issue(self, index: int, step: Instruction) -> bool:
        if step.kind >= 5:
            return self.part.issue(index, step)
        source = self.arrays[step.source][step.source_start : step.source_stop]
        target = self.arrays[step.buffer][step.start : step.stop]
        if step.kind == 4:
            target[...] = source
        else:
            target += source
        return True

    def reduce(self, source: np.ndarray[Any, Any], target: np.ndarray[Any, Any], left: bool) -> None:
        target += source

    def step_done(self, index: int) -> None:
        ready: list[int] = []
        self.complete(index, ready)
        self.advance(ready)

    def hold(self) -> None:
        self.left += 1

    def release(self) -> None:
        self.left -= 1

    def message_failed(self, _token: object, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self.part.end()


def make(size: int) -> tuple[list[Rank], list[memoryview]]:
    segments = [memoryview(bytearray(LANE_HEAD_BYTES + POOL_BYTES)) for _ in range(size)]
    ranks: list[Rank] = []
    ranks += [Rank(ranks, index) for index in range(size)]
    for rank in ranks:
        rank.join(segments)
    return ranks, segments


def all_reduce(rank: Rank, count: int, value: int) -> Execution:
    world = len(rank.world)
    name = "shared_direct" if count < 1000 else "shared"
    program = Program(build(Problem.of("all_reduce", world, count, 0), name, rank.index, CHUNK_LENGTH))
    scratch = np.zeros(max(1, program.plan.scratch_count), np.int64)
    return Execution(rank, program, [np.zeros(0, np.int64), np.full(count, value, np.int64), scratch])


def broadcast(rank: Rank, count: int, root: int, value: int) -> Execution:
    world = len(rank.world)
    program = Program(build(Problem.of("broadcast", world, count, root), "shared", rank.index, CHUNK_LENGTH))
    data = np.full(count, value if rank.index == root else 0, np.int64)
    return Execution(rank, program, [np.zeros(0, np.int64), data, np.zeros(1, np.int64)])


def turn(ranks: list[Rank], rng: random.Random) -> bool:
    """Let one rank run one callback; False if none has any."""
    busy = [rank for rank in ranks if rank.loop.ready]
    if not busy:
        return False
    rng.choice(busy).loop.run_one()
    return True


def settle(ranks: list[Rank], rng: random.Random | None = None) -> None:
    rng = rng or random.Random(0)
    for _ in range(200_000):
        if not turn(ranks, rng):
            return
    raise AssertionError("never comes to rest")
