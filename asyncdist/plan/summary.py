"""Summary: what a plan's steps ask for altogether, without working out those that are repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from asyncdist.plan.repeated import RepeatedSteps
from asyncdist.plan.steps import ANYONE, Fetch, FetchReduce, Publish, Recv, RecvReduce, Send, Step

__all__ = ["Traffic", "items", "needs", "peers", "traffic"]


def peers(steps: Sequence[Step]) -> tuple[int, ...]:
    """Return every rank that is named, in order."""
    written = _written(steps)
    readers = {step.reader for step in written if type(step) is Publish and step.reader != ANYONE}
    return tuple(sorted(readers | {step.peer for step in written if isinstance(step, _WITH_PEERS)}))


class Traffic(NamedTuple):
    """Elements of all messages, by the rank at the other end."""

    received: Mapping[int, int]
    sent: Mapping[int, int]


def traffic(steps: Sequence[Step]) -> Traffic:
    """Return how much is received from, and sent to, every rank in messages."""
    received: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    for step in _written(steps):  # messages are never among what is repeated
        if isinstance(step, Send):
            sent[step.peer] += step.source.length
        elif isinstance(step, Recv | RecvReduce):
            received[step.peer] += step.target.length
    return Traffic(received, sent)


def items(steps: Sequence[Step]) -> int:
    """Return how many items are put out."""
    count = sum([type(step) is Publish for step in _written(steps)])
    if isinstance(steps, RepeatedSteps):
        count += steps.gap.rounds * sum([type(step) is Publish for step in steps.examples[1]])
    return count


def needs(steps: Sequence[Step]) -> dict[int, dict[int, int]]:
    """Return, by rank and then by item, in order, how many times what others put out is fetched."""
    fetched: dict[int, list[int]] = {}
    for step in _written(steps):
        if isinstance(step, Fetch | FetchReduce):
            fetched.setdefault(step.peer, []).append(step.item)
    if isinstance(steps, RepeatedSteps):
        for before, step in zip(*steps.examples, strict=True):
            if isinstance(before, Fetch | FetchReduce) and isinstance(step, Fetch | FetchReduce):
                fetched[step.peer].extend(_further(before.item, step.item, steps.gap.rounds))
    return {peer: _times(sorted(numbers)) for peer, numbers in fetched.items()}


def _times(numbers: Sequence[int]) -> dict[int, int]:
    once = dict.fromkeys(numbers, 1)
    if len(once) < len(numbers):
        return dict(Counter(numbers))
    return once


def _further(before: int, item: int, rounds: int) -> Sequence[int]:
    """What is fetched in so many rounds more, after these two."""
    stride = item - before
    return range(item + stride, item + stride * (rounds + 1), stride) if stride else [item] * rounds


def _written(steps: Sequence[Step]) -> Sequence[Step]:
    return steps.written if isinstance(steps, RepeatedSteps) else steps


_WITH_PEERS = (Send, Recv, RecvReduce, Fetch, FetchReduce)
