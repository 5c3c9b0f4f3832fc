"""Cutting vectors into blocks, blocks into chunks, and windows: how many chunks of a pipeline may be under way.

All lengths and offsets are in elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple, overload

from asyncdist.plan.steps import Buffer, Slice


class Run(NamedTuple):
    """`length` elements from `offset` on, of a buffer the context names."""

    offset: int
    length: int

    def of(self, buffer: Buffer) -> Slice:
        """Return this run of `buffer`."""
        return Slice(buffer, self.offset, self.length)


def partition(count: int, parts: int) -> tuple[int, ...]:
    """Cut `count` elements into `parts` lengths that differ by at most one, the longer ones first."""
    quotient, remainder = divmod(count, parts)
    return (quotient + 1,) * remainder + (quotient,) * (parts - remainder)


def offsets(counts: Sequence[int]) -> tuple[int, ...]:
    """Where each block starts in the vector, and its end: one value more than there are blocks."""
    return tuple(accumulate(counts, initial=0))


def blocks_of(buffer: Buffer, counts: Sequence[int]) -> list[Slice]:
    """The blocks of a vector that fills `buffer`."""
    return [Slice(buffer, start, count) for start, count in zip(offsets(counts), counts, strict=False)]


class Chunks(Sequence[Slice]):
    """A slice in the fewest chunks of at most `chunk_length` elements; none when it is empty.

    They are all of one length, but for the last, which may be shorter. The cut depends on the two lengths alone, so
    that both ends of a message cut alike. Chunks are worked out when asked for, however many there are.
    """

    __slots__ = ("_count", "_length", "_piece")

    def __init__(self, piece: Slice, chunk_length: int) -> None:
        self._piece = piece
        self._count = -(-piece.length // chunk_length)
        self._length = -(-piece.length // self._count) if piece.length else chunk_length

    @property
    def alike(self) -> range:
        """Those of the full length."""
        return range(self._piece.length // self._length)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Slice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Slice, ...]: ...

    def __getitem__(self, index: int | slice) -> Slice | tuple[Slice, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(self._count)))
        if not -self._count <= index < self._count:
            raise IndexError("no such chunk")
        buffer, offset, length = self._piece
        start = index % self._count * self._length
        return Slice(buffer, offset + start, min(self._length, length - start))


def split(piece: Slice, chunk_length: int) -> tuple[Slice, ...]:
    """Return the `Chunks` of a slice, all of them at once."""
    buffer, offset, length = piece
    if length <= chunk_length:
        return (piece,) if length else ()
    step = -(-length // -(-length // chunk_length))
    end = offset + length
    return tuple([Slice(buffer, start, min(step, end - start)) for start in range(offset, end, step)])


def cyclic_runs(starts: Sequence[int], first: int, blocks: int) -> tuple[Run, ...]:
    """Runs of the vector that blocks `first`, `first + 1`, ... (modulo their number) fill: one, or two if they wrap.

    `starts` is the result of `offsets`. Empty runs are left out.
    """
    world = len(starts) - 1
    first %= world
    last = first + blocks
    if last <= world:
        runs: tuple[Run, ...] = (Run(starts[first], starts[last] - starts[first]),)
    else:
        runs = (Run(starts[first], starts[world] - starts[first]), Run(0, starts[last - world]))
    return tuple(run for run in runs if run.length)


def cut_blocks(
    starts: Sequence[int], first: int, blocks: int, chunk_length: int, buffer: Buffer = Buffer.OUTPUT
) -> list[Slice]:
    """Chunks of `blocks` cyclic blocks from `first` on, in order of blocks: each block's own, if they are large.

    Blocks of less than a chunk on average are cut as one run (two where they wrap), whose chunks may cross from one
    block to the next.
    """
    runs = cyclic_runs(starts, first, blocks)
    if sum(run.length for run in runs) >= blocks * chunk_length:
        runs = tuple(run for block in range(first, first + blocks) for run in cyclic_runs(starts, block, 1))
    return [piece for run in runs for piece in split(run.of(buffer), chunk_length)]


WINDOW: Final = 4
"""Chunks a rank is ready to receive at a time, of one pipeline, where little is on its way at any time. It bounds
temporary memory at four chunks whatever the vector; two would do if the loop never paused, four hide a reduction and a
wake-up. Between hosts a round trip is to be hidden as well (`plan.selection`)."""


class Window:
    """Lets each step wait for the one `size` before it: `window.add(builder.recv(..., after=window.after))`.

    Without a window, all receives of an operation are posted at the start and the sender serves them in turn. Then the
    first chunk is complete hardly before the last one, so nothing is pipelined. And each receive that is reduced holds
    a temporary buffer.
    """

    __slots__ = ("_steps",)

    def __init__(self, size: int) -> None:
        self._steps: deque[int | None] = deque([None] * size, size)

    @property
    def after(self) -> tuple[int | None]:
        """What the next step has to wait for."""
        return (self._steps[0],)

    def add(self, step: int | None) -> None:
        """Note the next step; None, a step without elements, takes no room."""
        if step is not None:
            self._steps.append(step)

    def follow(self, step: int) -> int | None:
        """Note the next step; return what it has to wait for."""
        earlier = self._steps[0]
        self._steps.append(step)
        return earlier


def first_that_fits(lengths: Sequence[int], room: int) -> int:
    """The index from which on all `lengths` together are at most `room`.

    The last rounds of an algorithm that halves are small, and cost latency only. So they receive into SCRATCH of their
    own, posted from the start, while the rounds before go through a window.
    """
    first = len(lengths)
    for length in reversed(lengths):
        room -= length
        if room < 0:
            break
        first -= 1
    return first
