"""Constants fitted to trials: they are found again where trials follow the model, and stay where nothing is said."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from asyncdist.plan.cost.constants import ASYNCIO, SharedMemory
from asyncdist.plan.problem import Problem
from asyncdist.plan.records import NO_LANE, USUAL_LANE
from asyncdist.plan.selection.selector import candidates
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.tuning.fit import FAR, fitted, judge, summary
from asyncdist.tuning.trials import ITEMSIZE, Trial

CORES = 2
TRUTH = replace(
    ASYNCIO,
    alpha_s=90e-6,
    beta_s=1 / 3e9,
    overhead_s=12e-6,
    copy_s=1 / 4e9,
    turn_s=200e-6,
    cores=CORES,
    shared=SharedMemory(30e-6, 15e-6, 3e-6, 1 / 6e9, 1 / 5e9, 40e-6),
)
"""A machine three times as slow as the one that built-in constants are for."""
OTHER = replace(
    TRUTH,
    alpha_s=30e-6,
    beta_s=1 / 8e9,
    gamma_s=1 / 10e9,
    overhead_s=4e-6,
    copy_s=1 / 10e9,
    turn_s=50e-6,
    shared=SharedMemory(100e-6, 15e-6, 3e-6, 1 / 1.5e9, 1 / 1.5e9, 40e-6),
)
"""One with other strengths: messages are fast, and shared memory is slow."""


def trials_of(constants, noise=0.0, memory=USUAL_LANE, sizes=(1 << 10, 16 << 10, 256 << 10, 4 << 20)):
    """What trials would say on a machine of these constants."""
    dice = random.Random(1)
    found = []
    for collective in ("all_reduce", "all_gather", "broadcast", "all_to_all"):
        for world in (2, 4):
            for nbytes in sizes:
                problem = Problem.of_bytes(collective, world, nbytes, ITEMSIZE, ranks_per_host=world)
                for one in candidates(problem, ITEMSIZE, Tuning(constants, world), memory=memory):
                    seconds = one.seconds * dice.lognormvariate(0, noise)
                    how = one.algorithm, one.chunk_bytes, seconds, 9, one.single_copy
                    found.append(Trial(collective, world, nbytes, *how))
    return found


def test_constants_are_found_again():
    found = fitted(trials_of(TRUTH), ASYNCIO, CORES)
    for name in ("alpha_s", "turn_s", "copy_s", "gamma_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.15), name
    assert found.overhead_s == pytest.approx(TRUTH.overhead_s, rel=0.4), "part of a message in most of what is tried"
    for name in ("wake_s", "copy_s"):
        assert getattr(found.shared, name) == pytest.approx(getattr(TRUTH.shared, name), rel=0.15), name
    for name in ("step_s", "reduce_s"):  # to begin and to end items is little beside the bytes of all that has items
        assert getattr(found.shared, name) == pytest.approx(getattr(TRUTH.shared, name), rel=0.5), name


def test_what_reading_another_process_costs_is_found_in_what_fits_no_cache():
    readable = USUAL_LANE._replace(single_copy=True)
    for read_s in (1 / 3e9, 1 / 12e9):
        truth = replace(TRUTH, shared=replace(TRUTH.shared, read_s=read_s))
        trials = trials_of(truth, memory=readable) + trials_of(truth, memory=readable, sizes=(32 << 20,))
        assert any(one.single_copy for one in trials)
        found = fitted(trials, ASYNCIO, CORES)
        assert found.shared.read_s == pytest.approx(read_s, rel=0.3)


def test_choices_are_better_with_fitted_constants_than_without():
    trials = trials_of(OTHER, noise=0.03)
    start = replace(ASYNCIO, cores=CORES)
    before = summary(judge(trials, start))
    after = summary(judge(trials, replace(fitted(trials, start, CORES), cores=CORES)))
    assert before.close < after.close
    assert before.tolerable < after.tolerable == after.cells
    assert after.mean < 1.04 < before.mean


def test_what_no_trial_tells_stays_as_it_was():
    found = fitted(trials_of(TRUTH, memory=NO_LANE), ASYNCIO, CORES)
    assert found.alpha_s == pytest.approx(TRUTH.alpha_s, rel=0.3)
    for name in ("wake_s", "step_s", "operand_s", "copy_s", "reduce_s", "begin_s", "read_s"):
        assert getattr(found.shared, name) == pytest.approx(getattr(ASYNCIO.shared, name))
    assert found.between == ASYNCIO.between
    assert fitted([], ASYNCIO, CORES) is ASYNCIO


def test_a_few_trials_that_somebody_disturbed_do_not_decide():
    trials = trials_of(TRUTH)
    disturbed = [one._replace(seconds=20 * one.seconds) if not index % 15 else one for index, one in enumerate(trials)]
    found = fitted(disturbed, ASYNCIO, CORES)
    assert found.alpha_s == pytest.approx(TRUTH.alpha_s, rel=0.5)
    assert found.shared.wake_s == pytest.approx(TRUTH.shared.wake_s, rel=0.6)


def test_no_constant_moves_further_than_it_can_be_believed():
    slow = [one._replace(seconds=1e6 * one.seconds) for one in trials_of(TRUTH)]
    found = fitted(slow, ASYNCIO, CORES)
    assert found.alpha_s <= ASYNCIO.alpha_s * 2.72**FAR


def test_what_is_nothing_stays_nothing():
    start = replace(ASYNCIO, copy_s=0.0, turn_s=0.0, shared=replace(ASYNCIO.shared, begin_s=0.0))
    found = fitted(trials_of(TRUTH), start, CORES)
    assert (found.copy_s, found.turn_s, found.shared.begin_s) == (0, 0, 0)
