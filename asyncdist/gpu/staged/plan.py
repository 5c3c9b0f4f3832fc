"""How a collective on GPU arrays becomes collectives on host buffers: which bytes go out, what is run, what comes in.

A portion is a part of every vector or block, so small that all of it fits one buffer. The portion is copied out of the
device, one host collective is run on it, and its results are copied in. Portions do not depend on each other. All ranks
cut alike, from what they must agree on anyway. Where only the two ends of a piece know its length, ranks agree on the
number of portions first. Everything here is pure but `host_call`, which binds a portion to its buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from asyncdist.arrays.host import Array, Flat
from asyncdist.collectives.arguments.call import Call
from asyncdist.gpu.extents import NOTHING, input_blocks, output_blocks

VECTORS: Final = frozenset({"all_reduce", "broadcast", "exscan", "reduce", "scan"})
"""Collectives on one vector, alike on all ranks; the others have a block for every rank."""


class Transfer(NamedTuple):
    """`nbytes` bytes between the buffer, from `offset` on, and device memory at `pointer`."""

    offset: int
    pointer: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Portion:
    """`inputs` and `outputs` say where the host collective's blocks lie in the buffer: offset and bytes of each.

    `counts` are the collective's elements, as in `Call.counts`.
    """

    call: Call
    counts: int | tuple[int, ...]
    outs: tuple[Transfer, ...]
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    ins: tuple[Transfer, ...]
    nbytes: int


def portions(call: Call, rank: int, size: int, buffer_bytes: int, rounds: int = 0) -> Iterator[Portion]:
    """The portions of `call` on `rank`, in order, each for a buffer of `buffer_bytes`.

    `rounds`, where the call has pieces of which not all ranks know the lengths: the most that any rank needs.
    """
    if call.collective in VECTORS:
        return _vector(call, rank, size, buffer_bytes)
    if call.pieces is not None:
        return _pieces(call, size, buffer_bytes, rounds)
    return _blocks(call, size, buffer_bytes)


def rounds_of(call: Call, size: int, buffer_bytes: int) -> int:
    """How many portions the pieces of this rank need."""
    quota = _quota(call, 2 * size, buffer_bytes) * call.dtype.itemsize
    return max((-(-run.nbytes // quota) for run in (*input_blocks(call, size), *output_blocks(call, size))), default=0)


def host_call(portion: Portion, buffer: Array) -> Call:
    """The host collective of a portion whose buffer (uint8) has been filled."""
    call = portion.call
    inputs = _bind(portion.inputs, buffer, call.dtype)
    outputs = _bind(portion.outputs, buffer, call.dtype)
    detail = f"{call.detail} staged {call.counts}".lstrip()  # portions may be equal where the whole is not
    bound = Call(call.collective, call.dtype, portion.counts, (), (), None, call.root, call.op, call.finishes, detail)
    bound.shares = call.shares
    if call.pieces is not None:
        bound.pieces = (inputs, outputs)
        bound.inputs = [Flat(array, writable=False) for array in inputs]
        bound.outputs = [Flat(array, writable=True) for array in outputs]
        return bound
    bound.inputs = _whole(portion.inputs, buffer, call.dtype, writable=False)
    bound.outputs = _whole(portion.outputs, buffer, call.dtype, writable=True)
    return bound


def _bind(places: Sequence[tuple[int, int]], buffer: Array, dtype: np.dtype[Any]) -> list[Array]:
    return [buffer[offset : offset + nbytes].view(dtype) for offset, nbytes in places]


def _whole(places: Sequence[tuple[int, int]], buffer: Array, dtype: np.dtype[Any], *, writable: bool) -> list[Flat]:
    """Blocks that follow each other, as one extent."""
    if not places:
        return []
    first, last = places[0], places[-1]
    return [Flat(buffer[first[0] : last[0] + last[1]].view(dtype), writable=writable)]


def _quota(call: Call, parts: int, buffer_bytes: int) -> int:
    """Elements of a block in one portion, where a buffer holds so many `parts`."""
    return max(1, buffer_bytes // parts // call.dtype.itemsize)


def _vector(call: Call, rank: int, size: int, buffer_bytes: int) -> Iterator[Portion]:
    itemsize, collective = call.dtype.itemsize, call.collective
    source = input_blocks(call, size)[0] if call.inputs else output_blocks(call, size)[0]
    target = output_blocks(call, size)[0] if call.outputs else NOTHING
    apart = collective == "reduce"  # the only one that does not work in place
    quota_bytes = _quota(call, 1 + apart, buffer_bytes) * itemsize
    reads = collective != "broadcast" or rank == call.root
    writes = {"broadcast": rank != call.root, "reduce": rank == call.root, "exscan": rank > 0}.get(collective, True)
    for start in range(0, source.nbytes, quota_bytes):
        part = source.part(start, start + quota_bytes)
        place = target.part(start, start + quota_bytes)
        nbytes = part.nbytes
        at = nbytes if apart else 0
        yield Portion(
            call,
            nbytes // itemsize,
            (Transfer(0, part.pointer, nbytes),) if reads else (),
            ((0, nbytes),) if apart else (),
            ((at, nbytes),) if call.outputs else (),
            (Transfer(at, place.pointer, nbytes),) if writes else (),
            nbytes * (1 + apart),
        )


def _blocks(call: Call, size: int, buffer_bytes: int) -> Iterator[Portion]:
    parts = 2 * size if call.collective == "all_to_all" else size + 1
    itemsize = call.dtype.itemsize
    quota = _quota(call, parts, buffer_bytes)
    counts = (call.counts,) * size if isinstance(call.counts, int) else call.counts
    for start in range(0, max(counts), quota):
        cut = tuple(min(quota, max(0, count - start)) for count in counts)
        yield _portion(call, size, cut[0] if isinstance(call.counts, int) else cut, start * itemsize, quota * itemsize)


def _pieces(call: Call, size: int, buffer_bytes: int, rounds: int) -> Iterator[Portion]:
    quota_bytes = _quota(call, 2 * size, buffer_bytes) * call.dtype.itemsize
    for index in range(rounds):
        yield _portion(call, size, call.counts, index * quota_bytes, quota_bytes)


def _portion(call: Call, size: int, counts: int | tuple[int, ...], start: int, quota_bytes: int) -> Portion:
    """Bytes `start` to `start + quota_bytes` of every block, one after the other in the buffer."""
    offset = 0
    sides: list[list[Transfer]] = [[], []]
    for side, runs in enumerate((input_blocks(call, size), output_blocks(call, size))):
        for run in runs:
            part = run.part(start, start + quota_bytes)
            sides[side].append(Transfer(offset, part.pointer, part.nbytes))
            offset += part.nbytes
    return Portion(
        call,
        counts,
        tuple(transfer for transfer in sides[0] if transfer.nbytes),
        tuple((transfer.offset, transfer.nbytes) for transfer in sides[0]),
        tuple((transfer.offset, transfer.nbytes) for transfer in sides[1]),
        tuple(transfer for transfer in sides[1] if transfer.nbytes),
        offset,
    )
