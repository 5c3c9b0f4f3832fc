"""Whom a rank asks about an operation that takes long, and when."""

from __future__ import annotations

from typing import Any

import pytest

from asyncdist.gpu.mismatch_probe import ASK_AFTER_S, LEFT_GRACE_S, MAX_AT_ONCE, MismatchProbe

KEY = (0, 7)


class Asked:
    """MismatchProbe of rank 1 of `size`, and the ranks asked so far."""

    def __init__(self, size: int, known: tuple[int, ...] = (), gone: frozenset[int] = frozenset()) -> None:
        self.ranks: list[int] = []
        self.gone = gone
        self.questions = MismatchProbe(tuple(range(size)), 1, lambda tag, sequence: known, self._ask)

    def _ask(self, tag: int, sequence: int, rank: int) -> bool:
        assert (tag, sequence) == KEY
        self.ranks.append(rank)
        return rank not in self.gone

    def at(self, now_s: float, *under_way: Any) -> list[int]:
        """Who is asked then."""
        before = len(self.ranks)
        self.questions.look(now_s, under_way or [(KEY, 0.0)])
        return self.ranks[before:]


def test_neighbors_are_asked_one_after_the_other_and_ever_more() -> None:
    asked = Asked(5)
    assert asked.at(ASK_AFTER_S * 0.99) == []
    assert asked.at(ASK_AFTER_S) == [2]
    assert asked.at(1.9 * ASK_AFTER_S) == []
    assert asked.at(2 * ASK_AFTER_S) == [3, 4]
    assert asked.at(4 * ASK_AFTER_S) == [0, 2, 3, 4]


@pytest.mark.parametrize("size", [MAX_AT_ONCE + 1, MAX_AT_ONCE + 2, 1000])
def test_never_more_than_a_few_at_once(size: int) -> None:
    asked = Asked(size)
    found = [len(asked.at(ASK_AFTER_S * 2**turn)) for turn in range(6)]
    assert found == [1, 2, 4, MAX_AT_ONCE, MAX_AT_ONCE, MAX_AT_ONCE]


def test_who_is_waited_for_is_asked_where_that_is_known() -> None:
    asked = Asked(100, known=(42, 43))
    assert asked.at(ASK_AFTER_S) == [42]
    assert asked.at(2 * ASK_AFTER_S) == [42, 43]
    assert asked.at(4 * ASK_AFTER_S) == [42, 43]


def test_only_the_oldest_of_a_tag() -> None:
    asked = Asked(2)
    assert asked.at(ASK_AFTER_S, (KEY, 0.0), ((0, 8), 0.0), ((0, 9), 0.0)) == [0]


def test_alone_nobody_is_asked() -> None:
    questions = MismatchProbe((0,), 0, lambda tag, sequence: (), lambda tag, sequence, rank: pytest.fail("asked"))
    questions.look(100.0, [(KEY, 0.0)])


def test_who_ended_is_asked_about_anew() -> None:
    asked = Asked(3)
    asked.at(ASK_AFTER_S)
    asked.questions.look(ASK_AFTER_S, [])
    assert asked.at(ASK_AFTER_S) == [2]


def test_a_rank_that_left_is_waited_for_a_little_more() -> None:
    asked = Asked(3, gone=frozenset({2}))
    questions = asked.questions
    asked.at(1.0)
    assert questions.waits_in_vain(1.0 + LEFT_GRACE_S, 0.0) is None
    assert questions.waits_in_vain(1.01 + LEFT_GRACE_S, 0.0) == 2
    assert questions.waits_in_vain(3.0 + LEFT_GRACE_S, 3.0) is None  # it has moved meanwhile
    assert Asked(3).questions.waits_in_vain(1e9, 0.0) is None
