"""The cost model against trials: constants that fit them, and whether the selector chooses what is fastest.

Fit: the constants of the cost model with which it says what trials took, or comes as close as it can.

Gauss and Newton's method on the logarithms of constants and of times, so that nothing becomes negative and a time that
is half of what it should be counts as much as one that is twice as long. Each constant is pulled toward where it began:
what no trial depends on stays as it was.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np

from asyncdist.plan.algorithms.registry import needs_lane
from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import NO_LANE, USUAL_LANE
from asyncdist.plan.selection.prediction import seconds_by
from asyncdist.plan.selection.selector import candidates
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.tuning.trials import ITEMSIZE, Trial

__all__ = ["CLOSE", "TOLERABLE", "Choice", "Judged", "fitted", "judge", "summary"]

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


CLOSE: Final = 1.1
"""Within this factor of the fastest, the next measurement may say the opposite."""

TOLERABLE: Final = 1.3
"""Beyond this one, the cost model is wrong."""


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


class Judged(NamedTuple):
    """One candidate: what it took, and what it was predicted to take."""

    trial: Trial
    predicted_s: float


class Choice(NamedTuple):
    """One cell. `candidates` are in the order of their predictions, the chosen one first."""

    candidates: tuple[Judged, ...]
    fastest: Judged

    @property
    def chosen(self) -> Judged:
        """Return the candidate that would be taken."""
        return self.candidates[0]

    @property
    def ratio(self) -> float:
        """Return how many times as long as the fastest the chosen one took."""
        return self.chosen.trial.seconds / self.fastest.trial.seconds


class Summary(NamedTuple):
    """How good choices are: of so many `cells`, in how many the chosen one is the fastest, or about as fast."""

    cells: int
    fastest: int
    close: int
    tolerable: int
    worst: float
    mean: float
    """Geometric mean of the ratios."""


def judge(trials: Sequence[Trial], constants: Constants) -> list[Choice]:
    """Say what `constants` (with the cores that the ranks shared) would have chosen among `trials`, cell by cell."""
    cells: dict[tuple[str, int, int], dict[str, Trial]] = {}
    for one in trials:
        cells.setdefault((one.collective, one.world, one.nbytes), {})[one.algorithm] = one
    choices = []
    for (collective, world, nbytes), tried in cells.items():
        problem = Problem.of_bytes(collective, world, nbytes, ITEMSIZE, ranks_per_host=world)
        shared = any(needs_lane(collective, name) for name in tried)
        memory = USUAL_LANE._replace(single_copy=any(one.single_copy for one in tried.values())) if shared else NO_LANE
        found = candidates(problem, ITEMSIZE, Tuning(constants, world), memory=memory)
        judged = tuple(Judged(tried[one.algorithm], one.seconds) for one in found if one.algorithm in tried)
        choices.append(Choice(judged, min(judged, key=attrgetter("trial.seconds"))))
    return choices


def summary(choices: Sequence[Choice]) -> Summary:
    """Sum choices up; of at least one."""
    ratios = [choice.ratio for choice in choices]
    return Summary(
        len(ratios),
        sum(ratio == 1.0 for ratio in ratios),
        sum(ratio <= CLOSE for ratio in ratios),
        sum(ratio <= TOLERABLE for ratio in ratios),
        max(ratios),
        math.exp(statistics.fmean(map(math.log, ratios))),
    )
