"""Summary: what a plan's steps ask for altogether, without working out those that are repeated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncdist.plan.repeated import RepeatedSteps
from asyncdist.plan.steps import Fetch, FetchReduce, Publish, Recv, RecvReduce, Send, Step

__all__ = ["items", "needs", "peers"]


def peers(steps: Sequence[Step]) -> tuple[int, ...]:
    """Return every rank that is named, in order."""
    return tuple(sorted({step.peer for step in _written(steps) if isinstance(step, _WITH_PEERS)}))


def items(steps: Sequence[Step]) -> int:
    """Return how many items are put out."""
    count = sum([type(step) is Publish for step in _written(steps)])
    if isinstance(steps, RepeatedSteps):
        count += steps.gap.rounds * sum([type(step) is Publish for step in steps.examples[1]])
    return count


def needs(steps: Sequence[Step]) -> dict[int, dict[int, int]]:
    """Return, by rank and then by item, in order, how many times what others put out is fetched."""
    found: dict[int, dict[int, int]] = {}
    for step in _written(steps):
        if isinstance(step, Fetch | FetchReduce):
            _add(found.setdefault(step.peer, {}), (step.item,))
    if isinstance(steps, RepeatedSteps):
        for before, step in zip(*steps.examples, strict=True):
            if isinstance(before, Fetch | FetchReduce) and isinstance(step, Fetch | FetchReduce):
                stride = step.item - before.item
                _add(found[step.peer], [step.item + stride * ahead for ahead in range(1, steps.gap.rounds + 1)])
    return {peer: dict(sorted(wanted.items())) for peer, wanted in found.items()}


def _add(wanted: dict[int, int], fetched: Iterable[int]) -> None:
    for item in fetched:
        wanted[item] = wanted.get(item, 0) + 1


def _written(steps: Sequence[Step]) -> Sequence[Step]:
    return steps.written if isinstance(steps, RepeatedSteps) else steps


_WITH_PEERS = (Send, Recv, RecvReduce, Fetch, FetchReduce)
