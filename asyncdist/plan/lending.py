"""Lending: which items the other ranks may read where they are, because nothing overwrites them too early.

An item is a copy of a slice, as a rule. Where no later step of its rank overwrites the slice, or only once all who
fetch the item have done so (`Publish.shielded`), the slice itself can be lent. `check_shielded` proves that claim.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Final, TypeGuard

from asyncdist.plan.repeated import RepeatedSteps
from asyncdist.plan.steps import Buffer, Plan, Publish, Send, Step
from asyncdist.plan.symbols import PlanError

__all__ = ["check_shielded", "lendable"]

READ_ONLY: Final = (Send, Publish)  # a tuple: a union would be built anew at every isinstance


class _Writes:
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
    claiming = [rank for rank, plan in enumerate(plans) if any(map(_claims, plan.steps))] if fetchers else []
    if not claiming:
        return
    earlier = _earlier(plans, bases, fetchers)
    depths = _depths(earlier)
    for rank in claiming:
        plan = plans[rank]
        writes = _Writes(plan)
        for index, step in enumerate(plan.steps):
            if not _claims(step):
                continue
            for later in writes.over(index, step):
                missing = _not_over(bases[rank] + later, fetchers.get(bases[rank] + index, ()), earlier, depths)
                if missing:
                    ranks = sorted({bisect_right(bases, fetch) - 1 for fetch in missing})
                    raise PlanError(
                        f"rank {rank} says that step {index} is shielded, but its step {later} may overwrite the item "
                        f"before ranks {ranks} have read it"
                    )


def _not_over(
    step: int, awaited: Sequence[int], earlier: Sequence[Sequence[int]], depths: Sequence[int]
) -> Collection[int]:
    """Which of `awaited` may still be going on when `step` begins."""
    missing = set(awaited)
    lowest = min((depths[each] for each in awaited), default=0)
    seen = {step}
    ahead = [step]
    while ahead and missing:
        for other in earlier[ahead.pop()]:
            if depths[other] >= lowest and other not in seen:  # before lower ones there is none of them
                seen.add(other)
                missing.discard(other)
                ahead.append(other)
    return missing


def _earlier(plans: Sequence[Plan], bases: Sequence[int], fetchers: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """By step: those that are over when it begins, the one that publishes what it fetches first."""
    published = {fetch: [publish] for publish, fetches in fetchers.items() for fetch in fetches}
    return [
        [*published.get(number, ()), *[base + other for other in step.after]]
        for base, plan in zip(bases, plans, strict=False)
        for number, step in enumerate(plan.steps, base)
    ]


def _depths(earlier: Sequence[Sequence[int]]) -> Sequence[int]:
    """By step: how many come one after the other before it, at most. Those that wait for themselves count as last."""
    followers: list[list[int]] = [[] for _ in earlier]
    for step, others in enumerate(earlier):
        for other in others:
            followers[other].append(step)
    waiting = [len(others) for others in earlier]
    depths = [len(earlier)] * len(earlier)
    ready = [step for step, count in enumerate(waiting) if not count]
    for step in ready:
        depths[step] = 1 + max((depths[other] for other in earlier[step]), default=-1)
        for follower in followers[step]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    return depths
