"""Trials: what every algorithm of a collective takes on a group of this host, one after another in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from asyncdist.collectives.host.backend import HostBackend
from asyncdist.group.core import core_of
from asyncdist.group.process_group import ProcessGroup
from asyncdist.plan.problem import Problem
from asyncdist.plan.selection.prediction import Prediction
from asyncdist.plan.selection.selector import candidates
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.tuning.exercises import ITEMSIZE, Exercise

__all__ = ["Trial", "TrialError", "host_backend", "try_all"]

TURN: Final = 4
"""Samples of an algorithm before the next has its turn: drift of the machine is the same for all."""

MAX_SAMPLES: Final = 200
MIN_SAMPLES: Final = 4

HOPELESS: Final = 4.0
"""Algorithms this much slower than the fastest after one turn get no other."""


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
