"""Which calls go inline through a lane, and how: the `InlineRecipe` of a call.

Of an uneven all_to_all, gather or scatter only its two ends know how long a piece is, so which way it goes is nothing
to agree on: each sender decides for what it gives. If all of that is short it is the sender's payload, behind a table
of bounds; else its pieces are items. The reader looks which it is. Where all is in payloads, the reader takes that in
one go. Else it goes on with the steps of its plan, as a rank does from the start whose own pieces are too long for a
payload. Steps find pieces either way (`Items.piece`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from asyncdist.arrays.host import Array, Flat
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.arrays.reduction import Kernel
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.executor.runner import another_length
from asyncdist.collectives.shared.inline import InlineOperation, InlineRecipe, Take
from asyncdist.plan.algorithms.registry import find
from asyncdist.plan.problem import PRIVATE_COLLECTIVES
from asyncdist.plan.records import LaneMemory, by_records, pieces_bytes
from asyncdist.plan.steps import Copy, Fetch, Plan, Publish
from asyncdist.plan.summary import needs

ALIGNMENT: Final = 16
"""Pieces begin where this suits every dtype; all of a payload are of one."""

_BLOCKS_FOR_ALL: Final = ("all_to_all", "reduce_scatter", "scatter")
"""Collectives in which a rank puts out a block for every rank."""
FOLD_BYTES: Final = 256 << 10
"""Bytes of a result that are reduced at a time: they stay in the cache while all operands are added."""
_FROM_ROOT: Final = ("broadcast", "scatter")
_TO_ROOT: Final = ("gather", "reduce")


def in_records(call: Call) -> bool:
    """Whether calls like this one go inline if they are small; all ranks answer that alike."""
    even = isinstance(call.counts, int)
    return (even or call.collective == "reduce_scatter") and (call.op is None or isinstance(call.op, ReduceOp))


def inline_of(
    call: Call, plan: Plan, memory: LaneMemory, fingerprint: int, kernel: Kernel | None
) -> InlineRecipe | None:
    """How calls like this one go inline, if they do: all ranks answer that alike, but for pieces."""
    if plan.collective in PRIVATE_COLLECTIVES:
        return _pieces_of(call, plan, memory, fingerprint) if plan.algorithm == "shared" else None
    collective, rank, world, root = call.collective, plan.rank, plan.world, call.root
    if not in_records(call):
        return None
    nbytes = call.nbytes * world if isinstance(call.counts, int) and collective in _BLOCKS_FOR_ALL else call.nbytes
    if not by_records(find(collective, plan.algorithm).records, world, nbytes, memory):
        return None
    if not nbytes and collective != "barrier":
        return None
    everyone = tuple(range(world))
    recipe = InlineRecipe(
        fingerprint, call.dtype, nbytes, rank, _TAKE[collective], kernel or _no_kernel, gives=nbytes > 0, needed=None
    )
    recipe.averages = call.op is ReduceOp.AVG
    if collective == "all_reduce" and plan.algorithm == "shared":
        recipe.fold, recipe.take = _fold_part, _take_results
        recipe.own_part = _part(call.outputs[0].elements, world, rank)
    if nbytes == call.dtype.itemsize:
        recipe.spares = np.empty(1, call.dtype), np.empty(1, call.dtype)
    if collective in _FROM_ROOT:
        recipe.gives = rank == root
        recipe.needed = () if rank == root else (root,)
        recipe.readers = everyone if rank == root else ()
    elif collective in _TO_ROOT:
        recipe.needed = everyone if rank == root else ()
        if rank != root:
            recipe.take, recipe.readers = None, (root,)
    return recipe


@dataclass(slots=True, eq=False)
class Pieces:
    """Who gives which piece to whom, as which item: read off the plan, which is proven.

    Arrays are named by their place in `Call.pieces`.
    """

    giving: tuple[int, ...]
    """What goes to others, in the order of its items."""
    taking: tuple[tuple[int, int, int], ...]
    """Member and item, and where it goes."""
    own: tuple[tuple[int, int], ...]
    """What stays here, and where it goes."""
    table: struct.Struct
    """Of bounds, with which the payload begins."""
    most_bytes: int
    """The longest payload."""

    def fit(self, operation: InlineOperation) -> bool:
        """Whether all that an operation gives and takes fits payloads; else it has steps from the start."""
        assert operation.call.pieces is not None
        given, taken = operation.call.pieces
        end = -(-self.table.size // ALIGNMENT) * ALIGNMENT
        bounds = [end]
        for index in self.giving:
            end += given[index].nbytes
            bounds.append(end)
        if end > self.most_bytes or any(taken[index].nbytes > self.most_bytes for _, _, index in self.taking):
            return False
        operation.bounds = bounds
        operation.nbytes = end if self.giving else 0
        return True

    def put(self, operation: InlineOperation, payload: memoryview) -> None:
        """Put out what this rank gives."""
        bounds = operation.bounds
        assert operation.call.pieces is not None
        given = operation.call.pieces[0]
        self.table.pack_into(payload, 0, *bounds)
        target = np.frombuffer(payload, np.uint8)
        for index, (begin, end) in zip(self.giving, pairwise(bounds), strict=True):
            target[begin:end] = given[index].view(np.uint8)

    def take(self, operation: InlineOperation) -> None:
        """All that this rank takes is in payloads. Raises LaneFault, CollectiveMismatchError."""
        assert operation.call.pieces is not None
        given, taken = operation.call.pieces
        runner = operation.queue.runner()
        items = runner.lane.items
        for source, index in self.own:  # before what it may share memory with is written
            taken[index][...] = given[source]
        for member, item, index in self.taking:
            piece, target = items.piece(operation.number, member, item), taken[index]
            if len(piece) != target.nbytes:
                raise another_length(runner.ranks[member], len(piece), target.nbytes)
            if piece:
                target[...] = np.frombuffer(piece, target.dtype)
                runner.moved += len(piece)


def _pieces_of(call: Call, plan: Plan, memory: LaneMemory, fingerprint: int) -> InlineRecipe:
    published = [step for step in plan.steps if isinstance(step, Publish)]
    fetched = [step for step in plan.steps if isinstance(step, Fetch)]
    pieces = Pieces(
        giving=tuple(step.source.offset for step in published),
        taking=tuple((step.peer, step.item, step.target.offset) for step in fetched),
        own=tuple((step.source.offset, step.target.offset) for step in plan.steps if isinstance(step, Copy)),
        table=struct.Struct(f"<{len(published) + 1}I"),
        most_bytes=pieces_bytes(plan.world, memory),
    )
    return InlineRecipe(
        fingerprint,
        call.dtype,
        0,
        plan.rank,
        pieces.take,
        _no_kernel,
        gives=bool(published),
        needed=None if published and fetched else tuple(step.peer for step in fetched),
        readers=tuple(step.reader for step in published),
        pieces=pieces,
        needs=needs(plan.steps),
    )


def _take_results(operation: InlineOperation) -> None:
    """Take from every other rank the part of the result that it has reduced."""
    out, operands = operation.call.outputs[0].elements, operation.payloads.operands
    for rank, operand in enumerate(operands):
        if rank != operation.recipe.rank:
            part = _part(out, len(operands), rank)
            out[part] = operand[part]


def _part(out: Array, world: int, rank: int) -> slice:
    """The elements that a rank reduces for all."""
    return slice(out.size * rank // world, out.size * (rank + 1) // world)


def _fold_part(operation: InlineOperation) -> None:
    """All payloads are there: reduce our part, and put it out where no member takes our operand of it any more."""
    recipe, out, payloads = operation.recipe, operation.call.outputs[0].elements, operation.payloads
    part = recipe.own_part
    assert part is not None
    operands = [*payloads.operands]
    operands[recipe.rank] = out  # and not into it, as it may be a later operand
    _fold(operands, part.start, payloads.own[part], recipe.kernel)
    out[part] = payloads.own[part]


def _reduce_scatter(operation: InlineOperation) -> None:
    recipe, counts = operation.recipe, operation.call.counts
    out = operation.call.outputs[0].elements
    start = out.size * recipe.rank if isinstance(counts, int) else sum(counts[: recipe.rank])
    _fold(operation.payloads.operands, start, out, recipe.kernel)


def _all_gather(operation: InlineOperation) -> None:
    operands = operation.payloads.operands
    for block, operand in zip(_blocks(operation.call.outputs, len(operands)), operands, strict=True):
        block[...] = operand


def _all_to_all(operation: InlineOperation) -> None:
    operands, rank = operation.payloads.operands, operation.recipe.rank
    for block, operand in zip(_blocks(operation.call.outputs, len(operands)), operands, strict=True):
        block[...] = operand[rank * block.size : (rank + 1) * block.size]


def _broadcast(operation: InlineOperation) -> None:
    for operand in operation.payloads.operands:  # the root takes none
        operation.call.outputs[0].elements[...] = operand


def _scatter(operation: InlineOperation) -> None:
    call, rank = operation.call, operation.recipe.rank
    own = call.outputs[0].elements
    if call.inputs:
        own[...] = call.inputs[rank].elements
    for operand in operation.payloads.operands:
        own[...] = operand[rank * own.size : (rank + 1) * own.size]


def _blocks(flats: Sequence[Flat], world: int) -> list[Array]:
    """The blocks of all ranks, whether they are one array or several."""
    if len(flats) > 1:
        return [flat.elements for flat in flats]
    whole = flats[0].elements
    size = whole.size // world
    return [whole[size * rank : size * (rank + 1)] for rank in range(world)]


def _no_kernel(left: Array, right: Array, out: Array) -> None:
    """Of collectives without a reduction."""
    raise AssertionError("a collective without a reduction reduces")


def _reduce_all(operation: InlineOperation) -> None:
    """Reduce the vectors of all ranks."""
    recipe, operands = operation.recipe, operation.payloads.operands
    out, kernel, spares = operation.call.outputs[0].elements, recipe.kernel, recipe.spares
    if recipe.nbytes > FOLD_BYTES:
        _fold(operands, 0, out, kernel)
    elif spares is None or len(operands) == 2:
        kernel(operands[0], operands[1], out)
        for operand in operands[2:]:
            kernel(out, operand, out)
    else:
        total = operands[0]
        for index in range(1, len(operands) - 1):
            target = spares[index & 1]
            kernel(total, operands[index], target)
            total = target
        kernel(total, operands[-1], out)


def _fold(operands: list[Array], start: int, out: Array, kernel: Kernel) -> None:
    """Reduce, in rank order, what the operands hold from `start` on: a part at a time, which stays in the cache."""
    step = max(1, FOLD_BYTES // out.itemsize)
    for first in range(0, out.size, step):
        part = out[first : first + step]
        begin, end = start + first, start + first + part.size
        kernel(operands[0][begin:end], operands[1][begin:end], part)
        for operand in operands[2:]:
            kernel(part, operand[begin:end], part)


_TAKE: Final[dict[str, Take | None]] = {
    "all_gather": _all_gather,
    "all_reduce": _reduce_all,
    "all_to_all": _all_to_all,
    "barrier": None,
    "broadcast": _broadcast,
    "gather": _all_gather,
    "reduce": _reduce_all,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}
"""By collective."""
