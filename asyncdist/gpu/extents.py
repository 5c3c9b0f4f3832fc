"""Extents: what a call on GPU arrays reads and writes, as addresses and lengths in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from asyncdist.collectives.arguments.call import Call

ALIGN_BYTES: Final = 256
"""Parts of device memory begin at multiples of this, as CUDA's own allocations do. Every element divides it."""


class Extent(NamedTuple):
    """`nbytes` bytes of device memory from address `pointer` on."""

    pointer: int
    nbytes: int

    def part(self, start: int, stop: int) -> Extent:
        """Bytes `start` to `stop`, as far as there are any."""
        start, stop = min(start, self.nbytes), min(stop, self.nbytes)
        return Extent(self.pointer + start, max(0, stop - start))


NOTHING = Extent(0, 0)


def aligned(nbytes: int) -> int:
    """The least multiple of ALIGN_BYTES that is not less."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def input_blocks(call: Call, size: int) -> tuple[Extent, ...]:
    """What the call reads: a block per rank where the call has blocks, in one array or several; else each array."""
    return _blocks(call, 0, size)


def output_blocks(call: Call, size: int) -> tuple[Extent, ...]:
    """What the call writes, as `input_blocks`."""
    return _blocks(call, 1, size)


def _blocks(call: Call, side: int, size: int) -> tuple[Extent, ...]:
    if call.pieces is not None:
        return _extents(call.pieces[side])
    flats = call.outputs if side else call.inputs
    if len(flats) != 1 or (call.collective, side) not in _ONE_PER_RANK:
        return _extents(flats)
    (whole,) = _extents(flats)
    counts = (call.counts,) * size if isinstance(call.counts, int) else call.counts
    ends = [0, *accumulate(count * call.dtype.itemsize for count in counts)]
    return tuple(whole.part(start, stop) for start, stop in pairwise(ends))


_ONE_PER_RANK: Final = frozenset(
    {("all_gather", 1), ("gather", 1), ("scatter", 0), ("reduce_scatter", 0), ("all_to_all", 0), ("all_to_all", 1)}
)
"""Collectives, and the side (0 inputs, 1 outputs) that has a block for every rank. One array may hold them all."""


def _extents(arrays: Sequence[Any]) -> tuple[Extent, ...]:
    return tuple(Extent(array.pointer, array.nbytes) for array in arrays)


def clash(call: Call, rank: int, size: int) -> bool:
    """Whether outputs share memory with inputs, other than a rank's own block that stays where it is."""
    if not call.inputs and not call.members:
        return False  # in place
    for part in call.members or (call,):
        inputs, outputs = list(input_blocks(part, size)), list(output_blocks(part, size))
        if not inputs or not outputs:
            continue
        own_input, own_output = (rank if len(extents) > 1 else 0 for extents in (inputs, outputs))
        if inputs[own_input] == outputs[own_output]:
            inputs[own_input] = NOTHING
        if overlap(inputs, outputs):
            return True
    return False


def overlap(inputs: Sequence[Extent], outputs: Sequence[Extent]) -> bool:
    """Whether some input shares memory with some output."""
    ends = sorted((one.pointer, one.pointer + one.nbytes, side) for side in (0, 1) for one in (inputs, outputs)[side])
    last = [0, 0]
    for first, end, side in ends:
        if first < end and first < last[not side]:
            return True
        last[side] = max(last[side], end)
    return False
