"""PlanBuilder: an algorithm says what happens in program order; the builder finds what must wait for what.

Two steps are ordered only if one writes elements that the other reads or writes: a read waits for the last write, a
write waits for the reads since, or for the last write where there were none. Everything else may overlap. `Accesses`
keeps, for each buffer, the step that wrote each element last and the steps that have read it since.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from asyncdist.plan.chunks import WINDOW, Window
from asyncdist.plan.problem import Problem
from asyncdist.plan.steps import (
    ANYONE,
    Buffer,
    Copy,
    Fetch,
    FetchReduce,
    Gap,
    Plan,
    Publish,
    Recv,
    RecvReduce,
    Reduce,
    RepeatedSteps,
    Send,
    Slice,
    Step,
    Symmetry,
    later,
    repeats,
)

__all__ = ["PlanBuilder", "one_by_one"]

NOTHING: Final = Slice(Buffer.SCRATCH, 0, 0)
"""What a message without elements carries."""


NOBODY: Final = -1


class Accesses:
    """Disjoint segments of one buffer, in order, each with its last writer and the readers since.

    Segments exist only where something was touched. Their boundaries are those of the slices used, so an operation
    with n chunks keeps n segments and each access costs a bisection.
    """

    __slots__ = ("_ends", "_readers", "_starts", "_writers")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._writers: list[int] = []
        self._readers: list[list[int]] = []

    def read(self, start: int, end: int, step: int) -> tuple[int, ...]:
        """Note that `step` reads elements from `start` up to `end`; return the steps it must follow."""
        starts = self._starts
        index = bisect_left(starts, start)
        beyond = index == len(starts) or starts[index] >= end
        if beyond and (index == 0 or self._ends[index - 1] <= start):  # nobody has touched it
            self._insert(index, start, end, NOBODY, [step])
            return ()
        if not beyond and starts[index] == start and self._ends[index] == end:  # one segment, as a rule
            self._readers[index].append(step)
            writer = self._writers[index]
            return () if writer == NOBODY else (writer,)
        first, last = self._segments(start, end)
        for readers in self._readers[first:last]:
            readers.append(step)
        return tuple(set(self._writers[first:last]) - {NOBODY})

    def write(self, start: int, end: int, step: int) -> tuple[int, ...]:
        """Note that `step` writes these elements (perhaps reading them first); return the steps it must follow."""
        starts = self._starts
        index = bisect_left(starts, start)
        beyond = index == len(starts) or starts[index] >= end
        if beyond and (index == 0 or self._ends[index - 1] <= start):
            self._insert(index, start, end, step, [])
            return ()
        if not beyond and starts[index] == start and self._ends[index] == end:
            readers, writer = self._readers[index], self._writers[index]
            self._writers[index] = step
            if readers:  # each of them follows the last writer already
                self._readers[index] = []
                return tuple(readers)
            return () if writer == NOBODY else (writer,)
        first, last = self._segments(start, end)
        wait: set[int] = set()
        for readers, writer in zip(self._readers[first:last], self._writers[first:last], strict=True):
            wait.update(readers or [writer])
        wait.discard(NOBODY)
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self._writers[first:last] = [step]
        self._readers[first:last] = [[]]
        return tuple(wait)

    def _segments(self, start: int, end: int) -> tuple[int, int]:
        """Cut and fill so that segments first .. last-1 cover exactly [start, end)."""
        self._cut(start)
        self._cut(end)
        first = bisect_left(self._starts, start)
        index, position = first, start
        while position < end:
            if index < len(self._starts) and self._starts[index] == position:
                position = self._ends[index]
            else:
                gap_end = min(end, self._starts[index]) if index < len(self._starts) else end
                self._insert(index, position, gap_end, NOBODY, [])
                position = gap_end
            index += 1
        return first, index

    def _cut(self, position: int) -> None:
        index = bisect_right(self._starts, position) - 1
        if index >= 0 and self._starts[index] < position < self._ends[index]:
            end = self._ends[index]
            self._ends[index] = position
            self._insert(index + 1, position, end, self._writers[index], self._readers[index].copy())

    def _insert(self, index: int, start: int, end: int, writer: int, readers: list[int]) -> None:
        self._starts.insert(index, start)
        self._ends.insert(index, end)
        self._writers.insert(index, writer)
        self._readers.insert(index, readers)


class PlanBuilder:
    """Collects one rank's steps.

    Steps are added in an order in which they could be executed one by one; those that are ready together start in that
    order, so add what starts the longest chain first. Every method returns the step's index, or None for a step
    without elements, which is left out. Both ends leave it out, since both know its length.

    Messages to (and from) one peer are numbered in the order of the calls: the k-th `send` to a peer meets that
    peer's k-th `recv` or `recv_reduce` from here. `slot` overrides the number; then give it for all of that pair.
    `after` adds steps to wait for that the slices do not imply (None is ignored).
    """

    def __init__(
        self,
        collective: str,
        algorithm: str,
        rank: int,
        world: int,
        window_size: int = WINDOW,
        *,
        single_copy: bool = False,
    ) -> None:
        self.collective = collective
        self.algorithm = algorithm
        self.rank = rank
        self.world = world
        self.window_size = window_size
        self.scratch_count = 0
        self._single_copy = single_copy
        self._steps: list[Step] = []
        self._accesses = (Accesses(), Accesses(), Accesses())
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._items = 0
        self._shares = False
        self._last_published: int | None = None
        self._gap: Gap | None = None
        self._left_out = 0

    @classmethod
    def of(cls, problem: Problem, algorithm: str, rank: int) -> PlanBuilder:
        """Begin `rank`'s plan that solves `problem`."""
        single_copy = problem.single_copy
        return cls(problem.collective, algorithm, rank, problem.world, problem.window_size, single_copy=single_copy)

    def window(self) -> Window:
        """A window for one pipeline of chunks."""
        return Window(self.window_size)

    def scratch(self, length: int) -> Slice:
        """Reserve `length` elements of SCRATCH."""
        piece = Slice(Buffer.SCRATCH, self.scratch_count, length)
        self.scratch_count += length
        return piece

    def turns(self, pieces: Sequence[Slice]) -> list[Slice]:
        """Reserve SCRATCH for a window of `pieces`, and return the place of each: they take turns."""
        longest = max((piece.length for piece in pieces), default=0)
        size = self.window_size
        room = [self.scratch(longest).offset for _ in range(min(size, len(pieces)))]
        return [Slice(Buffer.SCRATCH, room[number % size], piece.length) for number, piece in enumerate(pieces)]

    def send(
        self, peer: int, source: Slice, *, slot: int | None = None, after: Iterable[int | None] = ()
    ) -> int | None:
        """Send `source` to `peer`."""
        if not source.length:
            return None
        wait = self._read(source)
        return self._add(Send(peer, source, self._slot(self._sent, peer, slot), self._after(wait, after)))

    def recv(
        self, peer: int, target: Slice, *, slot: int | None = None, after: Iterable[int | None] = ()
    ) -> int | None:
        """Receive `target` from `peer`."""
        if not target.length:
            return None
        wait = self._write(target)
        return self._add(Recv(peer, target, self._slot(self._received, peer, slot), self._after(wait, after)))

    def recv_reduce(
        self, peer: int, target: Slice, *, incoming_left: bool, after: Iterable[int | None] = ()
    ) -> int | None:
        """Receive from `peer` and reduce into `target`."""
        if not target.length:
            return None
        wait = self._write(target)
        slot = self._slot(self._received, peer, None)
        return self._add(RecvReduce(peer, target, slot, incoming_left, self._after(wait, after)))

    def send_all(self, peer: int, pieces: Iterable[Slice]) -> None:
        """Send `peer` chunks with elements, in order."""
        steps, first = self._steps, self._sent.get(peer, 0)
        for slot, piece in enumerate(pieces, first):
            wait = self._read(piece)
            steps.append(Send(peer, piece, slot, wait if len(wait) < 2 else self._after(wait, ())))
            self._sent[peer] = slot + 1

    def recv_all(self, peer: int, pieces: Iterable[Slice], window: Window) -> None:
        """Receive chunks with elements from `peer`, in order, a window of them at a time."""
        for piece, slot, wait in self._arrivals(peer, pieces, window):
            self._steps.append(Recv(peer, piece, slot, wait))

    def recv_reduce_all(self, peer: int, pieces: Iterable[Slice], window: Window, *, incoming_left: bool) -> None:
        """Receive chunks with elements from `peer` and reduce them into their places, a window of them at a time."""
        for piece, slot, wait in self._arrivals(peer, pieces, window):
            self._steps.append(RecvReduce(peer, piece, slot, incoming_left, wait))

    def _arrivals(
        self, peer: int, pieces: Iterable[Slice], window: Window
    ) -> Iterator[tuple[Slice, int, tuple[int, ...]]]:
        """Each chunk, with the slot of its message and what has to be over before; the caller adds the step."""
        first = self._received.get(peer, 0)
        for slot, piece in enumerate(pieces, first):
            wait = self._write(piece)
            earlier = window.follow(len(self._steps) + self._left_out)
            if earlier is not None:
                wait = self._after(wait, (earlier,)) if wait else (earlier,)
            elif len(wait) > 1:
                wait = self._after(wait, ())
            yield piece, slot, wait
            self._received[peer] = slot + 1

    def reduce(self, source: Slice, target: Slice, *, source_left: bool) -> int | None:
        """Reduce `source` into `target`, here."""
        if not self._local(source, target):
            return None
        wait = self._read(source) + self._write(target)
        return self._add(Reduce(source, target, source_left, self._after(wait, ())))

    def copy(self, source: Slice, target: Slice) -> int | None:
        """Copy `source` to `target`, here."""
        if not self._local(source, target):
            return None
        wait = self._read(source) + self._write(target)
        return self._add(Copy(source, target, self._after(wait, ())))

    def publish(self, source: Slice, *, shielded: bool = False, reader: int = ANYONE) -> int | None:
        """Put `source` out as this rank's next item; a slice without elements is no item. `shielded`, `reader`: see
        Publish.
        """
        if not source.length:
            return None
        wait = self._read(source)
        if self._last_published is not None:
            wait += (self._last_published,)  # items are put out in order
        item, self._items = self._items, self._items + 1
        self._shares = True
        self._last_published = self._add(Publish(source, item, self._after(wait, ()), shielded, reader))
        return self._last_published

    def fetch(
        self, peer: int, item: int, offset: int, target: Slice, *, after: Iterable[int | None] = ()
    ) -> int | None:
        """Copy into `target` from `peer`'s item number `item`, from its element `offset` on."""
        if not target.length:
            return None
        wait = self._write(target)
        self._shares = True
        return self._add(Fetch(peer, item, offset, target, self._after(wait, after)))

    def fetch_reduce(self, peer: int, item: int, offset: int, target: Slice, *, item_left: bool) -> int | None:
        """Reduce a part of `peer`'s item into `target`."""
        if not target.length:
            return None
        wait = self._write(target)
        self._shares = True
        return self._add(FetchReduce(peer, item, offset, target, item_left, self._after(wait, ())))

    def announce(self, *, reader: int = ANYONE) -> int:
        """Put out an item without elements; unlike an empty `publish` it does count."""
        item, self._items = self._items, self._items + 1
        self._shares = True
        wait = (self._last_published,) if self._last_published is not None else ()
        self._last_published = self._add(Publish(NOTHING, item, wait, reader=reader))
        return self._last_published

    def await_item(self, peer: int, item: int) -> int:
        """Wait for an item of `peer`, whatever is in it."""
        self._shares = True
        return self._add(Fetch(peer, item, 0, NOTHING))

    def signal(self, peer: int, *, after: Iterable[int | None] = ()) -> int:
        """Send `peer` a message without elements; unlike an empty `send` it does travel."""
        slot = self._slot(self._sent, peer, None)
        return self._add(Send(peer, NOTHING, slot, self._after((), after)))

    def await_signal(self, peer: int, *, after: Iterable[int | None] = ()) -> int:
        """Receive a `signal` from `peer`."""
        slot = self._slot(self._received, peer, None)
        return self._add(Recv(peer, NOTHING, slot, self._after((), after)))

    def rounds(self, count: int, alike: range, period: int = 1) -> Iterator[int]:
        """Yield the numbers of `count` rounds, whose steps the algorithm adds; most rounds of a long plan are left out.

        Rounds `alike` do the same, each a chunk further on; where places in SCRATCH take turns, each `period` of rounds
        does. Once two of them are found to continue alike, most of the others are left out (`RepeatedSteps`). The last
        rounds are built, and compared with what was expected. What the algorithm adds in a round may depend on the
        round's number only.
        """
        marks = [len(self._steps)]
        number = 0
        while number < count:
            yield number
            number += 1
            if self._gap is not None:
                continue
            marks.append(len(self._steps))
            begin, spare = number - 2 * period, alike.stop - number
            if begin < alike.start or spare <= 2 * period:
                continue
            middle = marks[number - period]
            examples = self._steps[marks[begin] : middle], self._steps[middle:]
            if repeats(*examples):
                back = _rounds_back(examples[1], middle)
                times = spare // period - back - 1
                if times > 0:
                    yield from self._far_end(number + times * period, examples, times, back, period)
                    number += (times + back + 1) * period

    def _far_end(
        self, number: int, examples: tuple[list[Step], list[Step]], times: int, back: int, period: int
    ) -> Iterator[int]:
        """Leave out `times` periods; then yield the numbers of the next rounds, and check their steps.

        The steps of `back` periods wait for steps that are left out in part: that is put right. One more period must be
        right as it is.
        """
        first, second = examples
        length = len(second)
        self._gap = gap = Gap(len(self._steps), length, times)
        self._left_out = gap.steps
        self._items += times * sum(isinstance(step, Publish) for step in second)
        for ahead in range(back + 1):
            start = len(self._steps)
            yield from range(number + ahead * period, number + (ahead + 1) * period)
            built = self._steps[start:]
            known = [later(*pair, times + ahead + 1, length) for pair in zip(first, second, strict=True)]
            if ahead < back and len(built) == length:
                for step, right in zip(built, known, strict=True):
                    step.after = right.after
            if built != known:
                raise AssertionError(f"{self.collective} by {self.algorithm} says that rounds are alike which are not")

    def build(self, *, symmetry: Symmetry = Symmetry.NONE, block_aligned: bool = False, ordered: bool = False) -> Plan:
        """Return the plan of the steps so far.

        Plans that publish are made so that memory for one item of a rank is enough, however slow that would be:
        everyone fetches in an order in which all can put out their items one by one.
        """
        return Plan(
            self.collective,
            self.algorithm,
            self.rank,
            self.world,
            tuple(self._steps) if self._gap is None else RepeatedSteps(tuple(self._steps), self._gap),
            self.scratch_count,
            symmetry,
            block_aligned,
            ordered,
            int(self._shares),
            self._single_copy,
        )

    def _add(self, step: Step) -> int:
        self._steps.append(step)
        return len(self._steps) + self._left_out - 1

    def _read(self, piece: Slice) -> tuple[int, ...]:
        buffer, offset, length = piece
        return self._accesses[buffer].read(offset, offset + length, len(self._steps) + self._left_out)

    def _write(self, piece: Slice) -> tuple[int, ...]:
        buffer, offset, length = piece
        return self._accesses[buffer].write(offset, offset + length, len(self._steps) + self._left_out)

    def _after(self, wait: tuple[int, ...], after: Iterable[int | None]) -> tuple[int, ...]:
        """All of both, in order, but for what another of them waits for already.

        That goes one level deep only: full transitive reduction is not worth it.
        """
        for step in after:
            if step is not None:
                wait += (step,)
        if len(wait) < 2:
            return wait
        steps, gap, found = self._steps, self._gap, set(wait)
        if len(found) > 1:
            for step in wait:
                found.difference_update(steps[step if gap is None or step < gap.first else step - self._left_out].after)
        return tuple(sorted(found))

    @staticmethod
    def _slot(counters: dict[int, int], peer: int, slot: int | None) -> int:
        if slot is not None:
            return slot
        number = counters.get(peer, 0)
        counters[peer] = number + 1
        return number

    @staticmethod
    def _local(source: Slice, target: Slice) -> bool:
        if source.length != target.length:
            raise ValueError(f"{source} and {target} differ in length")
        if source.overlaps(target):
            raise ValueError(f"{source} and {target} overlap")
        return source.length > 0


