"""Every kind of trouble in a lane is told to whom it concerns, and to nobody else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from shared_lane_kit import POOL_BYTES, Execution, all_reduce, broadcast, make, settle, turn

from asyncdist.collectives.shared.channel import LANE_HEAD_BYTES, Lane
from asyncdist.collectives.shared.layout import RECORDS, Needs
from asyncdist.errors import CollectiveMismatchError, PeerLostError


def test_an_item_that_comes_by_message_where_there_are_none_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only pieces do, whose operations have messages."""
    monkeypatch.setattr(Lane, "publish", lambda core, operation, payload: core.travels(operation, len(payload)))
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
    assert waiting.buffers[1][0] == RECORDS


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
    assert ranks[0].lane.core.finished == 1
