"""Run: the plans of all ranks executed together on symbols; or one rank's plan for all, where plans are rotations.

`Published` knows which step fetches which item, and what items wait for where memory for items is bounded.
`check_shielded` proves that an item that may be read where it lies (`plan.summary.lendable`) is overwritten only once
all ranks that fetch the item have done so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from asyncdist.plan.chunks import offsets
from asyncdist.plan.problem import IN_PLACE, Problem
from asyncdist.plan.steps import (
    ANYONE,
    Buffer,
    Copy,
    Fetch,
    FetchReduce,
    Plan,
    Publish,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Slice,
)
from asyncdist.plan.summary import Writes, claims
from plan_proof.relabel import bases_shift
from plan_proof.symbols import Expressions, Memory, PlanError, RotatedExpressions, Values, part_of

__all__ = ["RotatedRun", "Run"]

RECEIVES: Final = (Recv, RecvReduce)  # tuples: a union would be built anew at every isinstance
LOCALS: Final = (Copy, Reduce)
SHARED: Final = (Publish, Fetch, FetchReduce)

LOCAL: Final = -1
"""The partner of a step that is no message."""


class Run:
    """Executes plans together; steps are numbered through all of them.

    A message is one event, for which both its ends must be ready: if that never stops short of the end, no plan relies
    on a send being buffered. A fetch waits for its item, and an item for memory: for as many fetches of earlier ones as
    it takes where each rank has memory for no more items than its plan says. One order is as good as any: events only
    ever make others possible, so none can be lost by taking another one first, and steps of one rank that touch the
    same elements are ordered (`check_hazards`).
    """

    expressions: Expressions

    def __init__(self, problems: Sequence[Problem], plans: Sequence[Plan]) -> None:
        self.problems = problems
        self.plans = plans
        self.bases = offsets([len(plan.steps) for plan in plans])
        self.memory = [(Memory(), Memory(), Memory()) for _ in plans]
        self.heard = [0] * self.bases[-1]
        """By step of a message without elements: the ranks it has heard of, as bits."""
        self.expressions = Expressions(problems[0].world)
        self._steps = [step for plan in plans for step in plan.steps]
        self._nodes = [node for node, plan in enumerate(plans) for _ in plan.steps]
        self._published = Published(plans, self.bases)
        self._items: dict[int, Sequence[Values]] = {}
        """What was published, by step."""

    def execute(self) -> None:
        """Match messages, put the ranks' data where the operation finds it, and take all steps."""
        check_shielded(self.plans, self.bases, self._published.fetches)
        partners = self._match()
        self._fill()
        waiting, followers = self._order()
        ready = [number for number, count in enumerate(waiting) if not count]
        offered = bytearray(len(self._steps))
        done = 0
        while ready:
            number = ready.pop()
            partner = partners[number]
            if partner == LOCAL:
                self._alone(number)
                finished: tuple[int, ...] = (number,)
            elif offered[partner]:
                sender, receiver = (number, partner) if type(self._steps[number]) is Send else (partner, number)
                self._message(sender, receiver)
                finished = (sender, receiver)
            else:
                offered[number] = 1
                continue
            done += len(finished)
            for step_number in finished:
                for follower in followers[step_number]:
                    waiting[follower] -= 1
                    if not waiting[follower]:
                        ready.append(follower)
        if done < len(self._steps):
            stuck = [
                f"rank {self._nodes[number]}: {step}"
                for number, step in enumerate(self._steps)
                if (offered[number] and not offered[partners[number]]) or (isinstance(step, SHARED) and waiting[number])
            ]
            raise PlanError(f"deadlock with {len(self._steps) - done} steps left, among them {stuck[:4]}")

    def heard_before(self, number: int) -> int:
        """Ranks known to have arrived when a step starts, as bits."""
        node = self._nodes[number]
        heard = 1 << node
        for other in self._steps[number].after:
            heard |= self.heard[self.bases[node] + other]
        return heard

    def _match(self) -> list[int]:
        sends: dict[tuple[int, int, int], int] = {}
        receives: dict[tuple[int, int, int], int] = {}
        partners = [LOCAL] * len(self._steps)
        for number, (node, step) in enumerate(zip(self._nodes, self._steps, strict=True)):
            if isinstance(step, LOCALS + SHARED):
                continue
            name, table = self._name(node, step), sends if type(step) is Send else receives
            if name in table:
                raise PlanError(f"message (source, destination, slot) {name} appears twice")
            table[name] = number
        if sends.keys() != receives.keys():
            lost = sorted(sends.keys() - receives.keys())[:3]
            missing = sorted(receives.keys() - sends.keys())[:3]
            raise PlanError(f"sent and not received: {lost}; awaited and not sent: {missing}")
        for name, sender in sends.items():
            receiver = receives[name]
            partners[sender], partners[receiver] = receiver, sender
            sent, expected = _piece(self._steps[sender]).length, _piece(self._steps[receiver]).length
            if sent != expected:
                raise PlanError(f"message {name} is {sent} elements, {expected} are expected")
        return partners

    def _name(self, node: int, step: Send | Recv | RecvReduce) -> tuple[int, int, int]:
        return (node, step.peer, step.slot) if type(step) is Send else (step.peer, node, step.slot)

    def _fill(self) -> None:
        for rank, memory in enumerate(self.memory):
            problem = self.problems[rank]
            length, buffer = problem.input_length(rank), Buffer.INPUT
            if problem.collective in IN_PLACE or (problem.collective == "broadcast" and rank == problem.root):
                length, buffer = problem.total, Buffer.OUTPUT
            if length:
                memory[buffer].write(0, [(length, rank, 0)])

    def _order(self) -> tuple[list[int], list[list[int] | tuple[()]]]:
        """How many steps each step waits for, and the steps that wait for it."""
        waiting = [0] * len(self._steps)
        followers: list[list[int] | tuple[()]] = [()] * len(self._steps)
        own = (
            (number, base + earlier)
            for base, plan in zip(self.bases, self.plans, strict=False)
            for number, step in enumerate(plan.steps, base)
            for earlier in step.after
        )
        for number, earlier in chain(own, self._published.waits()):
            waiting[number] += 1
            known = followers[earlier]
            if isinstance(known, tuple):
                followers[earlier] = [number]
            else:
                known.append(number)
        return waiting, followers

    def _alone(self, number: int) -> None:
        """Take a step that is no message."""
        step = self._steps[number]
        memory = self.memory[self._nodes[number]]
        if isinstance(step, Publish):
            self.heard[number] = self.heard_before(number)
            buffer, offset, length = step.source
            self._items[number] = memory[buffer].read(offset, length)
        elif isinstance(step, Fetch | FetchReduce):
            self._fetch(number, step)
        else:
            assert isinstance(step, LOCALS)
            self._local(step, memory)

    def _fetch(self, number: int, step: Fetch | FetchReduce) -> None:
        publish = self._published.source[number]
        buffer, offset, length = step.target
        if not length:
            self.heard[number] = self.heard_before(number) | self.heard[publish]
            return
        runs = part_of(self._items[publish], step.offset, length)
        memory = self.memory[self._nodes[number]][buffer]
        if isinstance(step, FetchReduce):
            own = memory.read(offset, length)
            combine = self.expressions.combine
            runs = combine(runs, own) if step.item_left else combine(own, runs)
        memory.write(offset, runs)

    def _local(self, step: Copy | Reduce, memory: tuple[Memory, Memory, Memory]) -> None:
        buffer, offset, length = step.source
        runs = memory[buffer].read(offset, length)
        buffer, offset, length = step.target
        if isinstance(step, Reduce):
            own = memory[buffer].read(offset, length)
            combine = self.expressions.combine
            runs = combine(runs, own) if step.source_left else combine(own, runs)
        memory[buffer].write(offset, runs)

    def _message(self, sender: int, receiver: int) -> None:
        send, receive = self._steps[sender], self._steps[receiver]
        assert isinstance(send, Send)
        assert isinstance(receive, RECEIVES)
        buffer, offset, length = send.source
        if not length:  # what it carries is who has arrived
            self.heard[sender] = self.heard_before(sender)
            self.heard[receiver] = self.heard_before(receiver) | self._ranks_arriving(self.heard[sender], receive.peer)
            return
        runs = self._arriving(self.memory[self._nodes[sender]][buffer].read(offset, length), receive.peer)
        buffer, offset, length = receive.target
        memory = self.memory[self._nodes[receiver]][buffer]
        if type(receive) is RecvReduce:
            own = memory.read(offset, length)
            combine = self.expressions.combine
            runs = combine(runs, own) if receive.incoming_left else combine(own, runs)
        memory.write(offset, runs)

    def _arriving(self, runs: Sequence[Values], source: int) -> Sequence[Values]:
        """Return what was read at `source` as its receiver sees it."""
        del source
        return runs

    def _ranks_arriving(self, ranks: int, source: int) -> int:
        del source
        return ranks


