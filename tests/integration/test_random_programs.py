"""Random SPMD programs of a few seeds; `make soak` runs them for ten minutes."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from spmd_memory import FREE, Pool
from spmd_program import FAULTS, Fault, Program, program
from spmd_soak import run_program
from spmd_track import GIVEN_UP, WrongError
from spmd_track import Fault as FaultHeard
from spmd_values import Array, reduced, same

import asyncdist as dist

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

BUSY_S = 10.0
"""What a machine that runs many tests at once may take longer than it should."""
FIRST_SEEDS = range(1000)


def first(fits: Callable[[Program], bool]) -> Program:
    return next(made for made in map(program, FIRST_SEEDS) if fits(made))


def short(made: Program) -> bool:
    return made.size < 5 and sum(len(track.steps) for track in made.tracks) < 30


def faulty(kind: str) -> Callable[[Program], bool]:
    return lambda made: short(made) and made.fault is not None and made.fault.kind == kind and made.fault.for_s < 2


def two_worlds(made: Program) -> bool:
    return short(made) and made.worlds == 2 and made.at_once and made.fault is None


KINDS: Mapping[str, Callable[[Program], bool]] = {
    "two worlds": two_worlds,
    "stall": lambda made: short(made) and any(track.ending == "stall" for track in made.tracks),
    **{kind: faulty(kind) for kind in FAULTS},
}
SLOW = {"kill": pytest.mark.slow("the rank that hosts the store waits five seconds for the goodbye of who was killed")}


@pytest.mark.parametrize("what", [pytest.param(what, marks=SLOW.get(what, ())) for what in KINDS])
def test_every_result_and_every_error_is_right(what: str) -> None:
    made = first(KINDS[what])
    assert not run_program(made, BUSY_S), str(made)


def test_a_loss_that_the_program_does_not_explain_is_found() -> None:
    made = first(two_worlds)
    made.fault = Fault("kill", made.size - 1, 0.0)  # its ranks make the program of the seed, without
    assert f"lost rank {made.size - 1}" in run_program(made, BUSY_S)


@pytest.mark.parametrize("kind", ["kill", "leave"])
async def test_which_errors_a_fault_explains(kind: str) -> None:
    made = first(lambda made: made.fault is not None and made.fault.kind == kind)
    assert made.fault is not None
    culprit, other = made.fault.rank, made.fault.rank + 1
    lost, left, gave_up = (
        dist.PeerLostError("lost", culprit),
        dist.PeerLostError("left", other, left=True),
        dist.GroupAbortedError("gave up", GIVEN_UP, other),
    )
    fault = FaultHeard(made)
    fault.hear("here", lost, message=False)
    assert fault.struck.is_set()
    assert [where for where, _ in fault.heard] == ["here"]
    for error in (left, gave_up):
        fault.hear("a message", error, message=True)
        if kind == "kill":
            with pytest.raises(WrongError, match="a collective"):
                fault.hear("a collective", error, message=False)
    for wrong in (dist.PeerLostError("lost", other), dist.CollectiveTimeoutError("late", [culprit])):
        with pytest.raises(WrongError, match="here"):
            fault.hear("here", wrong, message=True)


def test_a_seed_means_the_same_program_to_all() -> None:
    for seed in range(50):
        assert program(seed) == program(seed)
        assert str(program(seed)).startswith(f"seed {seed}: ")
    assert len({json.dumps(str(program(seed))) for seed in range(50)}) == 50


def test_who_writes_beside_an_array_or_late_is_found() -> None:
    def allocate(octets: int) -> Array:
        return np.empty(octets, np.uint8)

    for seed in range(20):
        pool = Pool(allocate, random.Random(seed))
        loan = pool.loan(np.arange(60, dtype=np.int16).reshape(3, 20), np.ones((3, 20), np.int16))
        assert "elements" in loan.wrong()
        loan.array[...] = 1
        assert loan.wrong() == ""
        loan.block[loan.span.size - loan.array.itemsize // 2 - 1] ^= 1  # of the last element or beside it
        assert loan.wrong()
        pool.give_back(loan)
        assert (loan.block == FREE).all()
        loan.array[0, 0] = 7
        pool.check()
        assert pool.problems


def test_what_numpy_says_of_a_reduction() -> None:
    parts = [np.array([1, 200], np.uint8), np.array([2, 100], np.uint8)]
    expected = {"sum": [3, 44], "product": [2, 32], "min": [1, 100], "avg": [1, 22], "last": [2, 100], "bxor": [3, 172]}
    for op, numbers in expected.items():
        assert same(reduced(op, parts), np.array(numbers, np.uint8)), op
    assert not same(parts[0], parts[0].astype(np.int16))
    assert not same([parts[0]], (parts[0],))
