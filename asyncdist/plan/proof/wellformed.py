"""What can be said of a plan without running it: form, hazards, and the symmetry it claims."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from asyncdist.plan.chunks import offsets
from asyncdist.plan.problem import EXCHANGES, REDUCTIONS, Problem
from asyncdist.plan.proof.symbols import PlanError, bits
from asyncdist.plan.steps import (
    Buffer,
    Copy,
    Fetch,
    FetchReduce,
    Plan,
    Publish,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Slice,
    Step,
    Symmetry,
)

__all__ = ["check_form", "check_hazards", "check_symmetry"]

NOBODY: Final = -1

MESSAGES: Final = (Send, Recv, RecvReduce)  # tuples: a union would be built anew at every isinstance
LOCALS: Final = (Copy, Reduce)
FETCHES: Final = (Fetch, FetchReduce)
FROM_PEERS: Final = (*MESSAGES, *FETCHES)
WRITE_ONLY: Final = (Recv, RecvReduce, *FETCHES)
"""Read no slice but the one they write, if that."""
READ_ONLY: Final = (Send, Publish)
REDUCING: Final = (RecvReduce, Reduce, FetchReduce)

NOWHERE: Final = (0, 0)
"""Start and end of no elements."""


def check_form(problem: Problem, rank: int, plan: Plan) -> None:
    """Raise PlanError unless every step is possible on `rank`'s buffers and keeps what the plan claims of blocks."""
    if (plan.collective, plan.rank, plan.world) != (problem.collective, rank, problem.world):
        raise PlanError(f"is the plan of {plan.collective} for rank {plan.rank} of {plan.world}")
    lengths = (problem.input_length(rank), problem.output_length(rank), plan.scratch_count)
    aligned = _alignment(problem, plan)
    may_be_empty = problem.collective == "barrier" or problem.private
    own_start, own_end = _own_place(problem, rank)
    for index, step in enumerate(plan.steps):
        if step.after and not 0 <= min(step.after) <= max(step.after) < index:
            raise PlanError(f"step {index} waits for {step.after}, not all of them before it")
        if isinstance(step, FROM_PEERS) and (not 0 <= step.peer < plan.world or step.peer == rank):
            raise PlanError(f"step {index} has peer {step.peer}")
        if isinstance(step, FETCHES) and min(step.item, step.offset) < 0:
            raise PlanError(f"step {index} fetches element {step.offset} of item {step.item}")
        for piece in _slices(step):
            buffer, offset, length = piece
            if offset < 0 or length < 0 or offset + length > lengths[buffer]:
                raise PlanError(f"step {index}: {piece} is outside of {lengths[buffer]} elements")
            if not length and not may_be_empty:
                raise PlanError(f"step {index} has no elements")
            if aligned[buffer] and length and not _within_block(aligned[buffer], piece):
                raise PlanError(f"step {index}: {piece} crosses a block boundary, though the plan is block-aligned")
        if isinstance(step, READ_ONLY):
            continue
        if isinstance(step, LOCALS) and step.source.length != step.target.length:
            raise PlanError(f"step {index}: {step.source} and {step.target} differ in length")
        if isinstance(step, LOCALS) and step.source.overlaps(step.target):
            raise PlanError(f"step {index}: {step.source} and {step.target} overlap")
        buffer, offset, length = step.target
        if buffer == Buffer.INPUT:
            raise PlanError(f"step {index} writes INPUT")
        if buffer == Buffer.OUTPUT and offset < own_end and own_start < offset + length:
            own = step.source if isinstance(step, Copy) else None
            if own is None or own.buffer != Buffer.INPUT or own.offset != offset - own_start:
                raise PlanError(f"step {index} writes the own block's place, which may be INPUT, other than from there")
    _check_items(plan)


def _check_items(plan: Plan) -> None:
    """Items are numbered in the order in which they are put out, each after the one before."""
    if not any(type(step) is Publish for step in plan.steps):
        return
    items = 0
    earlier: list[int] = []
    last = NOBODY
    for index, step in enumerate(plan.steps):
        before = 0
        for other in step.after:
            before |= earlier[other] | 1 << other
        earlier.append(before)
        if not isinstance(step, Publish):
            continue
        if step.item != items:
            raise PlanError(f"step {index} publishes item {step.item} where {items} is next")
        if items and not before >> last & 1:
            raise PlanError(f"step {index} publishes item {items} unordered with the one before, step {last}")
        items, last = items + 1, index
    if items and plan.outstanding_items < 1:
        raise PlanError(f"publishes {items} items, with memory for {plan.outstanding_items}")


