"""The `aio` backend: collectives on host arrays, as plans over the mesh."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from asyncdist.arrays import Array, Flat
from asyncdist.backend.base import GroupBackend
from asyncdist.backend.call import Call
from asyncdist.errors import CollectiveMismatchError
from asyncdist.executor import reduction
from asyncdist.executor.buffers import NO_BUFFER, BlockBuffer, Bound, FlatBuffer
from asyncdist.executor.program import Program
from asyncdist.executor.runner import Execution, Kernel, run_sliced
from asyncdist.executor.scratch import ScratchPool
from asyncdist.plan.selector import plan_for, plan_id
from asyncdist.reduce_op import PremulSum, ReduceOp
from asyncdist.transport.frame import key_prefix
from asyncdist.transport.mesh import Mesh
from asyncdist.transport.peer import PeerCore

__all__ = ["AioBackend"]

_REFUSED: Final = CollectiveMismatchError("a rank refused the operation")

PROGRAM_CACHE: Final = 256
"""Programs kept per group: more than the shapes a training step uses, few enough to stay below some megabytes."""


class AioBackend(GroupBackend):
    """Collectives of one group on host arrays."""

    name: ClassVar[str] = "aio"

    def __init__(
        self,
        mesh: Mesh,
        group_id: int,
        ranks: tuple[int, ...],
        rank: int,
        *,
        loop: asyncio.AbstractEventLoop,
        pool: ScratchPool,
        overrides: dict[str, str],
    ) -> None:
        super().__init__(mesh, group_id, ranks, rank)
        self._mesh = mesh
        self._loop = loop
        self._pool = pool
        self._overrides = overrides
        self._executions: dict[tuple[int, int], Execution] = {}
        self._programs: OrderedDict[tuple[Any, ...], tuple[Program, int]] = OrderedDict()
        self._peers: list[PeerCore | None] = [None] * len(ranks)
        self._kernels: dict[tuple[Any, np.dtype[Any]], Kernel] = {}

    def start(self, call: Call, tag: int, sequence: int, on_end: Callable[[BaseException | None], None]) -> None:
        """Begin `call`."""
        program, fingerprint = self._program(call)
        if program.peer_ranks:
            self._meet(program.peer_ranks)
        binding = _Binding(call, program, self._pool)
        key = (tag, sequence)

        def done(execution: Execution, error: BaseException | None) -> None:
            if error is not None:
                self.drop(tag, sequence)
                on_end(error)
            else:
                binding.finish(self._loop, len(self.ranks), lambda: self._executions.get(key) is execution, deliver)

        def deliver() -> None:
            del self._executions[key]
            on_end(None)

        execution = self._executions[key] = Execution(
            self._loop,
            program,
            binding.buffers,
            self._peers,
            key_prefix(self.group_id, tag, sequence),
            fingerprint,
            call.dtype.itemsize,
            self._kernel(call),
            self._pool,
            done,
        )
        if type(call.op) is PremulSum and call.inputs == ():
            self._premultiply(call, execution, key)
        else:
            execution.start()

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """Global ranks an operation under way has not heard from."""
        execution = self._executions.get((tag, sequence))
        return () if execution is None else tuple(self.ranks[rank] for rank in execution.waiting_for())

    def abort(self, error: BaseException) -> None:
        """Forget every operation and refuse later messages."""
        self._mesh.drop_group(key_prefix(self.group_id, 0, 0)[:8], error)
        executions = list(self._executions.values())
        self._executions.clear()
        for execution in executions:
            execution.stop()

    def drop(self, tag: int, sequence: int) -> None:
        """Forget one operation."""
        execution = self._executions.pop((tag, sequence), None)
        if execution is not None:
            self._mesh.drop_group(key_prefix(self.group_id, tag, sequence), _REFUSED)
            execution.stop()

    def _premultiply(self, call: Call, execution: Execution, key: tuple[int, int]) -> None:
        """PREMUL_SUM in place: scale our own contribution first, then start."""
        elements = call.outputs[0].elements

        def scale(start: int, stop: int) -> None:
            reduction.prepare(call.op, elements[start:stop])  # type: ignore[arg-type]

        def begin() -> None:
            if self._executions.get(key) is execution:
                execution.start()

        run_sliced(self._loop, elements.size, elements.itemsize, scale, begin)

    def _kernel(self, call: Call) -> Kernel | None:
        if call.op is None:
            return None
        op = ReduceOp.SUM if type(call.op) is PremulSum else call.op
        key = (op, call.dtype)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = reduction.kernel(op, call.dtype)
        return kernel

    def _program(self, call: Call) -> tuple[Program, int]:
        key = (call.collective, call.counts, call.dtype, call.root, call.op)
        cached = self._programs.get(key)
        if cached is not None:
            self._programs.move_to_end(key)
            return cached
        plan = plan_for(
            call.collective,
            self.rank,
            len(self.ranks),
            call.counts,
            call.dtype.itemsize,
            root=call.root,
            algorithm=self._overrides.get(call.collective),
        )
        fingerprint = plan_id(
            call.collective,
            plan.algorithm,
            plan.world,
            call.counts,
            call.root,
            f"{call.dtype.name} {call.op!r}",
        )
        cached = self._programs[key] = (Program(plan), fingerprint)
        if len(self._programs) > PROGRAM_CACHE:
            self._programs.popitem(last=False)
        return cached

    def _meet(self, peers: tuple[int, ...]) -> None:
        known = self._peers
        unknown = [rank for rank in peers if known[rank] is None]
        if unknown:
            self._mesh.connect([self.ranks[rank] for rank in unknown])
            for rank in unknown:
                known[rank] = self._mesh.peer(self.ranks[rank])


class _Binding:
    """The arrays of one call as a plan's buffers, and what remains to be done with them at the end."""

    __slots__ = ("_call", "_pool", "_scratch", "_split", "buffers")

    def __init__(self, call: Call, program: Program, pool: ScratchPool) -> None:
        self._call = call
        self._pool = pool
        self._split: Array | None = None
        self._scratch: Array | None = None
        aligned = program.plan.block_aligned
        scratch_count = program.plan.scratch_count
        scratch = NO_BUFFER
        if scratch_count:
            nbytes = scratch_count * call.dtype.itemsize
            self._scratch = pool.take(nbytes)
            scratch = FlatBuffer(self._scratch[:nbytes].view(call.dtype))
        self.buffers: tuple[Bound, Bound, Bound] = (
            self._bind_inputs(call, aligned),
            self._bind_outputs(call.outputs, aligned),
            scratch,
        )

    def _bind_inputs(self, call: Call, aligned: bool) -> Bound:
        flats: Sequence[Flat] = call.inputs
        if not flats:
            return NO_BUFFER
        arrays = [flat.elements for flat in flats]
        if type(call.op) is PremulSum or _overlap(call):
            arrays = [array.copy() for array in arrays]
            if call.op is not None:
                for array in arrays:
                    reduction.prepare(call.op, array)
        if len(arrays) == 1:
            return FlatBuffer(arrays[0])
        return BlockBuffer(arrays) if aligned else FlatBuffer(np.concatenate(arrays))

    def _bind_outputs(self, flats: Sequence[Flat], aligned: bool) -> Bound:
        if not flats:
            return NO_BUFFER
        if len(flats) == 1:
            return FlatBuffer(flats[0].elements, flats[0].octets)
        if aligned:
            return BlockBuffer([flat.elements for flat in flats])
        self._split = np.empty(sum(flat.elements.size for flat in flats), flats[0].elements.dtype)
        return FlatBuffer(self._split)

    def finish(
        self, loop: asyncio.AbstractEventLoop, world: int, wanted: Callable[[], bool], then: Callable[[], None]
    ) -> None:
        """Bring results to where the caller expects them, then call `then`; stop once they are not `wanted`."""
        call = self._call
        if self._scratch is not None:
            self._pool.give(self._scratch)
        if call.op is ReduceOp.AVG and call.finishes:
            elements = call.outputs[0].elements

            def divide(start: int, stop: int) -> None:
                if wanted():
                    reduction.finish(ReduceOp.AVG, elements[start:stop], world)

            def deliver() -> None:
                if wanted():
                    self._deliver(then)

            run_sliced(loop, elements.size, elements.itemsize, divide, deliver)
        else:
            self._deliver(then)

    def _deliver(self, then: Callable[[], None]) -> None:
        start = 0
        for flat in self._call.outputs:
            if self._split is not None:
                flat.elements[...] = self._split[start : start + flat.elements.size]
                start += flat.elements.size
            flat.write_back()
        then()


def _overlap(call: Call) -> bool:
    """Whether the caller's inputs share memory with the outputs, as in `reduce`: plans may write those first."""
    return any(
        np.may_share_memory(source.elements, target.elements) for source in call.inputs for target in call.outputs
    )
