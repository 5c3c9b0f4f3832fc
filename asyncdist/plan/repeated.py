"""RepeatedSteps: the steps of a plan of which most are rounds like the round before, one chunk further on.

A vector of a thousand chunks makes a plan of thousands of steps that say the same again and again. Written are those at
the beginning, ending with two examples of what is repeated, and those at the end; the ones between follow from the two
examples. So a plan takes as long to make, and as much memory, whatever the length of the vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, overload

from asyncdist.plan.steps import Copy, Fetch, FetchReduce, Publish, Reduce, Slice, Step

__all__ = ["Gap", "RepeatedSteps", "later", "repeats"]


class Gap(NamedTuple):
    """Steps that are not written: `rounds` of `length` steps, the first of which has index `first`."""

    first: int
    length: int
    rounds: int

    @property
    def end(self) -> int:
        """Index of the first step after them."""
        return self.first + self.length * self.rounds

    @property
    def steps(self) -> int:
        """How many they are."""
        return self.length * self.rounds


class RepeatedSteps(Sequence[Step]):
    """All steps of a plan, in order; those of `gap` are worked out when asked for.

    `written` are the others. Before the gap come two rounds of as many steps, and round after round goes on from the
    second as that from the first.
    """

    __slots__ = ("gap", "written")

    def __init__(self, written: tuple[Step, ...], gap: Gap) -> None:
        self.written = written
        self.gap = gap

    @property
    def examples(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """The two rounds before the gap."""
        first, length, _ = self.gap
        return self.written[first - 2 * length : first - length], self.written[first - length : first]

    def __len__(self) -> int:
        return len(self.written) + self.gap.steps

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Step, ...]: ...

    def __getitem__(self, index: int | slice) -> Step | tuple[Step, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        if index < 0:
            index += len(self)
        first, length, rounds = self.gap
        if index < first:
            if index < 0:
                raise IndexError("no such step")
            return self.written[index]
        ahead, place = divmod(index - first, length)
        if ahead >= rounds:
            return self.written[index - length * rounds]
        example = first - length + place
        return later(self.written[example - length], self.written[example], ahead + 1, length)

    def __iter__(self) -> Iterator[Step]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RepeatedSteps | tuple):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))


def repeats(first: Sequence[Step], second: Sequence[Step]) -> bool:
    """Whether two rounds that follow each other can be the examples of more: they differ in their numbers alone.

    Rounds with messages never are: the selector bounds how many there are.
    """
    length = len(second)
    return 0 < length == len(first) and all(
        type(step) is type(before) and type(step) in _REPEATED and later(before, step, -1, length) == before
        for before, step in zip(first, second, strict=True)
    )


def later(before: Step, step: Step, rounds: int, length: int) -> Step:
    """Return what `step` becomes `rounds` rounds of `length` steps later; one round ago it was `before`."""
    move = rounds * length
    after = tuple([other + move for other in step.after])
    match before, step:
        case Publish(), Publish():
            item = step.item + rounds * (step.item - before.item)
            return Publish(_moved(before.source, step.source, rounds), item, after, step.shielded, step.reader)
        case ((Fetch() | FetchReduce()), (Fetch() | FetchReduce())):
            item = step.item + rounds * (step.item - before.item)
            offset = step.offset + rounds * (step.offset - before.offset)
            target = _moved(before.target, step.target, rounds)
            if isinstance(step, Fetch):
                return Fetch(step.peer, item, offset, target, after)
            return FetchReduce(step.peer, item, offset, target, step.item_left, after)
        case ((Copy() | Reduce()), (Copy() | Reduce())):
            source = _moved(before.source, step.source, rounds)
            target = _moved(before.target, step.target, rounds)
            if isinstance(step, Copy):
                return Copy(source, target, after)
            return Reduce(source, target, step.source_left, after)
    raise TypeError(f"a {type(step).__name__} is not repeated")


def _moved(before: Slice, piece: Slice, rounds: int) -> Slice:
    return Slice(piece.buffer, piece.offset + rounds * (piece.offset - before.offset), piece.length)


_REPEATED: Final = (Publish, Fetch, FetchReduce, Copy, Reduce)
