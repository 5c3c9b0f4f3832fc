"""Every kind of planted bug is found, and named. That every algorithm passes in every world is in test_prove.py."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from plan_proof.prove import exchange_problems
from plan_proof.verify import PlanError, verify

from asyncdist.plan.algorithms.registry import ALGORITHMS, algorithms, build, ordered_algorithms
from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.problem import BLOCK_COLLECTIVES, REDUCTIONS, Problem
from asyncdist.plan.steps import Buffer, Copy, Plan, Recv, RecvReduce, Reduce, Send, Slice, Symmetry

EVERY = [(collective, algorithm) for collective, table in ALGORITHMS.items() for algorithm in table]
STEPS = 600
"""Steps that a kind of mistake is planted in, of some thousands. test_mutants.py plants all kinds in all plans."""


def plans_of(collective, algorithm, world, count, root=0, chunk_length=4):
    problem = Problem.of(collective, world, count, root)
    return problem, [build(problem, algorithm, rank, chunk_length) for rank in range(world)]


def with_step(plans, rank, index, **changes):
    """The plans with one step of one rank changed, and no claim of symmetry that would give it away."""
    result = [replace(plan, symmetry=Symmetry.NONE) for plan in plans]
    steps = list(result[rank].steps)
    steps[index] = replace(steps[index], **changes)
    result[rank] = replace(result[rank], steps=tuple(steps))
    return result


def sample_count(collective, world, elements, blocks):
    if collective == "all_to_all_uneven":
        return (3,) * 2 * world
    return blocks if collective in BLOCK_COLLECTIVES else elements


SAMPLES = [
    plans_of(collective, algorithm, world, count, root)
    for collective, algorithm in EVERY
    for world, count, root in [
        (4, sample_count(collective, 4, 9, (3, 2, 6, 1)), 1),
        (5, sample_count(collective, 5, 23, 3), 3),
    ]
]


def every_step(choose=lambda plans, step: True):
    """Steps of all samples that `choose` takes, or a choice of them that changes only with the samples."""
    found = [
        (problem, plans, plan.rank, index, step)
        for problem, plans in SAMPLES
        for plan in plans
        for index, step in enumerate(plan.steps)
        if choose(plans, step)
    ]
    return found if len(found) <= STEPS else random.Random(1).sample(found, STEPS)


def name(step):
    return "source" if isinstance(step, Send) else "target"


def reachable(steps, start):
    """Steps that `start` waits for, directly or not."""
    found, todo = set(), list(start)
    while todo:
        index = todo.pop()
        if index not in found:
            found.add(index)
            todo.extend(steps[index].after)
    return found


def conflict(first, second):
    for piece, writes in accesses(first):
        for other, other_writes in accesses(second):
            if (writes or other_writes) and piece.overlaps(other):
                return True
    return False


def accesses(step):
    if isinstance(step, Send):
        return [(step.source, False)]
    if isinstance(step, Recv | RecvReduce):
        return [(step.target, True)]
    return [(step.source, False), (step.target, True)]


def test_a_dropped_dependency_is_found():
    found = 0
    for problem, plans, rank, index, step in every_step():
        steps = plans[rank].steps
        for dropped in step.after:
            rest = tuple(other for other in step.after if other != dropped)
            needed = dropped not in reachable(steps, rest) and conflict(steps[dropped], step)
            # of a barrier, 5 ranks hear some twice; and rank 0 need not have heard of the one that it tells
            told = getattr(steps[dropped], "peer", None) == getattr(step, "peer", -1)
            if needed or (problem.collective == "barrier" and problem.world == 4 and not told):
                with pytest.raises(PlanError, match=r"unordered|leaves the barrier"):
                    verify(problem, with_step(plans, rank, index, after=rest))
                found += 1
    assert found > 200


def test_a_shifted_offset_is_found():
    found = 0
    for problem, plans, rank, index, step in every_step():
        if problem.collective == "barrier":
            continue
        for field in {name(step)} | ({"source"} if isinstance(step, Reduce | Copy) else set()):
            piece = getattr(step, field)
            for shift in (-1, 1):
                moved = Slice(piece.buffer, piece.offset + shift, piece.length)
                with pytest.raises(PlanError):
                    verify(problem, with_step(plans, rank, index, **{field: moved}))
                found += 1
    assert found > 1000


def test_a_changed_length_is_found():
    for problem, plans, rank, index, step in every_step():
        piece = getattr(step, name(step))
        longer = Slice(piece.buffer, piece.offset, piece.length + 1)
        changed = with_step(plans, rank, index, **{name(step): longer})
        with pytest.raises(PlanError):
            verify(problem, changed)


def test_a_wrong_slot_is_found():
    for problem, plans, rank, index, step in every_step():
        if isinstance(step, Send | Recv | RecvReduce):
            with pytest.raises(PlanError, match=r"sent and not received|appears twice"):
                verify(problem, with_step(plans, rank, index, slot=step.slot + 1))


def test_swapped_slots_are_found():
    found = 0
    for problem, plans, rank, index, step in every_step():
        if not isinstance(step, Send) or problem.collective == "barrier":
            continue
        for other_index in range(index + 1, len(plans[rank].steps)):
            other = plans[rank].steps[other_index]
            if not isinstance(other, Send) or other.peer != step.peer or other.source == step.source:
                continue
            swapped = with_step(plans, rank, index, slot=other.slot)
            with pytest.raises(PlanError):
                verify(problem, with_step(swapped, rank, other_index, slot=step.slot))
            found += 1
    assert found > 50


def test_a_wrong_peer_is_found():
    for problem, plans, rank, index, step in every_step():
        if isinstance(step, Send | Recv | RecvReduce):
            for peer in {(step.peer + 1) % problem.world, rank, -1, problem.world} - {step.peer}:
                with pytest.raises(PlanError, match=r"has peer|sent and not received|appears twice"):
                    verify(problem, with_step(plans, rank, index, peer=peer))


def test_a_missing_step_is_found():
    for problem, plans, rank, index, _ in every_step():
        steps = [
            replace(step, after=tuple(other - (other > index) for other in step.after if other != index))
            for number, step in enumerate(plans[rank].steps)
            if number != index
        ]
        changed = [replace(plan, symmetry=Symmetry.NONE) for plan in plans]
        changed[rank] = replace(changed[rank], steps=tuple(steps))
        with pytest.raises(PlanError):
            verify(problem, changed)


def test_another_order_of_reduction_is_found_in_all_reduce():
    found = 0
    ordered = ("all_reduce", "direct"), ("all_reduce", "recursive_doubling")
    for problem, plans, rank, index, step in every_step(
        lambda plans, step: (plans[0].collective, plans[0].algorithm) in ordered and isinstance(step, Reduce)
    ):
        if step.target.buffer == Buffer.OUTPUT:
            changed = with_step(plans, rank, index, source_left=not step.source_left)
            with pytest.raises(PlanError, match="not reduced in rank order"):
                verify(problem, changed)
            with pytest.raises(PlanError, match="another order"):
                verify(problem, [replace(plan, ordered=False) for plan in changed])
            found += 1
    assert found > 10


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_swapped_operands_are_found_where_the_plan_claims_rank_order(collective):
    found = 0
    for problem, plans, rank, index, step in every_step(
        lambda plans, step: (
            plans[0].collective == collective
            and plans[0].algorithm in ordered_algorithms(collective)
            and isinstance(step, Reduce | RecvReduce)
        )
    ):
        field = "source_left" if isinstance(step, Reduce) else "incoming_left"
        with pytest.raises(PlanError, match=r"not reduced in rank order|has a contribution of"):
            verify(problem, with_step(plans, rank, index, **{field: not getattr(step, field)}))
        found += 1
    assert found > 10


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_ordered_algorithms_claim_it_in_every_world_and_for_every_root(collective):
    assert ordered_algorithms(collective)
    for algorithm in algorithms(collective):
        for world in range(1, 8):
            roots = range(world) if collective == "reduce" else (0,)
            claims = {
                build(Problem.of(collective, world, 9, root), algorithm, rank, 4).ordered
                for root in roots
                for rank in range(world)
            }
            assert claims == {True} if algorithm in ordered_algorithms(collective) else world < 2 or False in claims


def test_a_false_claim_of_rank_order_is_found():
    problem, plans = plans_of("reduce", "binomial_tree", 4, 9, root=1)
    with pytest.raises(PlanError, match="not reduced in rank order, though the plan says so"):
        verify(problem, [replace(plan, ordered=True) for plan in plans])


def test_a_scan_of_too_many_or_too_few_ranks_is_found():
    problem, plans = plans_of("scan", "chain", 3, 4)
    with pytest.raises(PlanError, match=r"rank 0: element 0 has a contribution of ranks \[1, 2\]"):
        # Everyone holds the whole sum.
        verify(
            Problem.of("scan", 3, 4),
            [
                replace(plan, collective="scan")
                for plan in (build(Problem.of("all_reduce", 3, 4), "direct", rank, 4) for rank in range(3))
            ],
        )
    with pytest.raises(PlanError, match=r"rank 1: element 0 lacks the contribution of ranks \[0\]"):
        verify(problem, [Plan("scan", "test", rank, 3, ()) for rank in range(3)])
    exscan = Problem.of("exscan", 3, 4)
    with pytest.raises(PlanError, match=r"rank 1: element 0 has a contribution of ranks \[1\]"):
        verify(exscan, [replace(plan, collective="exscan") for plan in plans])


def test_lengths_that_ranks_see_differently_are_found():
    """What verify takes one problem per rank for: rank 1 expects less from rank 0 than rank 0 sends."""
    problems = list(exchange_problems([[1, 5, 2], [0, 1, 3], [4, 0, 1]]))
    for algorithm in algorithms("all_to_all_uneven"):
        verify(problems, [build(problems[rank], algorithm, rank, 4) for rank in range(3)])
        for expected in (4, 0):
            wrong = problems.copy()
            wrong[1] = Problem.of("all_to_all_uneven", 3, (0, 1, 3, expected, 1, 0))
            with pytest.raises(PlanError, match=f"is 5 elements, {expected} are expected"):
                verify(wrong, [build(wrong[rank], algorithm, rank, 4) for rank in range(3)])


def test_a_block_for_somebody_else_is_found():
    problem, plans = plans_of("all_to_all", "pairwise", 3, 2)
    sends = [index for index, step in enumerate(plans[0].steps) if isinstance(step, Send)]
    first, second = (plans[0].steps[index].source for index in sends)
    swapped = with_step(with_step(plans, 0, sends[0], source=second), 0, sends[1], source=first)
    with pytest.raises(PlanError, match="ends with"):
        verify(problem, swapped)


def test_a_wrong_buffer_is_found():
    for problem, plans, rank, index, step in every_step():
        piece = getattr(step, name(step))
        wrong = set(Buffer) - {piece.buffer} if problem.collective != "barrier" else set()
        if isinstance(step, Send):
            wrong.discard(Buffer.INPUT)  # the own block, sent from its copy, is as good there
        for buffer in wrong:
            changed = with_step(plans, rank, index, **{name(step): Slice(buffer, piece.offset, piece.length)})
            with pytest.raises(PlanError):
                verify(problem, changed)


def test_waiting_for_a_later_step_is_found():
    problem, plans = plans_of("all_reduce", "ring", 3, 9)
    for after in ((0,), (1,), (-1,)):
        with pytest.raises(PlanError, match="not all of them before it"):
            verify(problem, with_step(plans, 1, 0, after=after))


def pair(first, second, collective="all_reduce", **changes):
    return [Plan(collective, "test", rank, 2, tuple(steps), **changes) for rank, steps in enumerate((first, second))]


def test_relying_on_buffered_sends_is_a_deadlock():
    """Both send first and receive into the same place after: right only if the transport stores a whole vector."""
    plans = []
    for rank in range(2):
        builder = PlanBuilder("all_reduce", "test", rank, 2)
        builder.send(1 - rank, Slice(Buffer.OUTPUT, 0, 8))
        builder.recv_reduce(1 - rank, Slice(Buffer.OUTPUT, 0, 8), incoming_left=rank == 1)
        plans.append(builder.build())
    with pytest.raises(PlanError, match="deadlock with 4 steps left"):
        verify(Problem.of("all_reduce", 2, 8), plans)


def test_everyone_receiving_first_is_a_deadlock():
    whole, scratch = Slice(Buffer.OUTPUT, 0, 8), Slice(Buffer.SCRATCH, 0, 8)
    steps = [
        [Recv(1 - rank, scratch, 0), Send(1 - rank, whole, 0, (0,)), Reduce(scratch, whole, rank == 1, (0, 1))]
        for rank in range(2)
    ]
    with pytest.raises(PlanError, match="deadlock"):
        verify(Problem.of("all_reduce", 2, 8), pair(*steps, scratch_count=8))


def test_a_contribution_twice_is_found():
    problem, plans = plans_of("all_reduce", "direct", 2, 4)
    steps = plans[0].steps
    again = replace(steps[-1], after=(len(steps) - 1,))
    plans[0] = replace(plans[0], steps=(*steps, again))
    with pytest.raises(PlanError, match="reduced twice"):
        verify(problem, plans)


def test_writing_input_is_found():
    own = Slice(Buffer.INPUT, 0, 2)
    plans = [Plan("reduce", "test", 0, 1, (Copy(Slice(Buffer.OUTPUT, 0, 2), own),))]
    with pytest.raises(PlanError, match="writes INPUT"):
        verify(Problem.of("reduce", 1, 2), plans)


def test_reading_what_nobody_wrote_is_found():
    plans = [Plan("reduce", "test", 0, 1, (Copy(Slice(Buffer.SCRATCH, 0, 2), Slice(Buffer.OUTPUT, 0, 2)),), 2)]
    with pytest.raises(PlanError, match="element 0 is read before it is written"):
        verify(Problem.of("reduce", 1, 2), plans)


def test_overlapping_operands_are_found():
    plans = [Plan("broadcast", "test", 0, 1, (Copy(Slice(Buffer.OUTPUT, 0, 2), Slice(Buffer.OUTPUT, 1, 2)),))]
    with pytest.raises(PlanError, match="overlap"):
        verify(Problem.of("broadcast", 1, 3), plans)


def test_touching_another_ranks_result_is_found():
    """reduce leaves the arrays of ranks other than the root alone: they have no OUTPUT."""
    problem, plans = plans_of("reduce", "linear", 2, 4)
    own = Slice(Buffer.INPUT, 0, 4)
    plans[1] = replace(plans[1], steps=(*plans[1].steps, Copy(own, Slice(Buffer.OUTPUT, 0, 4))))
    with pytest.raises(PlanError, match="outside of 0 elements"):
        verify(problem, plans)


def test_a_false_claim_of_block_alignment_is_found():
    problem, plans = plans_of("all_gather", "circulant", 4, 2)
    with pytest.raises(PlanError, match="crosses a block boundary"):
        verify(problem, [replace(plan, block_aligned=True) for plan in plans])


def test_a_false_claim_of_symmetry_is_found():
    problem, plans = plans_of("all_gather", "ring", 3, (1, 5, 1))
    with pytest.raises(PlanError, match="rotated"):
        verify(problem, [replace(plan, symmetry=Symmetry.ROTATION) for plan in plans])


def test_plans_of_something_else_are_found():
    problem, plans = plans_of("all_gather", "ring", 3, 2)
    with pytest.raises(PlanError, match="2 plans for a world of 3"):
        verify(problem, plans[:2])
    with pytest.raises(PlanError, match="is the plan of all_gather for rank 1 of 3"):
        verify(problem, [plans[1], plans[0], plans[2]])
    with pytest.raises(PlanError):
        verify(Problem.of("all_gather", 3, 3), plans)


def test_what_is_written_in_vain_is_found():
    own, result = Slice(Buffer.INPUT, 0, 2), Slice(Buffer.OUTPUT, 0, 2)
    problem = Problem.of("reduce", 1, 2)
    twice = (Copy(own, result), Copy(own, result, (0,)))
    with pytest.raises(PlanError, match=r"step 1 overwrites .* which step 0 wrote in vain"):
        verify(problem, [Plan("reduce", "test", 0, 1, twice)])
    unused = (Copy(own, Slice(Buffer.SCRATCH, 0, 2)), Copy(own, result))
    with pytest.raises(PlanError, match="step 0 writes to SCRATCH is never read"):
        verify(problem, [Plan("reduce", "test", 0, 1, unused, 2)])
    again = (Copy(own, result), Copy(result, Slice(Buffer.SCRATCH, 0, 2), (0,)), Copy(own, result, (1,)))
    with pytest.raises(PlanError, match="wrote in vain"):
        verify(Problem.of("scatter", 1, 2), [Plan("scatter", "test", 0, 1, again, 2)])


def test_writing_input_where_it_is_part_of_output_is_found():
    """The own block of all_gather may be its place in OUTPUT; then what comes through SCRATCH is a write to INPUT."""
    own, scratch, result = Slice(Buffer.INPUT, 0, 2), Slice(Buffer.SCRATCH, 0, 2), Slice(Buffer.OUTPUT, 0, 2)
    verify(Problem.of("all_gather", 1, 2), [Plan("all_gather", "test", 0, 1, (Copy(own, result),))])
    steps = (Copy(own, scratch), Copy(scratch, result, (0,)))
    with pytest.raises(PlanError, match="own block's place"):
        verify(Problem.of("all_gather", 1, 2), [Plan("all_gather", "test", 0, 1, steps, 2)])
