"""ExpressOperation: a collective so small that its operands travel in the records of a lane.

It publishes with one store, is done with the first look that finds all members there, and needs neither plan steps nor
memory of its own: what `plan.shared_reduce.all_reduce_direct` and `plan.shared_move.barrier` say, by a shorter way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """What each rank puts out: its vector, its block, or its blocks for all."""
    take: Take | None
    """None if there is nothing to take."""


def express_of(call: Call, plan: Plan, lane_bytes: int) -> ExpressKind | None:
    """How calls like this one are carried out here, if they are; the same on all ranks."""
    collective, even = call.collective, isinstance(call.counts, int)
    if not (even or collective == "reduce_scatter") or not (call.op is None or isinstance(call.op, ReduceOp)):
        return None
    nbytes = call.nbytes * plan.world if even and collective in _BLOCKS_FOR_ALL else call.nbytes
    if not by_records(collective, plan.algorithm, plan.world, nbytes, lane_bytes):
        return None
    return ExpressKind(nbytes, _TAKE[collective]) if nbytes or collective == "barrier" else None


class ExpressOperation:
    """One call under way. `on_end(work, error)` is called once, unless the backend forgets the operation first."""

    __slots__ = (
        "_backend",
        "_call",
        "_kernel",
        "_lane",
        "_on_end",
        "_take",
        "_work",
        "fingerprint",
        "nbytes",
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
        self.payload = [flat.octets for flat in call.inputs or call.outputs]
        self.nbytes, self._take = express
        self.number = -1

    def ready(self) -> None:
        """All members' operands are there: take what this rank is to have."""
        take = self._take
        if take is None:
            return
        call = self._call
        operands = self._lane.operands(self.number, call.dtype, self.nbytes)
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
        """Group ranks that have not begun the operation."""
        return self._lane.not_begun(self.number)


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


_BLOCKS_FOR_ALL: Final = ("all_to_all", "reduce_scatter")
"""Collectives in which a rank puts out a block for every rank."""

_TAKE: Final[dict[str, Take | None]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "barrier": None,
    "reduce_scatter": _reduce_scatter,
}
