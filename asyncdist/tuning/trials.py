"""Trials: what every algorithm of a collective takes on a group of this host, one after another in turns.

An `Exercise` is a collective as trials run it, with inputs and results that are known exactly. `nbytes` is what
`asyncdist explain --bytes` takes: the whole vector, all blocks together, of all_to_all those of one rank. Elements are
float32 and small whole numbers, so that sums of them are exact in any order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from asyncdist.collectives.host.backend import HostBackend
from asyncdist.group.core import core_of
from asyncdist.group.process_group import ProcessGroup
from asyncdist.plan.problem import BLOCK_COLLECTIVES, EXCHANGES, Problem
from asyncdist.plan.selection.prediction import Prediction
from asyncdist.plan.selection.selector import candidates
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.work import Work

TURN: Final = 4
"""Samples of an algorithm before the next has its turn: drift of the machine is the same for all."""

MAX_SAMPLES: Final = 200
MIN_SAMPLES: Final = 4

HOPELESS: Final = 4.0
"""Algorithms this much slower than the fastest after one turn get no other."""


ITEMSIZE: Final = 4

PERIOD: Final = 61
"""Numbers of a pattern: a prime, so that a block in the place of another is noticed whatever their length."""


class TrialError(RuntimeError):
    """A collective gave a wrong result."""


class Trial(NamedTuple):
    """One algorithm in one cell."""

    collective: str
    world: int
    nbytes: int
    algorithm: str
    chunk_bytes: int
    seconds: float
    """Median, over the samples, of the slowest rank's time."""
    samples: int
    single_copy: bool = False
    """As of `Problem`."""


Array = np.ndarray[tuple[int], np.dtype[np.float32]]


