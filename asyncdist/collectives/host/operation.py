"""Operation: a collective of the `aio` backend, from its arguments to its results in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asyncdist.arrays import reduction
from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.arrays.reduction import Kernel
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork, OnEnd
from asyncdist.collectives.executor.buffers import NO_BUFFER, BlockBuffer, Bound, FlatBuffer, PieceBuffer
from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.executor.runner import Execution, Publisher, run_sliced
from asyncdist.collectives.shared.inline import InlineRecipe
from asyncdist.plan.steps import Plan
from asyncdist.transport.protocol.frame import key_prefix

if TYPE_CHECKING:
    from asyncdist.collectives.host.backend import HostBackend

SPARE_BYTES: Final = 64 << 10
"""Scratch up to this size stays with its recipe between calls; larger scratch goes back to the pool, for all to use."""
SPARES: Final = 8
"""Spare scratch buffers per recipe: as many calls of one shape as are usually in flight at once."""


class Recipe:
    """What all calls with the same collective, sizes, dtype, root and reduction share."""

    def __init__(self, plan: Plan, fingerprint: int, kernel: Kernel | None, inline: InlineRecipe | None = None) -> None:
        self.plan = plan
        self.inline = inline
        """How it goes inline through a lane, if it does."""
        self.fingerprint = fingerprint
        self.kernel = kernel
        self.met = -1
        """`lookups_failed` of the mesh when connections to all peers of the plan were asked for; -1 before."""
        self.spares: list[FlatBuffer] = []
        """Scratch of calls that have ended."""

    @cached_property
    def program(self) -> Program:
        """The plan, ready to run: made for the first call that goes in steps."""
        return Program(self.plan)

    @cached_property
    def shared(self) -> bool:
        """Whether its steps go through shared memory."""
        return bool(self.program.items or self.program.needs)


class Operation(Execution):
    """One call under way. `on_end(work, error)` is called once, unless the backend forgets the operation first."""

    __slots__ = ("_backend", "_call", "_on_end", "_recipe", "_scratch", "_spare", "_split", "_work")

    def __init__(self, backend: HostBackend, call: Call, recipe: Recipe, work: CollectiveWork, on_end: OnEnd) -> None:
        self._backend = backend
        self._call = call
        self._recipe = recipe
        self._work = work
        self._on_end = on_end
        self._scratch: Array | None = None
        self._spare: FlatBuffer | None = None
        self._split: Array | None = None
        plan = recipe.program.plan
        buffers = (
            _bind_inputs(call, plan.block_aligned) if call.inputs else NO_BUFFER,
            self._bind_outputs(call, plan.block_aligned) if call.outputs else NO_BUFFER,
            self._bind_scratch(call.dtype, plan.scratch_count) if plan.scratch_count else NO_BUFFER,
        )
        super().__init__(
            backend.resources,
            recipe.program,
            buffers,
            key_prefix(backend.group_id, work.tag, work.number),
            recipe.fingerprint,
            call.dtype.itemsize,
            recipe.kernel,
        )

    def share(self, steps: Publisher) -> None:
        """Publish and fetch by `steps`; to be called before `begin`."""
        self._shared = steps

    def begin(self) -> None:
        """Scale our contribution where PREMUL_SUM works in place, then start."""
        call = self._call
        if type(call.op) is not PremulSum or call.inputs:
            self.start()
            return
        elements, op = call.outputs[0].elements, call.op

        def scale(start: int, stop: int) -> None:
            if self._is_running():
                reduction.prepare(op, elements[start:stop])

        def start() -> None:
            if self._is_running():
                self.start()

        run_sliced(self._loop, elements.size, elements.itemsize, scale, start)

    def ended(self, error: BaseException | None) -> None:
        """Every step is done, or one has failed: bring results into place and report."""
        call = self._call
        if self._shared is not None:
            self._shared.end()
        if error is not None:
            self._backend.drop(self._work.tag, self._work.number)
            self._on_end(self._work, error)
            return
        self._give_scratch()
        if call.op is not ReduceOp.AVG or not call.finishes:
            self._deliver()
            return
        elements, world = call.outputs[0].elements, len(self._backend.ranks) * call.shares

        def divide(start: int, stop: int) -> None:
            if self._is_running():
                reduction.finish(ReduceOp.AVG, elements[start:stop], world)

        run_sliced(self._loop, elements.size, elements.itemsize, divide, self._deliver)

    def stop(self) -> None:
        """See Execution.stop; nothing of the operation is read or written any more."""
        super().stop()
        if self._shared is not None:
            self._shared.end()
        self._give_scratch()

    def _give_scratch(self) -> None:
        if self._scratch is not None:
            self.pool.give(self._scratch)
            self._scratch = None
        elif self._spare is not None and len(self._recipe.spares) < SPARES:
            self._recipe.spares.append(self._spare)
        self._spare = None

    def _deliver(self) -> None:
        if not self._is_running():
            return
        split, start = self._split, 0
        error: Exception | None = None
        try:
            for flat in self._call.outputs:
                if split is not None:
                    flat.elements[...] = split[start : start + flat.elements.size]
                    start += flat.elements.size
                flat.write_back()
        except Exception as failure:  # an array cannot be written any more: its owner has changed it meanwhile
            error = failure
        self._backend.forget(self._work)
        self._on_end(self._work, error)

    def _is_running(self) -> bool:
        """Whether the backend still knows this operation: it forgets those that were aborted or refused."""
        return self._backend.running.get(self._work.key) is self

    def _bind_outputs(self, call: Call, aligned: bool) -> Bound:
        if call.pieces is not None:
            return PieceBuffer(call.pieces[1])
        flats = call.outputs
        if len(flats) == 1:
            return FlatBuffer(flats[0].elements, flats[0].octets)
        if aligned:
            return BlockBuffer([flat.elements for flat in flats])
        self._split = np.empty(sum(flat.elements.size for flat in flats), flats[0].elements.dtype)
        return FlatBuffer(self._split)

    def _bind_scratch(self, dtype: np.dtype[Any], count: int) -> Bound:
        spares = self._recipe.spares
        nbytes = count * dtype.itemsize
        if nbytes <= SPARE_BYTES:
            self._spare = spares.pop() if spares else FlatBuffer(np.empty(count, dtype))
            return self._spare
        self._scratch = self._backend.resources.pool.take(nbytes)
        return FlatBuffer(self._scratch.view(dtype))


def _bind_inputs(call: Call, aligned: bool) -> Bound:
    arrays: Sequence[Array] = [flat.elements for flat in call.inputs] if call.pieces is None else call.pieces[0]
    if type(call.op) is PremulSum or overlap(call):
        arrays = [array.copy() for array in arrays]
        if call.op is not None:
            for array in arrays:
                reduction.prepare(call.op, array)
    if call.pieces is not None:
        return PieceBuffer(arrays)
    if len(arrays) == 1:
        return FlatBuffer(arrays[0])
    return BlockBuffer(arrays) if aligned else FlatBuffer(np.concatenate(arrays))


def overlap(call: Call) -> bool:
    """Whether the caller's inputs share memory with the outputs, as in `reduce`: plans may write those first."""
    inputs, outputs = call.inputs, call.outputs
    if len(inputs) == 1 or len(outputs) == 1:
        return any(np.may_share_memory(source.elements, target.elements) for source in inputs for target in outputs)
    spans = []
    for flats in (inputs, outputs):
        for flat in flats:
            first = flat.elements.__array_interface__["data"][0]
            spans.append((first, first + flat.elements.nbytes, flats is outputs))
    return _cross(sorted(spans))


def _cross(spans: Sequence[tuple[int, int, bool]]) -> bool:
    """Whether two spans (first byte, end, kind) of different kinds overlap, of spans in order."""
    ends = [0, 0]
    for first, end, kind in spans:
        if first < end and first < ends[not kind]:
            return True
        ends[kind] = max(ends[kind], end)
    return False
