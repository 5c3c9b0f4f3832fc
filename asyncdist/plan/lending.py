"""Lending: which items the other ranks may read where they are, because nothing overwrites them too early.

An item is a copy of a slice, as a rule. Where no later step of its rank overwrites the slice, or only once all who
fetch the item have done so (`Publish.shielded`, a claim that `proof.shielded` proves), the slice itself can be lent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from typing import Final, TypeGuard

from asyncdist.plan.repeated import RepeatedSteps
from asyncdist.plan.steps import Buffer, Plan, Publish, Send, Step

__all__ = ["Writes", "claims", "lendable"]

READ_ONLY: Final = (Send, Publish)  # a tuple: a union would be built anew at every isinstance


class Writes:
    """What the steps of one plan write, by place."""

    def __init__(self, plan: Plan) -> None:
        self._places: dict[Buffer, list[tuple[int, int, int]]] = {}
        for index, step in enumerate(plan.steps):
            if not isinstance(step, READ_ONLY):
                self._places.setdefault(step.target.buffer, []).append((step.target.offset, step.target.end, index))
        self._longest = {}
        for buffer, places in self._places.items():
            places.sort()
            self._longest[buffer] = max(end - start for start, end, _ in places)

    def over(self, index: int, item: Publish) -> Iterator[int]:
        """Yield the steps that overwrite elements of what step `index` has published."""
        buffer, start, length = item.source
        places = self._places.get(buffer, [])
        first = bisect_left(places, (start - self._longest.get(buffer, 0), 0, 0))
        last = bisect_left(places, (start + length, 0, 0))
        for _, end, later in places[first:last]:
            if end > start and later > index:
                yield later


def lendable(plan: Plan) -> Container[int]:
    """Steps that publish what no later step of the plan overwrites, or only once all have read it (`shielded`).

    Of plans with repeated steps, only those that say so.
    """
    if isinstance(plan.steps, RepeatedSteps):
        return _Shielded(plan.steps)
    items = [(index, step) for index, step in enumerate(plan.steps) if isinstance(step, Publish)]
    if all(step.shielded for _, step in items):
        return frozenset(index for index, _ in items)
    writes = Writes(plan)
    return frozenset(index for index, step in items if step.shielded or next(writes.over(index, step), None) is None)


class _Shielded(Container[int]):
    """Steps that call what they publish shielded."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    def __contains__(self, index: object) -> bool:
        assert isinstance(index, int)
        return claims(self._steps[index])


def claims(step: Step) -> TypeGuard[Publish]:
    """Whether a step calls what it publishes shielded."""
    return isinstance(step, Publish) and step.shielded
