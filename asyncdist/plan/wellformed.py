"""What can be said of a plan without running it: form, hazards, and the symmetry it claims."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from asyncdist.plan.chunks import offsets
from asyncdist.plan.problem import EXCHANGES, Problem
from asyncdist.plan.steps import Buffer, Copy, Plan, Recv, RecvReduce, Reduce, Send, Slice, Step, Symmetry
from asyncdist.plan.symbols import PlanError, bits

__all__ = ["LOCALS", "MESSAGES", "RECEIVES", "check_form", "check_hazards", "check_symmetry", "slices_of"]

NOBODY: Final = -1

MESSAGES: Final = (Send, Recv, RecvReduce)  # tuples: a union would be built anew at every isinstance
RECEIVES: Final = (Recv, RecvReduce)
LOCALS: Final = (Copy, Reduce)


def check_form(problem: Problem, rank: int, plan: Plan) -> None:
    """Raise PlanError unless every step is possible on `rank`'s buffers and keeps what the plan claims of blocks."""
    if (plan.collective, plan.rank, plan.world) != (problem.collective, rank, problem.world):
        raise PlanError(f"is the plan of {plan.collective} for rank {plan.rank} of {plan.world}")
    lengths = (problem.input_length(rank), problem.output_length(rank), plan.scratch_count)
    aligned = _alignment(problem, plan)
    for index, step in enumerate(plan.steps):
        if step.after and not 0 <= min(step.after) <= max(step.after) < index:
            raise PlanError(f"step {index} waits for {step.after}, not all of them before it")
        if isinstance(step, MESSAGES) and (not 0 <= step.peer < plan.world or step.peer == rank):
            raise PlanError(f"step {index} has peer {step.peer}")
        slices = slices_of(step)
        for piece in slices:
            if piece.offset < 0 or piece.length < 0 or piece.end > lengths[piece.buffer]:
                raise PlanError(f"step {index}: {piece} is outside of {lengths[piece.buffer]} elements")
            if not piece.length and problem.collective != "barrier" and not problem.private:
                raise PlanError(f"step {index} has no elements")
            if piece.length and aligned[piece.buffer] and not _within_block(aligned[piece.buffer], piece):
                raise PlanError(f"step {index}: {piece} crosses a block boundary, though the plan is block-aligned")
        if isinstance(step, LOCALS) and step.source.length != step.target.length:
            raise PlanError(f"step {index}: {step.source} and {step.target} differ in length")
        if isinstance(step, LOCALS) and step.source.overlaps(step.target):
            raise PlanError(f"step {index}: {step.source} and {step.target} overlap")
        if not isinstance(step, Send) and step.target.buffer == Buffer.INPUT:
            raise PlanError(f"step {index} writes INPUT")


def _alignment(problem: Problem, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Block boundaries by buffer; empty where there are none to keep to."""
    if not plan.block_aligned:
        return (), (), ()
    if problem.collective in EXCHANGES:
        return offsets(problem.send_counts), offsets(problem.receive_counts), ()
    starts = offsets(problem.counts)
    if problem.collective in ("reduce_scatter", "scatter", "scatter_uneven"):
        return starts, (), ()
    return (), starts, ()


def _within_block(starts: tuple[int, ...], piece: Slice) -> bool:
    return piece.end <= starts[bisect_right(starts, piece.offset)]


def slices_of(step: Step) -> tuple[Slice, ...]:
    """Slices a step touches; where it writes one, that is the last."""
    if isinstance(step, Send):
        return (step.source,)
    if isinstance(step, RECEIVES):
        return (step.target,)
    return step.source, step.target


def check_hazards(plan: Plan) -> None:
    """Raise PlanError unless conflicting steps have a path of `after` between them, whatever other ranks do.

    The elements are cut at every boundary any step uses; per cell it is enough to look at the last writer and the
    readers since, as those were found to be in order with everything before them.
    """
    cells = _cells(plan)
    writers = tuple([NOBODY] * len(cell) for cell in cells)
    readers = tuple([0] * len(cell) for cell in cells)
    earlier: list[int] = []
    for index, step in enumerate(plan.steps):
        before = 0
        for other in step.after:
            before |= earlier[other] | 1 << other
        earlier.append(before)
        slices = slices_of(step)
        for piece in slices:
            if not piece.length:
                continue
            buffer = piece.buffer
            cell = cells[buffer]
            writing = piece is slices[-1] and not isinstance(step, Send)
            for number in range(cell[piece.offset], cell[piece.end]):
                writer, reading = writers[buffer][number], readers[buffer][number]
                if (writer != NOBODY and not before >> writer & 1) or (writing and reading & ~before):
                    others = reading if writing else 0
                    others |= 1 << writer if writer != NOBODY else 0
                    raise PlanError(f"step {index} touches {piece} unordered with steps {bits(others & ~before)}")
                if writing:
                    writers[buffer][number], readers[buffer][number] = index, 0
                else:
                    readers[buffer][number] |= 1 << index


def _cells(plan: Plan) -> tuple[dict[int, int], ...]:
    """By buffer: number of the cell that starts at each boundary."""
    edges: tuple[set[int], ...] = (set(), set(), set())
    for step in plan.steps:
        for piece in slices_of(step):
            edges[piece.buffer].update((piece.offset, piece.offset + piece.length))
    return tuple({edge: number for number, edge in enumerate(sorted(buffer_edges))} for buffer_edges in edges)


def check_symmetry(plans: Sequence[Plan]) -> None:
    """Raise PlanError unless a claimed ROTATION holds: the same steps, lengths, slots and waits, rotated peers."""
    if plans[0].symmetry is not Symmetry.ROTATION:
        return
    shape = [_shape(plans[0], step) for step in plans[0].steps]
    for plan in plans[1:]:
        if plan.symmetry is not Symmetry.ROTATION or [_shape(plan, step) for step in plan.steps] != shape:
            raise PlanError(f"rank {plan.rank}'s plan is not rank 0's rotated, though it says so")


def _shape(plan: Plan, step: Step) -> tuple[object, ...]:
    lengths = tuple((piece.buffer, piece.length) for piece in slices_of(step))
    if isinstance(step, LOCALS):
        return type(step), lengths, step.after
    return type(step), lengths, step.after, step.slot, (step.peer - plan.rank) % plan.world
