"""Plan: what one rank sends, receives, reduces and copies for one collective, and in which order.

A plan is a directed acyclic graph of steps over slices of three buffers. It is a pure value: it knows neither arrays
nor connections, so the same plan is executed (`executor.runner`), timed (`plan.simulation`) and proven
(`tests/kits/plan_proof`).

Steps are values too: one that is in a plan is not changed. They are not frozen, since they would take three times as
long to make, and a plan may have a thousand.

Offsets and counts are in elements, so that one plan serves every dtype. Peers are group ranks. A message is named by
(source rank, destination rank, slot): both ends derive the slot from the algorithm alone, and no two messages between
two ranks in one plan share it. Where all ranks share memory, data may also be published, and fetched by the ranks that
need it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, overload

ANYONE: Final = -1
"""Instead of the one rank that reads an item."""


class Buffer(enum.IntEnum):
    """The buffers of an operation.

    INPUT is only read. OUTPUT is read and written; operations in place (all_reduce, broadcast) use it alone, and
    find the caller's data there at the start. SCRATCH starts undefined and is thrown away.
    """

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


class Slice(NamedTuple):
    """`length` elements of `buffer` from `offset` on."""

    buffer: Buffer
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    def overlaps(self, other: Slice) -> bool:
        """Whether the two have an element in common."""
        return self.buffer == other.buffer and self.offset < other.end and other.offset < self.end


@dataclass(slots=True, unsafe_hash=True)
class Send:
    """Send `source` to `peer`. Done when the slice may be overwritten."""

    peer: int
    source: Slice
    slot: int
    after: tuple[int, ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class Recv:
    """Receive into `target` from `peer`."""

    peer: int
    target: Slice
    slot: int
    after: tuple[int, ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class RecvReduce:
    """Receive from `peer`, reduced: target = incoming op target if `incoming_left`, else target op incoming."""

    peer: int
    target: Slice
    slot: int
    incoming_left: bool
    after: tuple[int, ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class Reduce:
    """Locally: target = source op target if `source_left`, else target op source."""

    source: Slice
    target: Slice
    source_left: bool
    after: tuple[int, ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class Copy:
    """Locally: target = source."""

    source: Slice
    target: Slice
    after: tuple[int, ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class Publish:
    """Put `source` where all ranks can read it, as this rank's next item. Done when the slice may be overwritten.

    Items are numbered from 0 in the order of the steps, and are put out in that order. A rank that puts items out may
    have to wait until all ranks have read earlier ones: memory for them is bounded.

    `shielded`: no later step here overwrites the slice, or, by what the plans of all ranks wait for, a rank that reads
    the item has read it by then. So the others may read the slice itself instead of a copy.

    `reader`: the only rank that fetches the item, if there is but one and the algorithm says so.
    """

    source: Slice
    item: int
    after: tuple[int, ...] = ()
    shielded: bool = False
    reader: int = ANYONE


@dataclass(slots=True, unsafe_hash=True)
class Fetch:
    """Copy into `target` from `peer`'s item, beginning at element `offset` of it. `peer` is another rank."""

    peer: int
    item: int
    offset: int
    target: Slice
    after: tuple[int, ...] = ()


@dataclass(slots=True, unsafe_hash=True)
class FetchReduce:
    """Fetch, reduced: target = item op target if `item_left`, else target op item."""

    peer: int
    item: int
    offset: int
    target: Slice
    item_left: bool
    after: tuple[int, ...] = ()


Step: TypeAlias = Send | Recv | RecvReduce | Reduce | Copy | Publish | Fetch | FetchReduce


class Symmetry(enum.Enum):
    """What a plan's ranks have in common, so that a checker or simulator need not visit them all.

    ROTATION: every rank's plan is rank 0's with peers and blocks rotated. NONE: each rank is its own case.
    """

    NONE = "none"
    ROTATION = "rotation"


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's part of a collective.

    `steps` are topologically ordered: every index in `after` is lower than the step's own. A step may start once
    all steps in its `after` are done; steps that are ready start in index order.
    """

    collective: str
    algorithm: str
    rank: int
    world: int
    steps: Sequence[Step]
    """A tuple, or worked out where most are alike (`RepeatedSteps`)."""
    scratch_count: int = 0
    """Elements of SCRATCH."""
    symmetry: Symmetry = Symmetry.NONE
    block_aligned: bool = False
    """True if no slice of INPUT or OUTPUT crosses a boundary between two ranks' blocks (list forms need no staging)."""
    ordered: bool = False
    """True if operands are reduced in rank order, so that the operation need not commute."""
    outstanding_items: int = 0
    """With memory for so many items of each rank the plans come to their end, however much more there is: a rank puts
    out an item only when all but this many less one of its earlier ones have been fetched. 0 if there are no items."""
    single_copy: bool = False
    """As of `Problem`."""


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
    """All steps of a plan, of which most are rounds like the round before, one chunk further on.

    A vector of a thousand chunks makes a plan of thousands of steps that repeat themselves. `written` holds the steps
    at the beginning, which end with two rounds as examples, and the steps at the end. The steps of `gap`, between, are
    computed when asked for: each round goes on from the second example as the second from the first. So a plan takes as
    long to make, and as much memory, whatever the length of the vector.
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
