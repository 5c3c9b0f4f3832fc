"""ExpressOperation: a collective so small that what ranks give each other travels in the records of a lane.

A rank publishes with one store, and takes what it is to have with the first look that finds there all that it needs.
That takes neither plan steps nor memory of its own: it is what the plans of `shared_reduce` and `shared_move` in
`plan.algorithms` say, by a shorter way. Which collectives go so, `plan.records` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from asyncdist.arrays.host import Array, Flat
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.collectives.executor import reduction
from asyncdist.collectives.executor.reduction import Kernel
from asyncdist.collectives.shared.channel import Needs
from asyncdist.collectives.shared.inline_protocol import Payloads
from asyncdist.collectives.shared.runner import SharedLane
from asyncdist.plan.algorithms.registry import find
from asyncdist.plan.records import LaneMemory, by_records
from asyncdist.plan.steps import Plan

if TYPE_CHECKING:
    from asyncdist.collectives.host.backend import AioBackend

__all__ = ["ExpressKind", "ExpressOperation", "express_of", "in_records", "no_kernel"]

FOLD_BYTES: Final = 256 << 10
"""Bytes of a result that are reduced at a time: they stay in the cache while all operands are added."""


NO_PAYLOADS: Final = Payloads(np.empty(0, np.uint8), [])
"""Of operations that have not begun, and of barriers."""

Take: TypeAlias = "Callable[[Call, list[Array], ExpressKind], None]"
"""take(call, operands, kind): put into the outputs of `call` what this rank has of all ranks' payloads."""


@dataclass(slots=True, eq=False)
class ExpressKind:
    """What all express calls with one recipe share."""

    fingerprint: int
    dtype: np.dtype[Any]
    nbytes: int
    """What each rank that gives puts out: its vector, its block, or its blocks for all; 0 of `pieces`."""
    rank: int
    take: Take | None
    """None if there is nothing to take."""
    kernel: Kernel
    gives: bool
    """Whether this rank does."""
    needed: tuple[int, ...] | None
    """Whose payload this rank takes; None: everybody's, as everybody takes its own."""
    folds: bool = False
    """Whether every rank first reduces a part of all vectors and puts out the result, for the others to take."""
    averages: bool = False
    spares: tuple[Array, Array] | None = None
    """For one element: numpy needs three times as long to reduce it in place as from one array into another."""
    readers: tuple[int, ...] = ()
    """Who takes from this rank, if not all do: everyone from it alone, or one from everyone."""
    pieces: bool = False
    needs: Needs = field(default_factory=dict)
    """See `inline_protocol`."""


def in_records(call: Call) -> bool:
    """Whether calls like this one travel in records if they are small; all ranks answer that alike."""
    even = isinstance(call.counts, int)
    return (even or call.collective == "reduce_scatter") and (call.op is None or isinstance(call.op, ReduceOp))


def express_of(
    call: Call, plan: Plan, rank: int, memory: LaneMemory, fingerprint: int, kernel: Kernel | None
) -> ExpressKind | None:
    """How calls like this one are carried out here, if they are: all ranks answer that alike."""
    collective, world, root = call.collective, plan.world, call.root
    if not in_records(call):
        return None
    nbytes = call.nbytes * world if isinstance(call.counts, int) and collective in _BLOCKS_FOR_ALL else call.nbytes
    if not by_records(find(collective, plan.algorithm).records, world, nbytes, memory):
        return None
    if not nbytes and collective != "barrier":
        return None
    everyone = tuple(range(world))
    kind = ExpressKind(
        fingerprint, call.dtype, nbytes, rank, _TAKE[collective], kernel or no_kernel, gives=nbytes > 0, needed=None
    )
    kind.averages = call.op is ReduceOp.AVG
    if collective == "all_reduce" and plan.algorithm == "shared":
        kind.folds, kind.take = True, _take_results
    if nbytes == call.dtype.itemsize:
        kind.spares = np.empty(1, call.dtype), np.empty(1, call.dtype)
    if collective in _FROM_ROOT:
        kind.gives = rank == root
        kind.needed = () if rank == root else (root,)
        kind.readers = everyone if rank == root else ()
    elif collective in _TO_ROOT:
        kind.needed = everyone if rank == root else ()
        if rank != root:
            kind.take, kind.readers = None, (root,)
    return kind


