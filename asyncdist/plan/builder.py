"""PlanBuilder: an algorithm says what happens in program order; the builder finds what must wait for what.

Two steps are ordered only if one writes elements that the other reads or writes: a read waits for the last write, a
write waits for the reads since, or for the last write where there were none. Everything else may overlap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final

from asyncdist.plan.steps import (
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
    Step,
    Symmetry,
)

__all__ = ["PlanBuilder"]

NOBODY: Final = -1

NOTHING: Final = Slice(Buffer.SCRATCH, 0, 0)
"""What a message without elements carries."""


class _Accesses:
    """Who touched which elements of one buffer: disjoint segments in order, each with last writer and readers since.

    Segments exist only where something was touched. Their boundaries are those of the slices used, so an operation
    with n chunks keeps n segments and each access costs a bisection.
    """

    __slots__ = ("ends", "readers", "starts", "writers")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.writers: list[int] = []
        self.readers: list[list[int]] = []

    def read(self, piece: Slice, step: int, after: set[int]) -> None:
        """Note that `step` reads `piece`; add the steps it must follow to `after`."""
        first, last = self._segments(piece.offset, piece.offset + piece.length)
        for index in range(first, last):
            if self.writers[index] != NOBODY:
                after.add(self.writers[index])
            self.readers[index].append(step)

    def write(self, piece: Slice, step: int, after: set[int]) -> None:
        """Note that `step` writes `piece` (perhaps reading it first); add the steps it must follow to `after`."""
        start, end = piece.offset, piece.offset + piece.length
        first, last = self._segments(start, end)
        for index in range(first, last):
            if self.readers[index]:  # each of them follows the last writer already
                after.update(self.readers[index])
            elif self.writers[index] != NOBODY:
                after.add(self.writers[index])
        self.starts[first:last] = [start]
        self.ends[first:last] = [end]
        self.writers[first:last] = [step]
        self.readers[first:last] = [[]]

    def _segments(self, start: int, end: int) -> tuple[int, int]:
        """Cut and fill so that segments first .. last-1 cover exactly [start, end)."""
        first = bisect_left(self.starts, start)
        if first < len(self.starts) and self.starts[first] == start and self.ends[first] == end:
            return first, first + 1
        self._cut(start)
        self._cut(end)
        first = bisect_left(self.starts, start)
        index, position = first, start
        while position < end:
            if index < len(self.starts) and self.starts[index] == position:
                position = self.ends[index]
            else:
                gap_end = min(end, self.starts[index]) if index < len(self.starts) else end
                self._insert(index, position, gap_end, NOBODY, [])
                position = gap_end
            index += 1
        return first, index

    def _cut(self, position: int) -> None:
        index = bisect_right(self.starts, position) - 1
        if index >= 0 and self.starts[index] < position < self.ends[index]:
            end = self.ends[index]
            self.ends[index] = position
            self._insert(index + 1, position, end, self.writers[index], self.readers[index].copy())

    def _insert(self, index: int, start: int, end: int, writer: int, readers: list[int]) -> None:
        self.starts.insert(index, start)
        self.ends.insert(index, end)
        self.writers.insert(index, writer)
        self.readers.insert(index, readers)


class PlanBuilder:
    """Collects one rank's steps.

    Steps are added in an order in which they could be executed one by one; those that are ready together start in that
    order, so add what starts the longest chain first. Every method returns the step's index, or None for a step
    without elements, which is left out. Both ends leave it out, since both know its length.

    Messages to (and from) one peer are numbered in the order of the calls: the k-th `send` to a peer meets that
    peer's k-th `recv` or `recv_reduce` from here. `slot` overrides the number; then give it for all of that pair.
    `after` adds steps to wait for that the slices do not imply (None is ignored).
    """

    def __init__(self, collective: str, algorithm: str, rank: int, world: int) -> None:
        self.collective = collective
        self.algorithm = algorithm
        self.rank = rank
        self.world = world
        self.scratch_count = 0
        self._steps: list[Step] = []
        self._accesses = (_Accesses(), _Accesses(), _Accesses())
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._items = 0
        self._last_published: int | None = None

    def scratch(self, length: int) -> Slice:
        """Reserve `length` elements of SCRATCH."""
        piece = Slice(Buffer.SCRATCH, self.scratch_count, length)
        self.scratch_count += length
        return piece

    def send(
        self, peer: int, source: Slice, *, slot: int | None = None, after: Iterable[int | None] = ()
    ) -> int | None:
        """Send `source` to `peer`."""
        if not source.length:
            return None
        wait = self._wait(after)
        self._accesses[source.buffer].read(source, len(self._steps), wait)
        return self._add(Send(peer, source, self._slot(self._sent, peer, slot), self._reduced(wait)))

    def recv(
        self, peer: int, target: Slice, *, slot: int | None = None, after: Iterable[int | None] = ()
    ) -> int | None:
        """Receive `target` from `peer`."""
        if not target.length:
            return None
        wait = self._wait(after)
        self._accesses[target.buffer].write(target, len(self._steps), wait)
        return self._add(Recv(peer, target, self._slot(self._received, peer, slot), self._reduced(wait)))

    def recv_reduce(
        self,
        peer: int,
        target: Slice,
        *,
        incoming_left: bool,
        slot: int | None = None,
        after: Iterable[int | None] = (),
    ) -> int | None:
        """Receive from `peer` and reduce into `target`."""
        if not target.length:
            return None
        wait = self._wait(after)
        self._accesses[target.buffer].write(target, len(self._steps), wait)
        slot = self._slot(self._received, peer, slot)
        return self._add(RecvReduce(peer, target, slot, incoming_left, self._reduced(wait)))

    def reduce(
        self, source: Slice, target: Slice, *, source_left: bool, after: Iterable[int | None] = ()
    ) -> int | None:
        """Reduce `source` into `target`, here."""
        if not self._local(source, target):
            return None
        wait = self._wait(after)
        self._accesses[source.buffer].read(source, len(self._steps), wait)
        self._accesses[target.buffer].write(target, len(self._steps), wait)
        return self._add(Reduce(source, target, source_left, self._reduced(wait)))

    def copy(self, source: Slice, target: Slice, *, after: Iterable[int | None] = ()) -> int | None:
        """Copy `source` to `target`, here."""
        if not self._local(source, target):
            return None
        wait = self._wait(after)
        self._accesses[source.buffer].read(source, len(self._steps), wait)
        self._accesses[target.buffer].write(target, len(self._steps), wait)
        return self._add(Copy(source, target, self._reduced(wait)))

    def publish(self, source: Slice, *, after: Iterable[int | None] = (), shielded: bool = False) -> int | None:
        """Put `source` out as this rank's next item; a slice without elements is no item. `shielded`: see Publish."""
        if not source.length:
            return None
        wait = self._wait(after)
        self._accesses[source.buffer].read(source, len(self._steps), wait)
        if self._last_published is not None:
            wait.add(self._last_published)  # items are put out in order
        item, self._items = self._items, self._items + 1
        self._last_published = self._add(Publish(source, item, self._reduced(wait), shielded))
        return self._last_published

    def fetch(
        self, peer: int, item: int, offset: int, target: Slice, *, after: Iterable[int | None] = ()
    ) -> int | None:
        """Copy into `target` from `peer`'s item number `item`, from its element `offset` on."""
        if not target.length:
            return None
        wait = self._wait(after)
        self._accesses[target.buffer].write(target, len(self._steps), wait)
        return self._add(Fetch(peer, item, offset, target, self._reduced(wait)))

    def fetch_reduce(
        self,
        peer: int,
        item: int,
        offset: int,
        target: Slice,
        *,
        item_left: bool,
        after: Iterable[int | None] = (),
    ) -> int | None:
        """Reduce a part of `peer`'s item into `target`."""
        if not target.length:
            return None
        wait = self._wait(after)
        self._accesses[target.buffer].write(target, len(self._steps), wait)
        return self._add(FetchReduce(peer, item, offset, target, item_left, self._reduced(wait)))

    def announce(self) -> int:
        """Put out an item without elements; unlike an empty `publish` it does count."""
        item, self._items = self._items, self._items + 1
        wait = set() if self._last_published is None else {self._last_published}
        self._last_published = self._add(Publish(NOTHING, item, self._reduced(wait)))
        return self._last_published

    def await_item(self, peer: int, item: int) -> int:
        """Wait for an item of `peer`, whatever is in it."""
        return self._add(Fetch(peer, item, 0, NOTHING))

    def signal(self, peer: int, *, after: Iterable[int | None] = ()) -> int:
        """Send `peer` a message without elements; unlike an empty `send` it does travel."""
        slot = self._slot(self._sent, peer, None)
        return self._add(Send(peer, NOTHING, slot, self._reduced(self._wait(after))))

    def await_signal(self, peer: int, *, after: Iterable[int | None] = ()) -> int:
        """Receive a `signal` from `peer`."""
        slot = self._slot(self._received, peer, None)
        return self._add(Recv(peer, NOTHING, slot, self._reduced(self._wait(after))))

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
            tuple(self._steps),
            self.scratch_count,
            symmetry,
            block_aligned,
            ordered,
            int(any(isinstance(step, Publish | Fetch | FetchReduce) for step in self._steps)),
        )

    def _add(self, step: Step) -> int:
        self._steps.append(step)
        return len(self._steps) - 1

    @staticmethod
    def _wait(after: Iterable[int | None]) -> set[int]:
        return {step for step in after if step is not None} if after else set()

    def _reduced(self, wait: set[int]) -> tuple[int, ...]:
        """Drop what another of them waits for already. One level only: full transitive reduction is not worth it."""
        if len(wait) > 1:
            implied = {earlier for step in wait for earlier in self._steps[step].after}
            wait -= implied
        return tuple(sorted(wait))

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
