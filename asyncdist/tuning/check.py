"""Check: whether the selector chooses what is fastest, from trials of everything that it could have chosen."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from asyncdist.plan.algorithms.registry import needs_lane
from asyncdist.plan.cost.constants import Constants
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import NO_LANE, USUAL_LANE
from asyncdist.plan.selection.selector import candidates
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.tuning.exercises import ITEMSIZE
from asyncdist.tuning.trials import Trial

__all__ = ["CLOSE", "TOLERABLE", "Choice", "Judged", "Summary", "judge", "summary"]

CLOSE: Final = 1.1
"""Within this factor of the fastest, the next measurement may say the opposite."""

TOLERABLE: Final = 1.3
"""Beyond this one, the cost model is wrong."""


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
