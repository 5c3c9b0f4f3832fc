"""What a plan's steps ask for altogether: peers, traffic, items, and which items may be read where they lie.

Of `RepeatedSteps` nothing is worked out that is not written.

Lending: an item is a copy of a slice, as a rule. Where no later step of its rank overwrites the slice, or only once all
who fetch the item have done so (`Publish.shielded`, a claim that the tests prove), the slice itself can be lent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeGuard

from asyncdist.plan.steps import (
    ANYONE,
    Buffer,
    Fetch,
    FetchReduce,
    Plan,
    Publish,
    Recv,
    RecvReduce,
    RepeatedSteps,
    Send,
    Step,
)

_WITH_PEERS = (Send, Recv, RecvReduce, Fetch, FetchReduce)

READ_ONLY: Final = (Send, Publish)  # a tuple: a union would be built anew at every isinstance


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
    """The items fetched in `rounds` more rounds after these two."""
    stride = item - before
    return range(item + stride, item + stride * (rounds + 1), stride) if stride else [item] * rounds


def _written(steps: Sequence[Step]) -> Sequence[Step]:
    return steps.written if isinstance(steps, RepeatedSteps) else steps


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
