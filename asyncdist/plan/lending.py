"""Lending: which items the other ranks may read where they are, because nothing overwrites them too early.

An item is a copy of a slice, as a rule. Where no later step of its rank overwrites the slice, or only once all who
fetch the item have done so (`Publish.shielded`), the slice itself can be lent. `check_shielded` proves that claim.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TypeGuard

from asyncdist.plan.repeated import RepeatedSteps
from asyncdist.plan.steps import Buffer, Plan, Publish, Send, Step
from asyncdist.plan.symbols import PlanError

__all__ = ["check_shielded", "lendable"]


class _Writes:
    """What the steps of one plan write, by place."""

    def __init__(self, plan: Plan) -> None:
        self._places: dict[Buffer, list[tuple[int, int, int]]] = {}
        for index, step in enumerate(plan.steps):
            if not isinstance(step, Send | Publish):
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
    writes = _Writes(plan)
    return frozenset(index for index, step in items if step.shielded or next(writes.over(index, step), None) is None)


class _Shielded(Container[int]):
    """Steps that call what they publish shielded."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    def __contains__(self, index: object) -> bool:
        assert isinstance(index, int)
        return _claims(self._steps[index])


def _claims(step: Step) -> TypeGuard[Publish]:
    return isinstance(step, Publish) and step.shielded


def check_shielded(plans: Sequence[Plan], bases: Sequence[int], fetchers: Mapping[int, Sequence[int]]) -> None:
    """Raise PlanError if a shielded item may be overwritten before all who fetch it have done so.

    Steps are numbered through all plans, rank r's from `bases[r]` on; `fetchers` are, by step that publishes, those
    that fetch its item.
    """
    claiming = [
        rank for rank, plan in enumerate(plans) if any(isinstance(s, Publish) and s.shielded for s in plan.steps)
    ]
    if not claiming:
        return
    nodes = [rank for rank, plan in enumerate(plans) for _ in plan.steps]
    earlier = _earlier(plans, bases, fetchers)
    for rank in claiming:
        plan = plans[rank]
        writes = _Writes(plan)
        for index, step in enumerate(plan.steps):
            if not _claims(step):
                continue
            for later in writes.over(index, step):
                missing = set(fetchers.get(bases[rank] + index, ()))
                seen = {bases[rank] + later}
                ahead = [bases[rank] + later]
                while ahead and missing:
                    for other in earlier[ahead.pop()]:
                        if other not in seen:
                            seen.add(other)
                            missing.discard(other)
                            ahead.append(other)
                if missing:
                    raise PlanError(
                        f"rank {rank} says that step {index} is shielded, but its step {later} may overwrite the item "
                        f"before ranks {sorted({nodes[fetch] for fetch in missing})} have read it"
                    )


def _earlier(plans: Sequence[Plan], bases: Sequence[int], fetchers: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """By step: those that are over when it begins, the one that publishes what it fetches first."""
    published = {fetch: [publish] for publish, fetches in fetchers.items() for fetch in fetches}
    return [
        [*published.get(number, ()), *[base + other for other in step.after]]
        for base, plan in zip(bases, plans, strict=False)
        for number, step in enumerate(plan.steps, base)
    ]
