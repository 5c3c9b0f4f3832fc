"""Fit: the constants of the cost model with which it says what trials took, or comes as close as it can.

Gauss and Newton's method on the logarithms of constants and of times, so that nothing becomes negative and a time that
is half of what it should be counts as much as one that is twice as long. Each constant is pulled toward where it began:
what no trial depends on stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import USUAL_LANE
from asyncdist.plan.selection.prediction import seconds_by
from asyncdist.tuning.exercises import ITEMSIZE
from asyncdist.tuning.trials import Trial

__all__ = ["fitted"]

OF_MESSAGES: Final = ("alpha_s", "beta_s", "gamma_s", "overhead_s", "copy_s", "turn_s")
OF_SHARED_MEMORY: Final = ("wake_s", "step_s", "operand_s", "copy_s", "reduce_s", "begin_s", "read_s")

ROUNDS: Final = 12
"""Of Gauss and Newton; after so many nothing moves any more, or jumps between two sides of a maximum."""

PULL: Final = 0.1
"""Weight of a constant where it began, beside that of a trial, 1: trials decide wherever they say anything."""

OUTLIER: Final = 0.5
"""Errors of a logarithm from which a trial counts less: a time that others on the machine have doubled."""

FAR: Final = math.log(20)
"""A constant that moves further than this factor has not been measured but has been left over."""

STEP: Final = 1e-3


def fitted(trials: Sequence[Trial], start: Constants, cores: int) -> Constants:
    """Return `start` with what `trials`, on one host of `cores` cores, say otherwise. Links between hosts stay."""
    rows = [trial for trial in trials if trial.seconds > 0]
    if not rows:
        return start
    best: dict[tuple[str, int, int], float] = {}
    for one in rows:
        cell = (one.collective, one.world, one.nbytes)
        best[cell] = min(best.get(cell, math.inf), one.seconds)
    # What is near the fastest decides the choice; what is far from it need not be known as well.
    weights = np.array([best[one.collective, one.world, one.nbytes] / one.seconds for one in rows])
    measured = np.log([one.seconds for one in rows])
    names = [name for name in OF_MESSAGES if getattr(start, name) > 0]
    names += [f"shared.{name}" for name in OF_SHARED_MEMORY if getattr(start.shared, name) > 0]
    moved = np.zeros(len(names))
    predicted = [_predicted(one) for one in rows]

    def errors(where: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        constants = replace(_moved(start, names, where), cores=cores)
        return np.log([seconds(constants) for seconds in predicted]) - measured

    for _ in range(ROUNDS):
        now = errors(moved)
        slopes = np.empty((len(rows), len(names)))
        for column in range(len(names)):
            aside = moved.copy()
            aside[column] += STEP
            slopes[:, column] = (errors(aside) - now) / STEP
        scale = np.sqrt(weights * np.minimum(1.0, OUTLIER / np.maximum(np.abs(now), 1e-9)))[:, None]
        pull = math.sqrt(PULL) * np.eye(len(names))
        left = np.vstack([slopes * scale, pull])
        right = np.concatenate([-now * scale[:, 0], -math.sqrt(PULL) * moved])
        change, *_ = np.linalg.lstsq(left, right, rcond=None)
        moved = np.clip(moved + np.clip(change, -1.0, 1.0), -FAR, FAR)
    return _moved(start, names, moved)


def _predicted(trial: Trial) -> Callable[[Constants], float]:
    problem = Problem.of_bytes(trial.collective, trial.world, trial.nbytes, ITEMSIZE, ranks_per_host=trial.world)
    memory = USUAL_LANE._replace(single_copy=trial.single_copy)
    return seconds_by(problem, trial.algorithm, ITEMSIZE, trial.chunk_bytes, memory)


def _moved(start: Constants, names: Sequence[str], by: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Constants:
    factors = dict(zip(names, np.exp(by), strict=True))
    changes: dict[str, Any] = {
        name: float(getattr(start, name) * factors[name]) for name in OF_MESSAGES if name in factors
    }
    changes["shared"] = replace(
        start.shared,
        **{
            name: float(getattr(start.shared, name) * factors[f"shared.{name}"])
            for name in OF_SHARED_MEMORY
            if f"shared.{name}" in factors
        },
    )
    return replace(start, **changes)
