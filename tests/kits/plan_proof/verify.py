"""Proof of plans: runs all ranks' plans together on symbols and accepts only what is right in every possible order.

`verify` shows, for one problem and the plans of all its ranks:

1. Form: steps wait only for earlier steps, slices are within their buffers, INPUT is never written, not even where
   the own block's place in OUTPUT is INPUT itself.
2. Matching: every message is sent once and received once, with one length. Every item that is fetched is published,
   items in order, and every element of one is fetched by some rank.
3. Hazards: of two steps of a rank that touch the same elements, one of them writing, one waits for the other. So the
   result is the same in whatever order messages arrive.
4. No deadlock: no plan relies on buffering, so a send may be done only when it has been received. There may be memory
   for only as many items of each rank as the plan says (`Plan.outstanding_items`).
5. Data: nothing is read before it is written, operands of a reduction are the same elements of the vector, and the
   result has every rank's contribution exactly once (or, for moved blocks, exactly the right elements). Nothing is
   written in vain: it is read before it is overwritten, all of SCRATCH is, and moved elements are written once.
6. all_reduce: all ranks evaluate the same expression for an element, so results are bit-identical.
7. What the plan claims holds: a symmetry, block alignment, an order of reduction, and that items are shielded
   (`run`).

`verify_rotated` shows the same from rank 0's plan alone, for plans that are rotations of each other. It compares every
other rank's plan with rank 0's, renamed (`relabel`): so 1, 3 and 7 hold for it as well. Then it runs rank 0's plan for
all ranks in step (`run.RotatedRun`). That is one possible execution of all ranks, and by 3 as good as any.
Plans are made one at a time and thrown away, so that p ranks with p steps each take memory for p steps.

Work is proportional to the steps, whatever the element counts. `prove` says what is proven in which worlds, and how;
`make prove` does it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from asyncdist.plan.chunks import offsets
from asyncdist.plan.problem import EXCHANGES, REDUCTIONS, Problem
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
from plan_proof.relabel import Relabelling, bases_shift, may_rotate
from plan_proof.run import RotatedRun, Run
from plan_proof.symbols import PlanError, Values, bits, merged

__all__ = ["PlanError", "verify", "verify_rotated"]


def verify(problem: Problem | Sequence[Problem], plans: Sequence[Plan]) -> None:
    """Raise PlanError unless `plans` (of rank 0, 1, ...) together solve `problem`.

    Where a rank knows only its own lengths (`Problem.private`), give every rank's problem.
    """
    problems = [problem] * problem.world if isinstance(problem, Problem) else list(problem)
    if not len(plans) == len(problems) == problems[0].world:
        raise PlanError(f"{len(plans)} plans for a world of {problems[0].world}")
    plans = [  # repeated ones worked out, once
        plan if isinstance(plan.steps, tuple) else replace(plan, steps=tuple(plan.steps)) for plan in plans
    ]
    for rank, plan in enumerate(plans):
        _check_alone(problems[rank], rank, plan)
    try:
        _check_run(Run(problems, plans))
        check_symmetry(plans)
    except PlanError as error:
        raise PlanError(f"{_title(plans[0])} of {problems[0]}: {error}") from None


def verify_rotated(problem: Problem, plan_of: Callable[[int], Plan]) -> bool:
    """Prove the plans `plan_of(rank)` from rank 0's alone; False, and nothing shown, where they are no rotations.

    Raises PlanError where they are, and do not solve `problem`.
    """
    if not may_rotate(problem):
        return False
    first = plan_of(0)
    if any(isinstance(step, Publish | Fetch | FetchReduce) for step in first.steps):
        return False  # the items of all ranks are looked at together
    if first.symmetry is not Symmetry.ROTATION or (first.ordered and problem.collective in REDUCTIONS):
        return False
    if not all(Relabelling(problem, 0, rank).maps(first, plan_of(rank)) for rank in range(1, problem.world)):
        return False
    _check_alone(problem, 0, first)
    try:
        _check_run(RotatedRun(problem, first))
    except PlanError as error:
        raise PlanError(f"{_title(first)} of {problem}, on every rank as on 0: {error}") from None
    return True


def _check_alone(problem: Problem, rank: int, plan: Plan) -> None:
    try:
        check_form(problem, rank, plan)
        check_hazards(plan)
    except PlanError as error:
        raise PlanError(f"{_title(plan)} of {problem}, rank {rank}: {error}") from None


def _check_run(run: Run) -> None:
    run.execute()
    check_goal(run)


def _title(plan: Plan) -> str:
    return f"{plan.collective}:{plan.algorithm}"


def check_goal(run: Run) -> None:
    """Raise PlanError unless every rank that ran ends with what the collective promises it."""
    collective = run.problems[0].collective
    if collective == "barrier":
        _check_barrier(run)
        return
    results = [
        memory[Buffer.OUTPUT].read(0, problem.output_length(rank))
        for rank, (problem, memory) in enumerate(zip(run.problems, run.memory, strict=True))
    ]
    if collective in REDUCTIONS:
        for rank, runs in enumerate(results):
            _check_operands(run, rank, runs)
        if collective == "all_reduce":
            _check_alike(run, [merged(runs) for runs in results])
        return
    for rank, (runs, expected) in enumerate(zip(results, _moved(run), strict=True)):
        got, wanted = merged(runs), merged(expected)
        if got != wanted:
            raise PlanError(f"rank {rank} ends with {got[:4]}... instead of {wanted[:4]}...")


def _check_barrier(run: Run) -> None:
    everyone = run.expressions.everyone
    for rank, (first, last) in enumerate(pairwise(run.bases)):
        heard = 1 << rank
        for number in range(first, last):
            heard |= run.heard[number]
        if heard != everyone:
            raise PlanError(f"rank {rank} leaves the barrier before {bits(everyone & ~heard)}")


def _check_operands(run: Run, rank: int, runs: Sequence[Values]) -> None:
    """Whether the elements have their places and the contributions they must have, in the claimed order."""
    problem, expressions = run.problems[rank], run.expressions
    position = sum(problem.counts[:rank]) if problem.collective == "reduce_scatter" else 0
    wanted = expressions.everyone
    if problem.collective == "scan" or (problem.collective == "exscan" and not rank):
        wanted = (2 << rank) - 1  # exscan leaves rank 0's data as it is
    elif problem.collective == "exscan":
        wanted = (1 << rank) - 1
    for length, expression, base in runs:
        if base != position:
            raise PlanError(f"rank {rank} has element {base} where {position} belongs")
        ranks = expressions.ranks(expression)
        if wanted & ~ranks:
            raise PlanError(f"rank {rank}: element {base} lacks the contribution of ranks {bits(wanted & ~ranks)}")
        if ranks & ~wanted:
            raise PlanError(f"rank {rank}: element {base} has a contribution of ranks {bits(ranks & ~wanted)}")
        if run.plans[rank].ordered and not expressions.ordered(expression):
            raise PlanError(f"rank {rank}: element {base} is not reduced in rank order, though the plan says so")
        position += length


def _check_alike(run: Run, results: Sequence[list[Values]]) -> None:
    """Whether all ranks evaluate the same expression for each element, so that results have the same bits.

    Where rank 0 ran for all: rank s has in block b what rank 0 has in block b - s, renamed by s. All ranks have the
    same in each block if and only if rank 0 has in block b what it has in block 0, renamed by b.
    """
    if isinstance(run, RotatedRun):
        block = bases_shift(run.problems[0])
        own = run.memory[0][Buffer.OUTPUT]
        first = own.read(0, block)
        for rank in range(1, run.problems[0].world):
            if merged(own.read(rank * block, block)) != merged(run.renamed(first, rank)):
                raise PlanError(f"block {rank} is reduced in another order on rank 0 than on rank {rank}")
        return
    for rank, result in enumerate(results):
        if result != results[0]:
            raise PlanError(f"rank {rank} reduces in another order than rank 0")


def _moved(run: Run) -> Iterator[list[Values]]:
    """What each rank's OUTPUT must hold, of a collective that moves elements."""
    problem = run.problems[0]
    collective, root = problem.collective, problem.root
    sent = [offsets(sender.send_counts) for sender in run.problems if collective in EXCHANGES]
    if isinstance(run, RotatedRun):
        sent = sent * problem.world
    for rank, own in enumerate(run.problems):
        if collective in EXCHANGES:
            places = [starts[rank : rank + 2] for starts in sent]
            yield [(end - start, source, start) for source, (start, end) in enumerate(places)]
        elif collective == "broadcast":
            yield [(problem.total, root, 0)]
        elif collective in ("scatter", "scatter_uneven"):
            counts = run.problems[root].counts
            yield [(counts[rank], root, sum(counts[:rank]))]
        elif collective == "all_gather" or rank == root:
            yield [(count, source, 0) for source, count in enumerate(own.counts)]
        else:
            yield []


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
    last = NOBODY
    for index, (step, before) in enumerate(zip(plan.steps, _before(plan), strict=True)):
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
    for index, (step, before) in enumerate(zip(plan.steps, _before(plan), strict=True)):
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


def _before(plan: Plan) -> Iterator[int]:
    """Yield, as bits for each step, the steps that are done before it begins."""
    earlier: list[int] = []
    for step in plan.steps:
        before = 0
        for other in step.after:
            before |= earlier[other] | 1 << other
        earlier.append(before)
        yield before


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
