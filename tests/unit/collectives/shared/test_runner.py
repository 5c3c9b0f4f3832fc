"""The operations of a lane on several ranks in one process: right results whatever the order, in bounded turns.

Inline operations, items read where they lie, and every kind of trouble, told to whom it concerns.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import numpy as np
import pytest
from shared_lane_kit import CHUNK_LENGTH, POOL_BYTES, Execution, Rank, all_reduce, broadcast, make, settle, turn

from asyncdist.arrays.host import Flat
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.shared import runner as shared_part
from asyncdist.collectives.shared.inline import InlineOperation, InlineRecipe
from asyncdist.collectives.shared.items import Items
from asyncdist.collectives.shared.layout import (
    ABSENT,
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    DESCRIPTORS_AT,
    LANE_HEAD_BYTES,
    RECORDS,
    SKIPPED,
    Needs,
)
from asyncdist.collectives.shared.runner import PART_BYTES, TURN_BYTES, ZCOPY_NEWS, Exposed
from asyncdist.errors import CollectiveMismatchError, PeerLostError
from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.problem import Problem


@pytest.mark.parametrize("seed", range(25))
def test_random_programs_end_right_without_a_recheck(seed: int) -> None:
    """Operations of all sizes, given up on all ranks here and there; only rings move anything."""
    rng = random.Random(seed)
    ranks, _ = make(rng.randint(2, 5))
    calls: list[tuple[str, int, int]] = []
    for _ in range(rng.randint(5, 150)):
        kind = rng.choice(("all_reduce", "all_reduce", "broadcast", "message", "refused"))
        calls.append((kind, rng.choice((1, 10, 999, 5000, 200_000)), rng.randrange(len(ranks))))
    started: list[list[Execution | None]] = [[] for _ in ranks]
    while any(len(entries) < len(calls) for entries in started) or any(rank.loop.ready for rank in ranks):
        rank = rng.choice(ranks)
        mine = started[rank.index]
        if len(mine) < len(calls) and rng.random() < 0.3:
            number = len(mine)
            kind, count, root = calls[number]
            if kind == "message":
                rank.lane.add(5)
                rank.lane.flush()
                mine.append(None)
            elif kind == "refused" and rank.index == root:
                rank.lane.add(SKIPPED)
                rank.lane.flush()
                mine.append(None)
            elif kind == "broadcast":
                mine.append(broadcast(rank, count, root, number).start(number))
            else:
                mine.append(all_reduce(rank, count, rank.index + number).start(number))
                if kind == "refused" and rng.random() < 0.5:
                    mine[-1].part.end()  # type: ignore[union-attr]
        else:
            rank.loop.run_one()
        for index, (kind, _, root) in enumerate(calls):  # news of refusals travels another way
            if kind == "refused" and len(started[root]) > index:
                for entries in started:
                    if len(entries) > index and entries[index] is not None and rng.random() < 0.1:
                        entries[index].part.end()  # type: ignore[union-attr]
    for entries in started:
        for (kind, _, _), execution in zip(calls, entries, strict=True):
            if kind == "refused" and execution is not None:
                execution.part.end()
    settle(ranks, rng)
    total = len(ranks) * (len(ranks) - 1) // 2
    for number, (kind, _, _) in enumerate(calls):
        for entries in started:
            execution = entries[number]
            if execution is None or kind == "refused":
                continue
            assert execution.done, f"operation {number} of {len(calls)}, {kind}, was left behind"
            expected = number if kind == "broadcast" else total + number * len(ranks)
            assert (execution.arrays[1] == expected).all()
    assert not any(rank.faults for rank in ranks)


def test_no_turn_moves_much_more_than_its_bytes() -> None:
    ranks, _ = make(3)
    count = 4 << 20
    works = [all_reduce(rank, count, 1) for rank in ranks]
    for work in works:
        work.start()
        assert work.rank.lane.moved <= TURN_BYTES + (256 << 10)
    settle(ranks)
    assert all(work.done for work in works)
    assert all(rank.most <= TURN_BYTES + (256 << 10) for rank in ranks)


def test_a_step_done_outside_of_a_turn_is_told_to_the_others() -> None:
    """A reduction in slices ends in a callback of its own, and what follows may be a publication."""
    ranks, _ = make(2)
    reader = broadcast(ranks[1], 10, 0, 0).start()
    root = broadcast(ranks[0], 10, 0, 7)
    root.part = ranks[0].lane.add(1, root.program, root)  # type: ignore[arg-type]
    ranks[0].lane.flush()
    settle(ranks)
    root.advance(list(root.program.first_steps(itemsize=1)))
    settle(ranks)
    assert root.done
    assert reader.done


def test_more_operations_than_records_wait_their_turn() -> None:
    ranks, _ = make(2)
    first = [all_reduce(ranks[0], 10, number).start() for number in range(3 * RECORDS)]
    settle(ranks)
    second = [all_reduce(ranks[1], 10, number).start() for number in range(3 * RECORDS)]
    settle(ranks)
    assert all(work.done for work in first + second)
    assert [int(work.arrays[1][0]) for work in first] == [2 * number for number in range(3 * RECORDS)]


async def test_it_runs_on_a_real_loop_too() -> None:
    ranks, _ = make(2)
    for rank in ranks:
        rank.lane._loop = asyncio.get_running_loop()
    works = [all_reduce(rank, 100_000, 1).start() for rank in ranks]
    while not all(work.done for work in works):
        for rank in ranks:
            rank.look()
        await asyncio.sleep(0)
    assert (works[0].arrays[1] == 2).all()


class Backend:
    """Knows the operations that are under way."""

    def __init__(self) -> None:
        self.running: dict[tuple[int, int], Any] = {}

    def drop(self, tag: int, sequence: int) -> None:
        raise AssertionError("none fails")

    def go_on_in_steps(self, operation: InlineOperation) -> None:
        raise AssertionError("none has items")


class Small(InlineOperation):
    """One reduction to rank 0, inline."""

    def __init__(self, rank: Rank) -> None:
        backend, array = Backend(), np.full(1, 7, np.uint8)
        call = Call("reduce", array.dtype, 1, (Flat(array, writable=False),), (), None)
        work = CollectiveWork(cast("asyncio.AbstractEventLoop", rank.loop), "reduce", 1, 0, 0, None)
        backend.running[work.key] = self
        self.over = False
        super().__init__(backend, rank.lane.inline, RECIPES[rank.index], call, work, self.ended)
        rank.lane.inline.add(self)

    def ended(self, work: CollectiveWork, error: BaseException | None) -> None:
        assert error is None
        self.over = True


def taken(operation: InlineOperation) -> None:
    assert all(operand[0] == 7 for operand in operation.payloads.operands)


RECIPES = [
    InlineRecipe(1, np.dtype(np.uint8), 1, rank, taken, np.add, gives=True, needed=() if rank else (0, 1, 2))
    for rank in range(3)
]


def test_who_looks_again_and_again_tells_what_has_ended_before_it_sleeps() -> None:
    (root, hasty, slow), _ = make(3)
    given = [Small(hasty) for _ in range(RECORDS + 3)]
    assert sum(one.over for one in given) == RECORDS, "it is as far ahead as it may be"

    def reduce() -> None:
        taken = Small(root)
        assert not root.lane.inline.look(), "one is missing"
        Small(slow)
        assert root.lane.inline.look()
        assert taken.over

    reduce()
    assert hasty.rung, "every sixteenth is told of at once"
    hasty.look()
    hasty.look()  # it has asked for that turn
    assert sum(one.over for one in given) == RECORDS + 1
    hasty.rung = False
    reduce()
    reduce()
    assert not hasty.rung, "there may be more to tell of soon"
    root.look()
    assert hasty.rung
    hasty.look()
    hasty.look()
    assert all(one.over for one in given)


def test_in_the_place_of_one_given_up_before_its_turn_nobody_finds_anything() -> None:
    """What lies there is of the operation that had this place in the ring before."""
    (root, hasty, slow), _ = make(3)
    unbegun = [Small(hasty) for _ in range(RECORDS + 1)][-1]
    hasty.lane.inline.drop(unbegun)
    taken = [Small(root) for _ in range(RECORDS)]
    for _ in range(RECORDS):
        Small(slow)
    for _ in range(3):
        for rank in (root, hasty, slow):
            rank.lane.poll()
    assert all(one.over for one in taken)
    last = Small(root)
    Small(slow)
    root.lane.poll()
    assert hasty.lane.lane.turns.issued == RECORDS + 1
    assert not last.over


COUNT = CHUNK_LENGTH + 1


def test_a_long_item_is_taken_in_turns() -> None:
    """Read where it lies, an item may be as long as its array."""
    ranks, _ = make(2)
    count = (3 * PART_BYTES + 8) // 8
    program = [Program(build(Problem.of("broadcast", 2, count), "shared", rank, count)) for rank in range(2)]
    values = np.arange(1, count + 1), np.zeros(count, np.int64)
    array = values[0].view(np.uint8).data
    ranks[0].lane.expose = lambda octets, single_copy: Exposed(7, 0)
    ranks[1].lane.lane.items._borrow = lambda member, segment, offset, length: array[offset : offset + length]
    nothing = np.zeros(0, np.int64)
    root, other = (Execution(ranks[rank], program[rank], [nothing, values[rank], nothing]) for rank in range(2))
    root.start()
    other.start()
    seen = [np.count_nonzero(values[1]) * 8 // PART_BYTES]
    while not other.done:
        ranks[1].loop.run_one()
        seen.append(np.count_nonzero(values[1]) * 8 // PART_BYTES)
    assert seen == [1, 2, 3, 3]
    assert (values[1] == values[0]).all()
    settle(ranks)
    assert root.done


def test_what_is_lent_counts_in_a_turn_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_part, "ZCOPY_COST_BYTES", TURN_BYTES // 4)
    ranks, _ = make(2)
    lane = ranks[0].lane
    lane.expose = lambda octets, single_copy: Exposed(7, 0)
    part = broadcast(ranks[0], 4 << 20, 0, 7).start().part
    seen = []
    for _ in range(3):
        assert part.operation is not None
        seen.append(part.operation.published)
        ranks[0].loop.run_one()
    assert seen == [4, 8, 12]


def test_no_turn_lends_more_than_the_others_are_told_at_once() -> None:
    """A system call for each, and a look at every peer: a hundred would hold the loop for milliseconds."""
    ranks, _ = make(2)
    lane = ranks[0].lane
    lane.expose = lambda octets, single_copy: Exposed(7, 0)
    part = broadcast(ranks[0], 100 * CHUNK_LENGTH, 0, 7).start().part
    assert part.operation is not None
    assert part.operation.published == ZCOPY_NEWS


def lends_first(ranks: list[Rank]) -> Execution:
    """A root that has lent the first of its two items, and put out a copy of the second, which is shorter."""
    root = broadcast(ranks[0], COUNT, 0, 7)
    array = root.arrays[1].view(np.uint8).data
    ranks[0].lane.expose = lambda octets, single_copy: Exposed(7, 0, least_bytes=(COUNT // 2 + 1) * 8)
    ranks[1].lane.lane.items._borrow = lambda member, segment, offset, length: array[offset : offset + length]
    return root.start()


def test_who_has_lent_hears_that_all_is_read_also_where_its_last_item_was_a_copy() -> None:
    ranks, _ = make(2)
    root = lends_first(ranks)
    settle(ranks)
    assert not root.done
    reader = broadcast(ranks[1], COUNT, 0, 0).start()
    settle(ranks)
    assert reader.done
    assert (reader.arrays[1] == 7).all()
    assert root.done


def test_what_is_lent_is_revoked_as_the_lane_is_closed() -> None:
    ranks, segments = make(2)
    lends_first(ranks)
    places = segments[0][DESCRIPTORS_AT : DESCRIPTORS_AT + 2 * DESCRIPTOR_BYTES]
    assert [size == ABSENT for _, _, size, _ in DESCRIPTOR.iter_unpack(places)] == [False, False]
    ranks[0].lane.close()
    assert [size == ABSENT for _, _, size, _ in DESCRIPTOR.iter_unpack(places)] == [True, False]


def test_a_forked_child_revokes_nothing_of_its_parent() -> None:
    ranks, segments = make(2)
    lends_first(ranks)
    places = segments[0][DESCRIPTORS_AT : DESCRIPTORS_AT + DESCRIPTOR_BYTES]
    ranks[0].lane.closed = True  # as HostMemory.forked does
    ranks[0].lane.close()
    assert DESCRIPTOR.unpack(places)[2] != ABSENT


def test_an_item_that_comes_by_message_where_there_are_none_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only pieces do, whose operations have messages."""
    monkeypatch.setattr(Items, "bcopy", lambda items, operation, payload: items.by_message(operation, len(payload)))
    ranks, _ = make(2)
    root, other = (broadcast(rank, 10, 0, 7) for rank in ranks)
    root.start()
    other.start()
    settle(ranks)
    ((rank, error),) = ranks[1].faults
    assert rank == 100
    assert "by message, in an operation without messages" in str(error)


