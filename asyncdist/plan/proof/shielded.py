"""Shielded: proof that what a plan lends is overwritten only once all who fetch it have done so; see `plan.lending`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence

from asyncdist.plan.lending import Writes, claims
from asyncdist.plan.proof.symbols import PlanError
from asyncdist.plan.steps import Plan

__all__ = ["check_shielded"]


def check_shielded(plans: Sequence[Plan], bases: Sequence[int], fetchers: Mapping[int, Sequence[int]]) -> None:
    """Raise PlanError if a shielded item may be overwritten before all who fetch it have done so.

    Steps are numbered through all plans, rank r's from `bases[r]` on; `fetchers` are, by step that publishes, those
    that fetch its item.
    """
    claiming = [rank for rank, plan in enumerate(plans) if any(map(claims, plan.steps))] if fetchers else []
    if not claiming:
        return
    earlier = _earlier(plans, bases, fetchers)
    depths = _depths(earlier)
    for rank in claiming:
        plan = plans[rank]
        writes = Writes(plan)
        for index, step in enumerate(plan.steps):
            if not claims(step):
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
