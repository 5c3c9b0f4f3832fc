"""Published items: which step fetches which item, and what items wait for where memory for them is bounded.

And the proof that an item which is lent (`plan.summary.lendable`) is overwritten only once all who fetch it have done
so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from asyncdist.plan.proof.symbols import PlanError
from asyncdist.plan.steps import ANYONE, Fetch, FetchReduce, Plan, Publish
from asyncdist.plan.summary import Writes, claims

__all__ = ["Published", "check_shielded"]

FETCHES: Final = (Fetch, FetchReduce)  # a tuple: a union would be built anew at every isinstance


class Published:
    """Items of all ranks' plans. Raises PlanError where one is fetched that no rank publishes, or the other way round.

    Steps are numbered through all plans; `bases` says where each plan's begin.
    """

    def __init__(self, plans: Sequence[Plan], bases: Sequence[int]) -> None:
        self.source: dict[int, int] = {}
        """By fetching step: the step that publishes what it fetches."""
        self.fetched: list[list[tuple[int, list[int]]]] = []
        """By rank, in order of items: the step that publishes it, and those that fetch of it."""
        self.fetches: dict[int, list[int]] = {}
        """By publishing step: those that fetch of its item."""
        self._memory = [plan.outstanding_items for plan in plans]
        fetches: dict[tuple[int, int], list[int]] = {}
        steps: dict[int, Fetch | FetchReduce] = {}
        for base, plan in zip(bases, plans, strict=False):
            for number, step in enumerate(plan.steps, base):
                if isinstance(step, FETCHES):
                    fetches.setdefault((step.peer, step.item), []).append(number)
                    steps[number] = step
        for rank, (base, plan) in enumerate(zip(bases, plans, strict=False)):
            self.fetched.append([])
            for number, published in enumerate(plan.steps, base):
                if not isinstance(published, Publish):
                    continue
                found = fetches.pop((rank, published.item), [])
                _check_covered(rank, published, [steps[fetch] for fetch in found])
                if published.reader != ANYONE:
                    _check_reader(rank, published, {bisect_right(bases, fetch) - 1 for fetch in found})
                self.fetched[-1].append((number, found))
                self.fetches[number] = found
                self.source.update((fetch, number) for fetch in found)
        if fetches:
            raise PlanError(f"fetched and not published: (rank, item) {sorted(fetches)[:3]}")

    def waits(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of steps, the first of which waits for the second.

        Fetches wait for their item. An item waits until those that lie longest have been fetched by all ranks that do,
        so many that there is memory for it: it is freed from the oldest one on.
        """
        for memory, items in zip(self._memory, self.fetched, strict=True):
            for item, (publish, fetches) in enumerate(items):
                for fetch in fetches:
                    yield fetch, publish
                if item >= memory:
                    for fetch in items[item - memory][1]:
                        yield publish, fetch


def _check_reader(rank: int, published: Publish, readers: set[int]) -> None:
    """Whether the one rank that an item is said to be for fetches it, and no other."""
    if readers != {published.reader}:
        raise PlanError(
            f"item {published.item} of rank {rank} is for rank {published.reader}, and ranks {sorted(readers)} fetch it"
        )


def _check_covered(rank: int, published: Publish, fetches: Sequence[Fetch | FetchReduce]) -> None:
    """Whether all of an item is fetched, and nothing beyond it."""
    length, title = published.source.length, f"item {published.item} of rank {rank}, of {published.source.length}"
    if not fetches:
        raise PlanError(f"{title} elements, is never fetched")
    reached = 0
    for start, end in sorted((fetch.offset, fetch.offset + fetch.target.length) for fetch in fetches):
        if end > length:
            raise PlanError(f"{title} elements, is fetched up to {end}")
        if start > reached:
            raise PlanError(f"{title} elements, is not fetched from {reached} to {start}")
        reached = max(reached, end)
    if reached < length:
        raise PlanError(f"{title} elements, is fetched up to {reached} only")


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
