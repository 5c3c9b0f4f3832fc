"""Extents: what a call on device arrays reads and writes, as addresses and lengths in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncdist.collectives.arguments.call import Call

__all__ = ["NOTHING", "Extent", "clash", "input_blocks", "output_blocks", "overlap"]


class Extent(NamedTuple):
    """`nbytes` bytes of device memory from address `pointer` on."""

    pointer: int
    nbytes: int

    def part(self, start: int, stop: int) -> Extent:
        """Bytes `start` to `stop`, as far as there are any."""
        start, stop = min(start, self.nbytes), min(stop, self.nbytes)
        return Extent(self.pointer + start, max(0, stop - start))


NOTHING = Extent(0, 0)


def input_blocks(call: Call, size: int) -> tuple[Extent, ...]:
    """What is read: a block per rank where the call has one for each, in one array or several; else each array."""
    return _blocks(call, 0, size)


def output_blocks(call: Call, size: int) -> tuple[Extent, ...]:
    """What is written, as `input_blocks`."""
    return _blocks(call, 1, size)


def _blocks(call: Call, side: int, size: int) -> tuple[Extent, ...]:
    if call.pieces is not None:
        return tuple(_extent_of(piece) for piece in call.pieces[side])
    flats: Sequence[Any] = call.outputs if side else call.inputs
    if len(flats) != 1 or (call.collective, side) not in _ONE_PER_RANK:
        return tuple(_extent_of(flat) for flat in flats)
    whole = _extent_of(flats[0])
    counts = (call.counts,) * size if isinstance(call.counts, int) else call.counts
    found, start = [], 0
    for count in counts:
        stop = start + count * call.dtype.itemsize
        found.append(whole.part(start, stop))
        start = stop
    return tuple(found)


_ONE_PER_RANK = {
    ("all_gather", 1),
    ("gather", 1),
    ("scatter", 0),
    ("reduce_scatter", 0),
    ("all_to_all", 0),
    ("all_to_all", 1),
}
"""Collectives and the side (0 inputs, 1 outputs) that has a block for every rank, which one array may hold."""


def _extent_of(elements: Any) -> Extent:
    return Extent(elements.pointer, elements.nbytes)


def clash(call: Call, rank: int, size: int) -> bool:
    """Whether outputs share memory with inputs in any other way than that a rank's own block stays where it is."""
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