def _rounds_back(steps: Sequence[Step], first: int) -> int:
    """How many rounds before their own such steps wait for at most; the first of them has index `first`."""
    earliest = min((step.after[0] for step in steps if step.after), default=first)
    return max(1, -(-(first - earliest) // len(steps)))


def one_by_one(plan: Plan) -> Plan:
    """Return `plan`, of one element per rank, with a message of its own for every element: an item of unknown size.

    An item is whole, and only its owner knows its size. Where `plan` sends several items in one message, as trees and
    Bruck's algorithm do, this plan sends as many messages: each says how large its item is. No item is copied to be
    sent beside another.

    Messages without items are left out at both ends. Slots are the plan's times the world, plus the item's place in
    its message: no message holds more items than there are ranks. Raises ValueError for a plan that reduces.
    """
    world = plan.world
    builder = PlanBuilder(plan.collective, plan.algorithm, plan.rank, world)
    builder.scratch(plan.scratch_count)
    for step in plan.steps:
        if isinstance(step, Send):
            for index, piece in enumerate(_single(step.source)):
                builder.send(step.peer, piece, slot=step.slot * world + index)
        elif isinstance(step, Recv):
            for index, piece in enumerate(_single(step.target)):
                builder.recv(step.peer, piece, slot=step.slot * world + index)
        elif isinstance(step, Copy):
            for source, target in zip(_single(step.source), _single(step.target), strict=True):
                builder.copy(source, target)
        else:
            raise ValueError(f"{plan.collective} by {plan.algorithm} reduces, which items cannot be")
    return builder.build(block_aligned=True)


def _single(piece: Slice) -> Iterator[Slice]:
    for offset in range(piece.offset, piece.end):
        yield Slice(piece.buffer, offset, 1)
