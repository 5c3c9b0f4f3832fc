"""Operations in the records of a lane on several ranks in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
from shared_lane_kit import Rank, make

from asyncdist.collectives.shared.channel import NO_NEEDS, Needs
from asyncdist.collectives.shared.layout import RECORDS


class Giving:
    fingerprint, dtype, nbytes = 1, np.dtype(np.uint8), 1
    gives = True
    folds = pieces = False
    needs: Needs = NO_NEEDS
    needed: tuple[int, ...] = ()


class Taking(Giving):
    needed = (0, 1, 2)


class Small:
    """One reduction to rank 0, in the records."""

    def __init__(self, rank: Rank) -> None:
        self.kind: Any = Giving if rank.index else Taking
        self.number = -1
        self.nbytes = self.kind.nbytes
        self.payloads: Any = None
        self.folded = False
        self.over = False
        rank.lane.add_express(self)

    def wakes(self, *, last: bool) -> tuple[int, ...]:
        return ()

    def put(self, target: np.ndarray[Any, Any]) -> None:
        target[...] = 7

    def fold(self) -> None:
        raise AssertionError("nothing is folded here")

    def take(self) -> None:
        assert all(operand[0] == 7 for operand in self.payloads.operands)

    def done(self) -> None:
        self.over = True

    def fail(self, error: BaseException) -> None:
        raise error


def test_who_looks_again_and_again_tells_what_has_ended_before_it_sleeps() -> None:
    (root, hasty, slow), _ = make(3)
    given = [Small(hasty) for _ in range(RECORDS + 3)]
    assert sum(one.over for one in given) == RECORDS, "it is as far ahead as it may be"

    def reduce() -> None:
        taken = Small(root)
        assert not root.lane.look(), "one is missing"
        Small(slow)
        assert root.lane.look()
        assert taken.over

    reduce()
    assert hasty.rung, "every sixteenth is told of at once"
    hasty.look()
    hasty.look()  # it has asked for that turn
    assert sum(one.over for one in given) == RECORDS + 1
    hasty.rung = False
    reduce()
    reduce()
    assert not hasty.rung, "there may be more to tell of soon"
    root.look()
    assert hasty.rung
    hasty.look()
    hasty.look()
    assert all(one.over for one in given)


def test_in_the_place_of_one_given_up_before_its_turn_nobody_finds_anything() -> None:
    """What lies there is of the operation that had this place in the ring before."""
    (root, hasty, slow), _ = make(3)
    unbegun = [Small(hasty) for _ in range(RECORDS + 1)][-1]
    hasty.lane.drop_express(unbegun)
    taken = [Small(root) for _ in range(RECORDS)]
    for _ in range(RECORDS):
        Small(slow)
    for _ in range(3):
        for rank in (root, hasty, slow):
            rank.lane.poll()
    assert all(one.over for one in taken)
    last = Small(root)
    Small(slow)
    root.lane.poll()
    assert hasty.lane.core.issued == RECORDS + 1
    assert not last.over