class Exercise:
    """One collective on one size: `prepare`, then await what `issue` returns, then `wrong` says if it went wrong."""

    def __init__(self, group: ProcessGroup, collective: str, nbytes: int) -> None:
        self._group = group
        self._collective = collective
        world, rank = group.size, group.rank
        elements = -(-nbytes // ITEMSIZE)
        if collective in BLOCK_COLLECTIVES or collective in EXCHANGES:
            elements = -(-elements // world) * world
        block = slice(rank * (elements // world), (rank + 1) * (elements // world))
        whole = _pattern(elements)
        mine = whole + np.float32(rank)
        ranks_sum = np.float32(world * (world - 1) // 2)
        if collective == "all_gather":
            self._source = mine[block].copy()
            owners = np.repeat(np.arange(world, dtype=np.float32), elements // world)
            self._expected = whole + owners
        elif collective == "all_to_all":
            self._source = mine
            self._expected = np.concatenate([whole[block] + np.float32(peer) for peer in range(world)])
        elif collective == "broadcast":
            self._source = mine
            self._expected = whole
        else:
            self._source = mine
            reduced = whole * np.float32(world) + ranks_sum
            self._expected = reduced[block] if collective == "reduce_scatter" else reduced
        self._target = np.zeros_like(self._expected)

    def prepare(self) -> None:
        """Have the arrays as they are before the collective."""
        if self._collective in ("all_reduce", "broadcast"):
            self._target[...] = self._source
        else:
            self._target[...] = 0

    def issue(self) -> Work[Any]:
        """Begin the collective."""
        return EXERCISES[self._collective](self._group, self._target, self._source)

    def wrong(self) -> bool:
        """Whether the result is another than it should be."""
        return not np.array_equal(self._target, self._expected)


EXERCISES: Final[Mapping[str, Callable[[ProcessGroup, Array, Array], Work[Any]]]] = MappingProxyType(
    {
        "all_reduce": lambda group, target, _: group.all_reduce(target),
        "all_gather": lambda group, target, source: group.all_gather_into_tensor(target, source),
        "reduce_scatter": lambda group, target, source: group.reduce_scatter_tensor(target, source),
        "broadcast": lambda group, target, _: group.broadcast(target, 0),
        "all_to_all": lambda group, target, source: group.all_to_all_single(target, source),
    }
)
"""The collectives that can be exercised, with how each is issued."""


def _pattern(elements: int) -> Array:
    return (np.arange(elements) % PERIOD).astype(np.float32)


async def try_all(
    group: ProcessGroup, collective: str, nbytes: int, tuning: Tuning, budget_s: float, names: Sequence[str] = ()
) -> list[Trial]:
    """Measure the algorithms of `collective` on `nbytes`, all or those named, for about `budget_s`.

    All ranks of the group call it alike and get the same. Chunks are those that `tuning` leads to. Raises TrialError
    for a wrong result, on every rank. Cancelling leaves the group unusable.
    """
    backend = host_backend(group)
    usual = backend.tuning
    await group.barrier()  # the lane is made at the first collective
    try:
        return await _try_all(group, backend, collective, nbytes, tuning, budget_s, names)
    finally:
        backend.choose_by(usual)


async def _try_all(
    group: ProcessGroup,
    backend: HostBackend,
    collective: str,
    nbytes: int,
    tuning: Tuning,
    budget_s: float,
    names: Sequence[str],
) -> list[Trial]:
    problem = Problem.of_bytes(collective, group.size, nbytes, ITEMSIZE, ranks_per_host=tuning.ranks_per_host)
    found = candidates(problem, ITEMSIZE, tuning, memory=backend.lane_memory(0))
    found = [one for one in found if not names or one.algorithm in names]
    exercise = Exercise(group, collective, nbytes)
    taken: dict[str, list[float]] = {one.algorithm: [] for one in found}
    began_s = time.perf_counter()
    for one in found:
        await _turn(group, backend, exercise, one, tuning, collective, 1)  # plans, connects, warms up
    running = list(found)
    while running:
        for one in running:
            taken[one.algorithm] += await _turn(group, backend, exercise, one, tuning, collective, TURN)
        best_s = min(statistics.median(times_s) for times_s in taken.values())
        spent_s = (await _slowest(group, [time.perf_counter() - began_s]))[0]
        over = spent_s > budget_s
        running = [
            one
            for one in running
            if len(taken[one.algorithm]) < (MIN_SAMPLES if over else MAX_SAMPLES)
            and statistics.median(taken[one.algorithm]) < HOPELESS * best_s
        ]
    return [
        Trial(collective, group.size, nbytes, one.algorithm, one.chunk_bytes, middle_s, len(times_s), one.single_copy)
        for one in found
        for times_s in [taken[one.algorithm]]
        for middle_s in [statistics.median(times_s)]
    ]


def host_backend(group: ProcessGroup) -> HostBackend:
    """Return what carries out the group's collectives on host arrays. Raises TypeError for other backends."""
    backend = core_of(group)._backend
    if not isinstance(backend, HostBackend):
        raise TypeError(f"{group!r} is measured on the aio backend only")
    return backend


async def _turn(
    group: ProcessGroup,
    backend: HostBackend,
    exercise: Exercise,
    one: Prediction,
    tuning: Tuning,
    collective: str,
    samples: int,
) -> list[float]:
    """Seconds of the slowest rank, by sample."""
    backend.choose_by(replace(tuning, overrides=((collective, one.algorithm),)))
    taken = []
    for _ in range(samples):
        exercise.prepare()
        await group.barrier()
        before_s = time.perf_counter()
        await exercise.issue()
        taken.append(time.perf_counter() - before_s)
    *slowest, wrong = await _slowest(group, [*taken, float(exercise.wrong())])
    if wrong:
        raise TrialError(f"{collective} by {one.algorithm}, {group.size} ranks: wrong result")
    return slowest


async def _slowest(group: ProcessGroup, values: Sequence[float]) -> list[float]:
    """The largest of all ranks' values, one by one."""
    gathered = np.zeros((group.size, len(values)))
    await group.all_gather_into_tensor(gathered, np.array(values))
    return [float(value) for value in gathered.max(axis=0)]
