"""ExpressOperation: a collective so small that its operands travel in the records of a lane.

It publishes with one store, is done with the first look that finds all members there, and needs neither plan steps nor
memory of its own: what `plan.shared_reduce.all_reduce_direct` and `plan.shared_move.barrier` say, by a shorter way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncdist.backend.base import CollectiveWork
from asyncdist.backend.call import Call
from asyncdist.backend.operation import Recipe
from asyncdist.executor import reduction
from asyncdist.executor.shared_lane import SharedLane
from asyncdist.plan.steps import Plan
from asyncdist.reduce_op import ReduceOp
from asyncdist.transport.lane_layout import WIDE_BYTES

if TYPE_CHECKING:
    from asyncdist.backend.aio import AioBackend

__all__ = ["ExpressOperation", "goes_express"]

_NOTHING = memoryview(b"")


def goes_express(call: Call, plan: Plan) -> bool:
    """Whether all calls like this one are carried out here; the same on all ranks."""
    if call.collective == "barrier":
        return plan.algorithm == "shared"
    return (
        call.collective == "all_reduce"
        and plan.algorithm == "shared_direct"
        and isinstance(call.op, ReduceOp)
        and 0 < call.nbytes <= WIDE_BYTES
    )


class ExpressOperation:
    """One call under way. `on_end(work, error)` is called once, unless the backend forgets the operation first."""

    __slots__ = ("_backend", "_call", "_kernel", "_lane", "_on_end", "_work", "fingerprint", "number", "payload")

    def __init__(
        self,
        backend: AioBackend,
        lane: SharedLane,
        call: Call,
        recipe: Recipe,
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
        self.payload: memoryview = call.outputs[0].octets if call.outputs else _NOTHING
        self.number = -1

    def ready(self) -> None:
        """All members' operands are there: reduce them, in rank order."""
        kernel = self._kernel
        if kernel is None:
            return
        call = self._call
        flat = call.outputs[0]
        out = flat.elements
        operands = self._lane.operands(self.number, out.dtype, len(self.payload))
        kernel(operands[0], operands[1], out)
        for operand in operands[2:]:
            kernel(out, operand, out)
        if call.op is ReduceOp.AVG:
            reduction.finish(ReduceOp.AVG, out, len(operands) * call.shares)
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
