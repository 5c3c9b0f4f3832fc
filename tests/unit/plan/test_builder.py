"""What PlanBuilder makes wait for what."""

from __future__ import annotations

import random

import pytest

from asyncdist.plan.builder import PlanBuilder
from asyncdist.plan.steps import Buffer, Copy, Recv, RecvReduce, Reduce, Send, Slice


def out(offset, length):
    return Slice(Buffer.OUTPUT, offset, length)


def builder():
    return PlanBuilder("all_reduce", "test", 0, 4)


def test_a_read_waits_for_the_last_write_of_what_it_overlaps():
    plan = builder()
    first = plan.recv(1, out(0, 4))
    second = plan.recv(1, out(4, 4))
    plan.send(2, out(2, 4))
    plan.send(2, out(6, 2))
    plan.send(2, out(8, 1))
    steps = plan.build().steps
    assert [step.after for step in steps[2:]] == [(first, second), (second,), ()]


def test_a_write_waits_for_the_reads_since_the_last_write():
    plan = builder()
    write = plan.recv(1, out(0, 4))
    reads = [plan.send(2, out(0, 2)), plan.send(3, out(1, 3))]
    plan.recv(1, out(0, 4))
    assert plan.build().steps[3].after == tuple(reads)
    assert plan.build().steps[1].after == (write,)


def test_a_write_waits_for_the_last_write_where_nobody_read():
    plan = builder()
    first = plan.recv(1, out(0, 4))
    second = plan.recv_reduce(2, out(1, 2), incoming_left=True)
    third = plan.recv(3, out(0, 4))
    steps = plan.build().steps
    assert steps[second].after == (first,)
    assert steps[third].after == (second,)  # and through it for the first


def test_buffers_do_not_wait_for_each_other():
    plan = builder()
    plan.recv(1, out(0, 4))
    plan.recv(1, plan.scratch(4))
    plan.send(1, Slice(Buffer.INPUT, 0, 4))
    assert [step.after for step in plan.build().steps] == [(), (), ()]


def test_adjacent_slices_are_independent():
    plan = builder()
    for offset in (8, 0, 4):
        plan.recv(1, out(offset, 4))
    assert all(step.after == () for step in plan.build().steps)


def test_local_steps_read_their_source_and_write_their_target():
    plan = builder()
    incoming = plan.scratch(4)
    received = plan.recv(1, incoming)
    sent = plan.send(1, out(0, 4))
    reduced = plan.reduce(incoming, out(0, 4), source_left=True)
    copied = plan.copy(out(0, 4), out(4, 4))
    steps = plan.build().steps
    assert steps[reduced].after == (received, sent)
    assert steps[copied].after == (reduced,)
    assert isinstance(steps[reduced], Reduce)
    assert isinstance(steps[copied], Copy)


def test_reading_twice_needs_no_order():
    plan = builder()
    plan.send(1, out(0, 4))
    plan.send(2, out(0, 4))
    assert plan.build().steps[1].after == ()


def test_steps_without_elements_are_left_out_and_take_no_slot():
    plan = builder()
    assert plan.send(1, out(3, 0)) is None
    assert plan.recv(1, out(3, 0)) is None
    assert plan.recv_reduce(1, out(3, 0), incoming_left=True) is None
    assert plan.reduce(out(0, 0), out(3, 0), source_left=True) is None
    assert plan.copy(out(0, 0), out(3, 0)) is None
    assert plan.send(1, out(0, 1)) == 0
    assert [step.slot for step in plan.build().steps] == [0]


def test_signals_travel_without_elements():
    plan = builder()
    heard = plan.await_signal(3)
    told = plan.signal(1, after=(heard,))
    steps = plan.build().steps
    assert isinstance(steps[heard], Recv)
    assert isinstance(steps[told], Send)
    assert steps[told].source.length == steps[heard].target.length == 0
    assert steps[told].after == (heard,)


def test_slots_count_per_peer_and_direction():
    plan = builder()
    plan.send(1, out(0, 1))
    plan.send(1, out(1, 1))
    plan.send(2, out(0, 1))
    plan.recv(1, out(2, 1))
    plan.recv_reduce(1, out(3, 1), incoming_left=False)
    plan.signal(1)
    plan.send(3, out(0, 1), slot=7)
    assert [step.slot for step in plan.build().steps] == [0, 1, 0, 0, 1, 2, 7]


def test_explicit_waits_are_added_and_none_is_ignored():
    plan = builder()
    first = plan.recv(1, out(0, 1))
    plan.recv_reduce(1, out(5, 1), incoming_left=True, after=(first, None))
    assert plan.build().steps[1].after == (first,)


def test_scratch_is_counted():
    plan = builder()
    assert plan.scratch(3) == Slice(Buffer.SCRATCH, 0, 3)
    assert plan.scratch(4) == Slice(Buffer.SCRATCH, 3, 4)
    assert plan.build().scratch_count == 7


def test_operands_of_different_length_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        builder().copy(out(0, 2), out(4, 3))


def test_overlapping_operands_are_refused():
    with pytest.raises(ValueError, match="overlap"):
        builder().copy(out(0, 2), out(1, 2))


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_order_every_conflict_and_nothing_else_directly(seed):
    """Against the definition: earlier conflicting steps are reachable; direct waits are conflicts."""
    rng = random.Random(seed)
    plan = builder()
    for _ in range(60):
        piece = out(rng.randrange(30), rng.randrange(1, 12))
        kind = rng.randrange(4)
        if kind == 0:
            plan.send(1, piece)
        elif kind == 1:
            plan.recv(1, piece)
        elif kind == 2:
            plan.recv_reduce(1, piece, incoming_left=False)
        else:
            plan.copy(out(piece.end + rng.randrange(9), piece.length), piece)
    steps = plan.build().steps
    before = []
    for index, step in enumerate(steps):
        reachable = set(step.after).union(*(before[other] for other in step.after))
        before.append(reachable)
        conflicts = {other for other in range(index) if conflict(steps[other], step)}
        assert conflicts <= reachable
        assert set(step.after) <= conflicts


def accesses(step):
    if isinstance(step, Send):
        return [step.source], []
    if isinstance(step, Recv | RecvReduce):
        return [], [step.target]
    return [step.source], [step.target]


def conflict(first, second):
    first_reads, first_writes = accesses(first)
    second_reads, second_writes = accesses(second)
    pairs = [(a, b) for a in first_writes for b in second_reads + second_writes]
    pairs += [(a, b) for a in first_reads for b in second_writes]
    return any(a.overlaps(b) for a, b in pairs)


def test_thousands_of_chunks_cost_a_bisection_each():
    """Twice the chunks, about twice the segments: no step looks at more than its own."""
    plan = builder()
    for number in range(5000):
        plan.recv(1, out(number * 10, 10))
        plan.send(2, out(number * 10, 10))
    plan.recv(1, out(0, 50_000))
    steps = plan.build().steps
    assert len(steps[-1].after) == 5000
