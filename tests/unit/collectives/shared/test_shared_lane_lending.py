"""What a lane lends: read in turns, had back, and revoked."""

from __future__ import annotations

import numpy as np
import pytest
from shared_lane_kit import CHUNK_LENGTH, Execution, Rank, broadcast, make, settle

from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.shared import operation as shared_part
from asyncdist.collectives.shared.layout import ABSENT, DESCRIPTOR, DESCRIPTOR_BYTES, DESCRIPTORS_AT
from asyncdist.collectives.shared.operation import LENT_NEWS, PART_BYTES, TURN_BYTES
from asyncdist.plan.algorithms.registry import build
from asyncdist.plan.problem import Problem


def test_a_long_item_is_taken_in_turns() -> None:
    """Read where it lies, an item may be as long as its array."""
    ranks, _ = make(2)
    count = (3 * PART_BYTES + 8) // 8
    program = [Program(build(Problem.of("broadcast", 2, count), "shared", rank, count)) for rank in range(2)]
    values = np.arange(1, count + 1), np.zeros(count, np.int64)
    array = values[0].view(np.uint8).data
    ranks[0].lane.lend = lambda payload, single_copy: (7, 0)
    ranks[1].lane.core._borrow = lambda member, segment, offset, length: array[offset : offset + length]
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
    monkeypatch.setattr(shared_part, "LEND_COST_BYTES", TURN_BYTES // 4)
    ranks, _ = make(2)
    lane = ranks[0].lane
    lane.lend = lambda payload, single_copy: (7, 0)
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
    lane.lend = lambda payload, single_copy: (7, 0)
    part = broadcast(ranks[0], 100 * CHUNK_LENGTH, 0, 7).start().part
    assert part.operation is not None
    assert part.operation.published == LENT_NEWS


def lends_first(ranks: list[Rank]) -> Execution:
    """A root that has lent the first of its two items, and put out a copy of the second."""
    root = broadcast(ranks[0], 2 * CHUNK_LENGTH, 0, 7)
    array = root.buffers[1].view(np.uint8).data
    places: list[tuple[int, int] | None] = [(7, 0), None]
    ranks[0].lane.lend = lambda payload, single_copy: places.pop(0)
    ranks[1].lane.core._borrow = lambda member, segment, offset, length: array[offset : offset + length]
    return root.start()


def test_who_has_lent_hears_that_all_is_read_also_where_its_last_item_was_a_copy() -> None:
    ranks, _ = make(2)
    root = lends_first(ranks)
    settle(ranks)
    assert not root.done
    reader = broadcast(ranks[1], 2 * CHUNK_LENGTH, 0, 0).start()
    settle(ranks)
    assert reader.done
    assert (reader.buffers[1] == 7).all()
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
