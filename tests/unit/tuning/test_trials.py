"""Trials of all algorithms, in one process; what they notice; and the verdict on choices."""

from __future__ import annotations

import pytest

from asyncdist.plan.algorithms.registry import algorithms
from asyncdist.plan.cost.constants import ASYNCIO
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.testing import run_world
from asyncdist.tuning import trials as subject
from asyncdist.tuning.fit import Choice, Judged, judge, summary
from asyncdist.tuning.trials import EXERCISES, Exercise, Trial, TrialError, host_backend, try_all


@pytest.mark.parametrize("collective", EXERCISES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_algorithm_is_tried_and_ranks_agree(collective, world):
    async def main(group):
        return await try_all(group, collective, 1000, Tuning(ASYNCIO, world), 0.0)

    found, *others = run_world(world, main)
    assert all(other == found for other in others)
    assert {one.algorithm for one in found} == set(algorithms(collective))
    assert all(one.samples >= 4 and one.world == world and one.nbytes == 1000 for one in found)


def test_only_those_that_are_named():
    async def main(group):
        return await try_all(group, "all_reduce", 8, Tuning(ASYNCIO, 2), 0.0, names=("ring",))

    assert [one.algorithm for one in run_world(2, main)[0]] == ["ring"]


def test_choices_of_the_group_are_as_before_a_trial():
    async def main(group):
        backend = host_backend(group)
        before = backend.tuning
        await try_all(group, "all_reduce", 8, Tuning(ASYNCIO, 2), 0.0)
        return backend.tuning == before

    assert run_world(2, main) == [True, True]


def test_a_wrong_result_is_an_error_on_every_rank(monkeypatch):
    monkeypatch.setattr(Exercise, "wrong", lambda self: self._group.rank == 1)

    async def main(group):
        with pytest.raises(TrialError, match=r"broadcast by .*, 2 ranks: wrong result"):
            await try_all(group, "broadcast", 64, Tuning(ASYNCIO, 2), 0.0)

    run_world(2, main)


@pytest.mark.parametrize("collective", EXERCISES)
def test_results_are_looked_at_whole(collective):
    async def main(group):
        exercise = Exercise(group, collective, 4000)
        exercise.prepare()
        before = exercise.wrong()
        await exercise.issue()
        right = not exercise.wrong()
        exercise._target[-1] += 1
        return before, right, exercise.wrong()

    found = run_world(3, main)
    assert all(right and noticed for _, right, noticed in found)
    assert all(before for before, _, _ in found[1:])


def test_the_hopeless_get_one_turn_only(monkeypatch):
    slow = {"ring": 1.0}

    async def turn(group, backend, exercise, one, tuning, collective, samples):
        return [slow.get(one.algorithm, 1e-3)] * samples

    monkeypatch.setattr(subject, "_turn", turn)

    async def main(group):
        return await try_all(group, "all_reduce", 8, Tuning(ASYNCIO, 2), 100.0)

    samples = {one.algorithm: one.samples for one in run_world(2, main)[0]}
    assert samples.pop("ring") == subject.TURN
    assert set(samples.values()) == {subject.MAX_SAMPLES}


def trial(algorithm, seconds, nbytes=8):
    return Trial("all_reduce", 2, nbytes, algorithm, 1 << 17, seconds, 9)


def test_choices_are_judged_by_what_was_measured():
    [choice] = judge([trial("ring", 1e-5), trial("recursive_doubling", 2e-5)], ASYNCIO)
    assert choice.chosen.trial.algorithm == "recursive_doubling"
    assert choice.fastest.trial.algorithm == "ring"
    assert choice.ratio == 2
    assert choice.chosen.predicted_s < choice.fastest.predicted_s


def test_a_summary_at_its_limits_and_past():
    def choice(ratio):
        fastest = Judged(trial("ring", 1.0), 1.0)
        return Choice((Judged(trial("direct", ratio), 1.0), fastest), fastest)

    found = summary([choice(ratio) for ratio in (1.0, 1.1, 1.1001, 1.3, 1.3001)])
    assert found[:4] == (5, 1, 2, 4)
    assert found.worst == 1.3001