class ExpressOperation:
    """One call under way. `on_end(work, error)` is called once, unless the backend forgets the operation first."""

    __slots__ = ("_backend", "_call", "_lane", "_on_end", "_work", "folded", "kind", "nbytes", "number", "payloads")

    def __init__(
        self,
        backend: AioBackend,
        lane: SharedLane,
        kind: ExpressKind,
        call: Call,
        work: CollectiveWork,
        on_end: Callable[[CollectiveWork, BaseException | None], None],
    ) -> None:
        self._backend = backend
        self._lane = lane
        self._call = call
        self._work = work
        self._on_end = on_end
        self.kind = kind
        self.nbytes = kind.nbytes
        self.folded = False
        self.number = -1
        self.payloads = NO_PAYLOADS

    def wakes(self, *, last: bool) -> tuple[int, ...]:
        """Who may go on now that we have begun, where not all take from all: who takes from one, at last the root."""
        readers = self.kind.readers
        return readers if last or len(readers) > 1 else ()

    def put(self, target: Array) -> None:
        """Put out what this rank gives."""
        call = self._call
        pieces = call.inputs or call.outputs
        if len(pieces) == 1:
            target[...] = pieces[0].elements
            return
        start = 0
        for piece in pieces:
            elements = piece.elements
            target[start : start + elements.size] = elements
            start += elements.size

    def fold(self) -> None:
        """All payloads are there: reduce our part, and put it out where nobody takes our operand of it any more."""
        kind, out = self.kind, self._call.outputs[0].elements
        part = _part(out, len(self.payloads.operands), kind.rank)
        _fold(self.payloads.operands, part.start, out[part], kind.kernel)
        self.payloads.own[part] = out[part]

    def take(self) -> None:
        """All payloads that this rank takes are there: take what it is to have."""
        kind = self.kind
        if kind.take is None:
            return
        call, operands = self._call, self.payloads.operands
        kind.take(call, operands, kind)
        if kind.averages:
            reduction.finish(ReduceOp.AVG, call.outputs[0].elements, len(operands) * call.shares)
        for flat in call.outputs:
            if flat.is_copy:
                flat.write_back()

    def by_items(self) -> None:
        """Never called: where all payloads are alike nobody puts out items."""
        raise AssertionError("a member puts out items, and nobody asked whether one does")

    def done(self) -> None:
        """Results are in place."""
        work = self._work
        del self._backend.running[work.key]
        self._on_end(work, None)

    def fail(self, error: BaseException) -> None:
        """The operation cannot go on."""
        self._backend.drop(self._work.tag, self._work.number)
        self._on_end(self._work, error)

    def stop(self) -> None:
        """Read and write no array any more, and report nothing."""
        self._lane.drop_express(self)

    def waiting_for(self) -> tuple[int, ...]:
        """Group ranks that we wait for to begin the operation."""
        missing = self._lane.not_begun(self.number)
        needed = self.kind.needed
        return missing if needed is None else tuple(rank for rank in missing if rank in needed)


def _all_reduce(call: Call, operands: list[Array], kind: ExpressKind) -> None:
    out, kernel, spares = call.outputs[0].elements, kind.kernel, kind.spares
    if kind.nbytes > FOLD_BYTES:
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


def _take_results(call: Call, operands: list[Array], kind: ExpressKind) -> None:
    out = call.outputs[0].elements
    for rank, operand in enumerate(operands):
        if rank != kind.rank:
            part = _part(out, len(operands), rank)
            out[part] = operand[part]


def _part(out: Array, world: int, rank: int) -> slice:
    """The elements that a rank reduces for all."""
    return slice(out.size * rank // world, out.size * (rank + 1) // world)


def _reduce_scatter(call: Call, operands: list[Array], kind: ExpressKind) -> None:
    out, counts = call.outputs[0].elements, call.counts
    _fold(operands, out.size * kind.rank if isinstance(counts, int) else sum(counts[: kind.rank]), out, kind.kernel)


def _all_gather(call: Call, operands: list[Array], kind: ExpressKind) -> None:
    for block, operand in zip(_blocks(call.outputs, len(operands)), operands, strict=True):
        block[...] = operand


def _all_to_all(call: Call, operands: list[Array], kind: ExpressKind) -> None:
    for block, operand in zip(_blocks(call.outputs, len(operands)), operands, strict=True):
        block[...] = operand[kind.rank * block.size : (kind.rank + 1) * block.size]


def _broadcast(call: Call, operands: list[Array], kind: ExpressKind) -> None:
    for operand in operands:  # the root takes none
        call.outputs[0].elements[...] = operand


def _scatter(call: Call, operands: list[Array], kind: ExpressKind) -> None:
    own = call.outputs[0].elements
    if call.inputs:
        own[...] = call.inputs[kind.rank].elements
    for operand in operands:
        own[...] = operand[kind.rank * own.size : (kind.rank + 1) * own.size]


def _fold(operands: list[Array], start: int, out: Array, kernel: Kernel) -> None:
    """Reduce, in rank order, what the operands hold from `start` on: a part at a time, which stays in the cache."""
    step = max(1, FOLD_BYTES // out.itemsize)
    for first in range(0, out.size, step):
        part = out[first : first + step]
        begin, end = start + first, start + first + part.size
        kernel(operands[0][begin:end], operands[1][begin:end], part)
        for operand in operands[2:]:
            kernel(part, operand[begin:end], part)


def _blocks(flats: Sequence[Flat], world: int) -> list[Array]:
    """The blocks of all ranks, whether they are one array or several."""
    if len(flats) > 1:
        return [flat.elements for flat in flats]
    whole = flats[0].elements
    size = whole.size // world
    return [whole[size * rank : size * (rank + 1)] for rank in range(world)]


def no_kernel(left: Array, right: Array, out: Array) -> None:
    """Of collectives without a reduction."""
    raise AssertionError("a collective without a reduction reduces")


_BLOCKS_FOR_ALL: Final = ("all_to_all", "reduce_scatter", "scatter")
"""Collectives in which a rank puts out a block for every rank."""
_FROM_ROOT: Final = ("broadcast", "scatter")
_TO_ROOT: Final = ("gather", "reduce")

_TAKE: Final[dict[str, Take | None]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "barrier": None,
    "broadcast": _broadcast,
    "gather": _all_gather,
    "reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}
