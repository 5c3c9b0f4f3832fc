"""ExpressOperation: a collective so small that what ranks give each other travels in the records of a lane.

A rank publishes with one store, and takes what it is to have with the first look that finds there all that it needs.
That takes neither plan steps nor memory of its own: it is what the plans of `plan.shared_reduce` and `plan.shared_move`
say, by a shorter way. Which collectives go so, `plan.records` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from asyncdist.arrays import Array, Flat
from asyncdist.backend.base import CollectiveWork
from asyncdist.backend.call import Call
from asyncdist.executor import reduction
from asyncdist.executor.reduction import Kernel
from asyncdist.executor.shared_lane import SharedLane
from asyncdist.plan.records import by_records
from asyncdist.plan.steps import Plan
from asyncdist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from asyncdist.backend.aio import AioBackend
    from asyncdist.backend.operation import Recipe

__all__ = ["ExpressKind", "ExpressOperation", "express_of"]

FOLD_BYTES: Final = 256 << 10
"""Bytes of a result that are reduced at a time: they stay in the cache while all operands are added."""


Take: TypeAlias = "Callable[[Call, list[Array], int, Kernel], None]"
"""take(call, operands, rank, kernel): put into the outputs of `call` what this rank has of all ranks' payloads."""


class ExpressKind(NamedTuple):
    """What all express calls with one recipe share."""

    nbytes: int
    """What each rank that gives puts out: its vector, its block, or its blocks for all."""
    take: Take | None
    """None if there is nothing to take."""
    gives: bool
    """Whether this rank does."""
    needed: tuple[int, ...] | None
    """Whose payload this rank takes; None: everybody's, as everybody takes its own."""
    readers: tuple[int, ...] = ()
    """Who takes from this rank, if not all do: everyone from it alone, or one from everyone."""


def express_of(call: Call, plan: Plan, rank: int, lane_bytes: int) -> ExpressKind | None:
    """How calls like this one are carried out here, if they are: all ranks answer that alike."""
    collective, world, root = call.collective, plan.world, call.root
    even = isinstance(call.counts, int)
    if not (even or collective == "reduce_scatter") or not (call.op is None or isinstance(call.op, ReduceOp)):
        return None
    nbytes = call.nbytes * world if even and collective in _BLOCKS_FOR_ALL else call.nbytes
    if not by_records(collective, plan.algorithm, world, nbytes, lane_bytes):
        return None
    if not nbytes and collective != "barrier":
        return None
    take, everyone = _TAKE[collective], tuple(range(world))
    if collective in _FROM_ROOT:
        if rank == root:
            return ExpressKind(nbytes, take, gives=True, needed=(), readers=everyone)
        return ExpressKind(nbytes, take, gives=False, needed=(root,))
    if collective in _TO_ROOT:
        if rank == root:
            return ExpressKind(nbytes, take, gives=True, needed=everyone)
        return ExpressKind(nbytes, None, gives=True, needed=(), readers=(root,))
    return ExpressKind(nbytes, take, gives=True, needed=None)


class ExpressOperation:
    """One call under way. `on_end(work, error)` is called once, unless the backend forgets the operation first."""

    __slots__ = (
        "_backend",
        "_call",
        "_kernel",
        "_kind",
        "_lane",
        "_on_end",
        "_work",
        "fingerprint",
        "nbytes",
        "needed",
        "number",
        "payload",
    )

    def __init__(
        self,
        backend: AioBackend,
        lane: SharedLane,
        call: Call,
        recipe: Recipe,
        express: ExpressKind,
        work: CollectiveWork,
        on_end: Callable[[CollectiveWork, BaseException | None], None],
    ) -> None:
        self._backend = backend
        self._lane = lane
        self._call = call
        self._kernel = recipe.kernel
        self._work = work
        self._on_end = on_end
        self.fingerprint = recipe.fingerprint
        self.nbytes = express.nbytes
        self.payload = list(map(_octets, call.inputs or call.outputs)) if express.gives else []
        self.needed = express.needed
        self._kind = express
        self.number = -1

    def wakes(self, *, last: bool) -> tuple[int, ...]:
        """Who may go on now that we have begun, where not all take from all: who takes from one, at last the root."""
        readers = self._kind.readers
        return readers if last or len(readers) > 1 else ()

    def ready(self) -> None:
        """All payloads that this rank takes are there: take what it is to have."""
        kind = self._kind
        take = kind.take
        if take is None:
            return
        call = self._call
        operands = self._lane.operands(self.number, call.dtype, kind.nbytes, kind.needed)
        take(call, operands, self._backend.rank, self._kernel or _no_kernel)
        if call.op is ReduceOp.AVG:
            reduction.finish(ReduceOp.AVG, call.outputs[0].elements, len(operands) * call.shares)
        for flat in call.outputs:
            flat.write_back()

    def done(self) -> None:
        """Results are in place."""
        work = self._work
        self._backend.forget(work)
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
        return missing if self.needed is None else tuple(rank for rank in missing if rank in self.needed)


def _all_reduce(call: Call, operands: list[Array], rank: int, kernel: Kernel) -> None:
    del rank
    out = call.outputs[0].elements
    if out.nbytes > FOLD_BYTES:
        _fold(operands, 0, out, kernel)
        return
    kernel(operands[0], operands[1], out)
    for operand in operands[2:]:
        kernel(out, operand, out)


def _reduce_scatter(call: Call, operands: list[Array], rank: int, kernel: Kernel) -> None:
    out, counts = call.outputs[0].elements, call.counts
    _fold(operands, out.size * rank if isinstance(counts, int) else sum(counts[:rank]), out, kernel)


def _all_gather(call: Call, operands: list[Array], rank: int, kernel: Kernel) -> None:
    del rank, kernel
    for block, operand in zip(_blocks(call.outputs, len(operands)), operands, strict=True):
        block[...] = operand


def _all_to_all(call: Call, operands: list[Array], rank: int, kernel: Kernel) -> None:
    del kernel
    for block, operand in zip(_blocks(call.outputs, len(operands)), operands, strict=True):
        block[...] = operand[rank * block.size : (rank + 1) * block.size]


def _broadcast(call: Call, operands: list[Array], rank: int, kernel: Kernel) -> None:
    del rank, kernel
    for operand in operands:  # the root takes none
        call.outputs[0].elements[...] = operand


def _scatter(call: Call, operands: list[Array], rank: int, kernel: Kernel) -> None:
    del kernel
    own = call.outputs[0].elements
    if call.inputs:
        own[...] = call.inputs[rank].elements
    for operand in operands:
        own[...] = operand[rank * own.size : (rank + 1) * own.size]


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


def _no_kernel(left: Array, right: Array, out: Array) -> None:
    raise AssertionError("a collective without a reduction reduces")


_octets = attrgetter("octets")

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
