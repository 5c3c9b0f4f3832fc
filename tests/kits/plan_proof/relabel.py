"""Relabelling: ranks renamed by rotation, and whether one plan is another plan, renamed.

Rotation by s renames rank k to k + s (modulo the world). What belongs to ranks is renamed with them: peers, the root,
and the blocks of vectors that have one per rank. Plans solve a problem if and only if the renamed plans solve the
renamed problem, as nothing in a plan depends on what a rank is called. The claim that operands are reduced in rank
order does: a plan that makes it is never another plan, renamed.

A comparison costs a fraction of a proof. It saves two kinds of proof:

- The same problem, all ranks: if rank s's plan is rank 0's renamed by s, for every s, it is enough to run rank 0.
- Another root: if the plans for root t are those for root 0 renamed by t, they need no proof of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Final

from asyncdist.plan.chunks import offsets, partition
from asyncdist.plan.problem import BLOCK_COLLECTIVES, REDUCTIONS, ROOTED, Problem
from asyncdist.plan.steps import Buffer, Copy, Fetch, FetchReduce, Plan, Publish, RecvReduce, Reduce, Send, Slice, Step

_ROTATING: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

ELSEWHERE: Final = -1
"""Where a slice goes that is not one slice after renaming, since it crosses the end of the vector."""


def _block_layout(problem: Problem, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of the blocks that INPUT and OUTPUT of `rank` have, one per rank; empty where there are none."""
    collective = problem.collective
    if collective == "all_to_all":
        return problem.send_counts, problem.receive_counts
    if collective == "all_reduce" and problem.total % problem.world == 0:
        return (), partition(problem.total, problem.world)
    if collective == "all_gather" or (collective == "gather" and rank == problem.root):
        return (), problem.counts
    if collective == "reduce_scatter" or (collective == "scatter" and rank == problem.root):
        return problem.counts, ()
    return (), ()


def may_rotate(problem: Problem) -> bool:
    """Whether the problem stays the same whatever ranks are called, so that plans may be rotations of each other."""
    if problem.private or problem.collective in ROOTED or problem.collective not in _ROTATING:
        return False
    return problem.even and problem.total % problem.world == 0


def bases_shift(problem: Problem) -> int:
    """By how many elements the ranks' own data move when rank k becomes k + 1; of a problem that may rotate."""
    if problem.collective == "all_reduce":
        return problem.total // problem.world
    return problem.counts[0] if problem.collective in ("reduce_scatter", "all_to_all") else 0


def rotated_problem(problem: Problem, shift: int) -> Problem:
    """`problem` after renaming rank k to k + shift."""
    world = problem.world
    counts = problem.counts
    if problem.collective in BLOCK_COLLECTIVES:
        counts = tuple(counts[(rank - shift) % world] for rank in range(world))
    root = (problem.root + shift) % world if problem.collective in ROOTED else 0
    return problem._replace(counts=counts, root=root)


class Relabelling:
    """Renaming of rank k to k + shift, applied to `rank`'s plan of a problem."""

    def __init__(self, problem: Problem, rank: int, shift: int) -> None:
        self._world = problem.world
        self._rank = rank
        self._shift = shift
        # all_reduce's blocks are the algorithm's own affair: where they have one length it may rotate them or not
        self._layouts = [_Rotated(counts, shift) if counts else None for counts in _block_layout(problem, rank)]

    def maps(self, plan: Plan, other: Plan) -> bool:
        """Whether `other` is `plan` renamed: the same steps, waits and slots, with peers and blocks rotated."""
        world, shift = self._world, self._shift
        if other.ordered and other.collective in REDUCTIONS:
            return False
        if (other.rank, other.world, other.collective) != ((plan.rank + shift) % world, world, plan.collective):
            return False
        claims = (plan.scratch_count, plan.symmetry, plan.block_aligned, plan.outstanding_items)
        if (other.scratch_count, other.symmetry, other.block_aligned, other.outstanding_items) != claims:
            return False
        if len(plan.steps) != len(other.steps):
            return False
        return all(map(self._same, plan.steps, other.steps))

    def _same(self, step: Step, other: Any) -> bool:
        kind: object = type(step)
        if kind is not type(other) or step.after != other.after:  # of one kind from here on, which no checker sees
            return False
        if isinstance(step, Copy):
            return self._moves(step.source, other.source) and self._moves(step.target, other.target)
        if isinstance(step, Reduce):
            alike = step.source_left == other.source_left
            return alike and self._moves(step.source, other.source) and self._moves(step.target, other.target)
        if isinstance(step, Publish):
            alike = (step.item, step.shielded) == (other.item, other.shielded)
            return alike and self._moves(step.source, other.source)
        if (step.peer + self._shift) % self._world != other.peer:
            return False
        if isinstance(step, Fetch | FetchReduce):
            if (step.item, step.offset) != (other.item, other.offset):
                return False
            if isinstance(step, FetchReduce) and step.item_left != other.item_left:
                return False
            return self._moves(step.target, other.target)
        if step.slot != other.slot:
            return False
        if isinstance(step, Send):
            return self._moves(step.source, other.source)
        if isinstance(step, RecvReduce) and step.incoming_left != other.incoming_left:
            return False
        return self._moves(step.target, other.target)

    def _moves(self, piece: Slice, other: Slice) -> bool:
        buffer, offset, length = piece
        layout = None if buffer == Buffer.SCRATCH else self._layouts[buffer]
        if layout is not None and length:
            offset = layout.place(offset, length)
        return other == (buffer, offset, length)


class _Rotated:
    """Blocks that lie one behind another, in the order of ranks, before and after renaming."""

    def __init__(self, counts: tuple[int, ...], shift: int) -> None:
        self._world = len(counts)
        self._shift = shift
        self._total = sum(counts)
        self._even = min(counts) == max(counts)
        self._moved = counts[0] * shift
        self._starts = offsets(counts)
        self._new_starts = offsets([counts[(rank - shift) % self._world] for rank in range(self._world)])

    def place(self, offset: int, length: int) -> int:
        """Return where the slice from `offset` on goes, or ELSEWHERE."""
        if self._even:
            new = (offset + self._moved) % self._total
            return new if new + length <= self._total else ELSEWHERE
        first = bisect_right(self._starts, offset) - 1
        last = bisect_right(self._starts, offset + length - 1) - 1
        wraps = first + self._shift >= self._world
        if wraps != (last + self._shift >= self._world):
            return ELSEWHERE
        return self._new_starts[(first + self._shift) % self._world] + offset - self._starts[first]