def _own_place(problem: Problem, rank: int) -> tuple[int, int]:
    """Where in OUTPUT the rank's own block may be INPUT itself."""
    gathers = problem.collective in ("gather", "gather_uneven") and rank == problem.root
    if not gathers and problem.collective != "all_gather":
        return NOWHERE
    start = sum(problem.counts[:rank])
    return start, start + problem.counts[rank]


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
    after = bisect_right(starts, piece.offset)
    return after < len(starts) and piece.end <= starts[after]


def _slices(step: Step) -> tuple[Slice, ...]:
    """Slices a step touches; where it writes one, that is the last."""
    kind = type(step)
    if kind is Send or kind is Publish:
        return (step.source,)  # type: ignore[union-attr]  # told by its kind, which is quicker than isinstance
    if kind in WRITE_ONLY:
        return (step.target,)  # type: ignore[union-attr]
    return step.source, step.target  # type: ignore[union-attr]


def check_hazards(plan: Plan) -> None:
    """Raise PlanError unless conflicting steps have a path of `after` between them, whatever other ranks do.

    The elements are cut at every boundary any step uses; per cell it is enough to look at the last writer and the
    readers since, as those were found to be in order with everything before them. What is written must be of use:
    nothing is overwritten before it was read, nothing is left in SCRATCH unread, and where elements are only moved,
    OUTPUT is written once.
    """
    once = plan.collective not in REDUCTIONS
    cells = _cells(plan)
    writers = tuple([NOBODY] * len(cell) for cell in cells)
    readers = tuple([0] * len(cell) for cell in cells)
    earlier: list[int] = []
    for index, step in enumerate(plan.steps):
        before = 0
        for other in step.after:
            before |= earlier[other] | 1 << other
        earlier.append(before)
        kind = type(step)
        if kind not in WRITE_ONLY:
            source = step.source  # type: ignore[union-attr]
            buffer, offset, length = source
            cell = cells[buffer]
            for number in range(cell[offset], cell[offset + length]):
                writer = writers[buffer][number]
                if writer >= 0 and not before >> writer & 1:
                    raise PlanError(f"step {index} touches {source} unordered with step {writer}")
                readers[buffer][number] |= 1 << index
        if kind not in READ_ONLY:
            target = step.target  # type: ignore[union-attr]
            buffer, offset, length = target
            cell = cells[buffer]
            reads = kind in REDUCING
            for number in range(cell[offset], cell[offset + length]):
                writer, reading = writers[buffer][number], readers[buffer][number]
                if reading & ~before or (writer >= 0 and not before >> writer & 1):
                    others = reading | (1 << writer if writer >= 0 else 0)
                    raise PlanError(f"step {index} touches {target} unordered with steps {bits(others & ~before)}")
                if writer >= 0 and (not reading or (once and buffer == Buffer.OUTPUT)) and not reads:
                    raise PlanError(f"step {index} overwrites {target}, which step {writer} wrote in vain")
                writers[buffer][number], readers[buffer][number] = index, 0
    for writer, reading in zip(writers[Buffer.SCRATCH], readers[Buffer.SCRATCH], strict=True):
        if writer >= 0 and not reading:
            raise PlanError(f"what step {writer} writes to SCRATCH is never read")


def _cells(plan: Plan) -> tuple[dict[int, int], ...]:
    """By buffer: number of the cell that starts at each boundary."""
    edges: tuple[set[int], ...] = (set(), set(), set())
    for step in plan.steps:
        for buffer, offset, length in _slices(step):
            edges[buffer].update((offset, offset + length))
    return tuple({edge: number for number, edge in enumerate(sorted(buffer_edges))} for buffer_edges in edges)


def check_symmetry(plans: Sequence[Plan]) -> None:
    """Raise PlanError unless a claimed ROTATION holds: the same steps, lengths, slots and waits, rotated peers."""
    claimed = {plan.symmetry for plan in plans}
    if Symmetry.ROTATION not in claimed:
        return
    shape = [_shape(plans[0], step) for step in plans[0].steps]
    for plan in plans:
        if plan.symmetry is not Symmetry.ROTATION or [_shape(plan, step) for step in plan.steps] != shape:
            raise PlanError(f"rank {plan.rank}'s plan is not rank 0's rotated, though it says so")


def _shape(plan: Plan, step: Step) -> tuple[object, ...]:
    lengths = tuple((piece.buffer, piece.length) for piece in _slices(step))
    if isinstance(step, LOCALS):
        return type(step), lengths, step.after
    if isinstance(step, Publish):
        return type(step), lengths, step.after, step.item
    distance = (step.peer - plan.rank) % plan.world
    if isinstance(step, FETCHES):
        return type(step), lengths, step.after, step.item, step.offset, distance
    return type(step), lengths, step.after, step.slot, distance