def test_a_mismatch_names_the_member() -> None:
    ranks, _ = make(2)
    one = all_reduce(ranks[0], 10, 1).start(1)
    all_reduce(ranks[1], 10, 1).start(2)
    settle(ranks)
    assert isinstance(one.error, CollectiveMismatchError)
    assert one.error.peer == 101


def test_whom_an_operation_waits_for() -> None:
    ranks, _ = make(3)
    large = broadcast(ranks[0], POOL_BYTES // 4, 0, 1).start()
    broadcast(ranks[1], POOL_BYTES // 4, 0, 1).start()
    settle(ranks)
    assert large.part.slow_readers() == {2}
    unbegun = [all_reduce(ranks[0], 1, 1).start() for _ in range(RECORDS)][-1]
    assert unbegun.part.number == -1
    assert 2 in unbegun.part.slow_readers()


def test_a_member_that_left_fails_what_it_never_began_and_nothing_else() -> None:
    ranks, _ = make(3)
    gone = PeerLostError("rank 101 has left", 101, left=True)
    root = broadcast(ranks[1], 10, 1, 5).start()
    assert root.done
    early = broadcast(ranks[2], 10, 1, 5).start()
    waiting = all_reduce(ranks[2], 10, 1).start()
    for rank in (ranks[0], ranks[2]):
        rank.lane.left(1, gone)
    settle(ranks)
    assert early.done
    late = broadcast(ranks[0], 10, 1, 5).start()
    settle(ranks)
    assert late.done, "its part was done before it left"
    never = all_reduce(ranks[0], 10, 1).start()
    settle(ranks)
    assert waiting.error is never.error is gone


def test_what_a_member_began_before_it_left_is_begun_here_however_late() -> None:
    ranks, _ = make(3)
    late, root, slow = ranks
    for rank in (late, root):
        works = [broadcast(rank, 10, 1, number).start() for number in range(RECORDS + 1)]
        if rank is late:
            waiting = works[-1]
    settle(ranks)
    first = broadcast(slow, 10, 1, 0)
    first.part = slow.lane.add(1, first.program, first)
    slow.lane.flush()
    settle(ranks)
    assert waiting.part.number == -1, "a third member has not finished the first one"
    first.advance(list(first.program.first_steps(itemsize=1)))
    slow.lane.flush()
    settle([root, slow])
    assert works[-1].done
    late.lane.left(1, PeerLostError("rank 101 has left", 101, left=True))
    late.loop.ready.rotate(1)  # before its doorbell is heard
    settle(ranks)
    assert waiting.done
    assert waiting.arrays[1][0] == RECORDS


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_of_a_peer_end_in_a_fault_of_that_peer(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        ranks, segments = make(3)
        works: list[Execution] = []
        for _ in range(rng.randint(1, 6)):
            count = rng.choice((1, 2000))
            works += [all_reduce(rank, count, 1).start() for rank in ranks]
            for _ in range(rng.randint(0, 4)):
                turn(ranks, rng)
            at = rng.choice((0, 64, 128, 192, 256, 320, rng.randrange(0, LANE_HEAD_BYTES - 8, 8)))
            value = rng.choice((0, 1, 5, RECORDS, 1 << 62, 1 << 63, (1 << 64) - 1, rng.randrange(1 << 64)))
            segments[2][at : at + 8] = value.to_bytes(8, "little")
        settle(ranks, rng)
        for rank in ranks[:2]:
            assert len(rank.faults) <= 1
            assert all(number == 102 for number, _ in rank.faults)
        errors = [work.error for work in works if work.rank is not ranks[2] and work.error is not None]
        assert all(isinstance(error, CollectiveMismatchError) for error in errors)


def test_needs_of_another_shape_than_what_is_there() -> None:
    """Who reads past what a member publishes waits for what will be said about that, and disturbs nobody."""
    ranks, _ = make(2)
    needs: Needs = {1: {5: 1}}
    program: Any = type("P", (), {"items": 0, "needs": needs, "instructions": (), "ready": (), "single_copy": False})()
    execution: Any = Execution.__new__(Execution)
    part = ranks[0].lane.add(1, program, execution)
    ranks[0].lane.flush()
    work = broadcast(ranks[1], 10, 1, 1).start(1)
    settle(ranks)
    assert work.done
    assert not part.over
    assert not ranks[1].faults
    part._execution = None
    part.end()
    settle(ranks)
    assert ranks[0].lane.lane.turns.finished == 1