class RotatedRun(Run):
    """Executes rank 0's plan for all ranks, in step with each other, where rank s's plan is rank 0's renamed by s.

    At any time rank s's memory is rank 0's renamed by s: so it is at the start, and so it stays, as every step and
    every message is taken by all ranks at once. What rank 0 receives from rank s is therefore what it sends itself to
    rank -s in the step with the same slot, renamed by s. An execution of all ranks in step is one of those possible.
    """

    expressions: RotatedExpressions

    def __init__(self, problem: Problem, plan: Plan) -> None:
        super().__init__([problem], [plan])
        self.expressions = RotatedExpressions(problem.world)
        self._world = problem.world
        self._bases_shift, self._total = bases_shift(problem), problem.total

    def renamed(self, runs: Sequence[Values], shift: int) -> list[Values]:
        """Return the values that rank `shift` has where rank 0 has `runs`."""
        result = []
        rotated = self.expressions.rotated
        for length, expression, base in runs:
            renamed = rotated(expression, shift)
            if not self._bases_shift:
                result.append((length, renamed, base))
                continue
            new = (base + shift * self._bases_shift) % self._total
            part = min(length, self._total - new)
            result.append((part, renamed, new))
            if part < length:
                result.append((length - part, renamed, 0))
        return result

    def _name(self, node: int, step: Send | Recv | RecvReduce) -> tuple[int, int, int]:
        return ((node - step.peer) % self._world if type(step) is Send else step.peer, node, step.slot)

    def _arriving(self, runs: Sequence[Values], source: int) -> Sequence[Values]:
        return self.renamed(runs, source)

    def _ranks_arriving(self, ranks: int, source: int) -> int:
        everyone = self.expressions.everyone
        return (ranks << source | ranks >> self._world - source) & everyone


def _piece(step: object) -> Slice:
    if isinstance(step, Send):
        return step.source
    assert isinstance(step, RECEIVES)
    return step.target


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

        A fetch waits for its item. An item waits until there is memory for it, which is freed from the oldest item on:
        until all fetches of the item `memory` items before it are done.
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
    """Raise PlanError if a shielded item may be overwritten before all ranks that fetch it have done so.

    Steps are numbered through all plans, rank r's from `bases[r]` on; `fetchers` gives, for each step that publishes,
    the steps that fetch its item.
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
