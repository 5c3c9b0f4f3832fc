"""Lent items: read where they are, held until all have read them, and taken back in time when given up."""

from __future__ import annotations

import random

import pytest

from asyncdist.collectives.shared.channel import Lane
from asyncdist.collectives.shared.layout import (
    ABSENT,
    CONSUMED,
    DESCRIPTOR_BYTES,
    DESCRIPTORS,
    DESCRIPTORS_AT,
    LANE_HEAD_BYTES,
    LaneFault,
    LaneOperation,
)

POOL_BYTES = 4096
ARRAYS = 7
"""The number of everybody's segment of arrays."""


class World:
    """Members, and a segment of arrays for each."""

    def __init__(self, size: int) -> None:
        self.arrays = [memoryview(bytearray(range(200))) for _ in range(size)]
        self.segments = [memoryview(bytearray(LANE_HEAD_BYTES + POOL_BYTES)) for _ in range(size)]
        self.gone: set[int] = set()
        self.lanes = []
        for rank in range(size):
            seen = [view if index == rank else view.toreadonly() for index, view in enumerate(self.segments)]
            self.lanes.append(Lane(rank, seen, self.borrow))

    def borrow(self, member: int, segment: int, offset: int, length: int) -> memoryview | None:
        if member in self.gone:
            return None
        if segment != ARRAYS or offset + length > 200:
            raise LaneFault(member, "no such memory")
        return self.arrays[member][offset : offset + length].toreadonly()


def begin(lane: Lane, items: int, *reads: int) -> LaneOperation:
    """Begin an operation of `items` items, that reads those items of member 0."""
    operation = lane.begin(1, items, {0: dict.fromkeys(reads, 1)} if reads else {})
    assert operation is not None
    return operation


def test_an_item_is_read_where_it_is_and_held_until_all_have() -> None:
    world = World(3)
    one, two, three = world.lanes
    mine, theirs, others = begin(one, 2), begin(two, 0, 0, 1), begin(three, 0, 0, 1)
    assert one.lend(mine, ARRAYS, 10, 5)
    assert one.publish(mine, memoryview(b"copied"))
    assert not one.returned(mine)
    assert two.wanted_by() == [0]
    for lane, operation in ((two, theirs), (three, others)):
        assert lane.available(operation, 0) == 2
        assert lane.item(operation, 0, 0) == bytes(range(10, 15))
        assert lane.borrowed
        assert lane.intact(operation, 0, 0)
        lane.borrowed = False
        lane.consumed(operation, 0, 0)
        assert lane.item(operation, 0, 1) == b"copied"
        assert not lane.borrowed
        assert one.returned(mine) is (lane is three)
    one.end(mine)
    assert two.item(theirs, 0, 1) == b"copied"


def test_what_is_awaited_stays_awaited_while_more_is_published() -> None:
    world = World(2)
    one, two = world.lanes
    mine, more = begin(one, 1), begin(one, 1)
    theirs = begin(two, 0, 0)
    assert one.lend(mine, ARRAYS, 0, 5)
    assert not one.returned(mine)
    assert one.publish(more, memoryview(b"x"))
    assert two.wanted_by() == [0]
    assert two.available(theirs, 0) == 1
    two.consumed(theirs, 0, 0)
    assert one.returned(mine)


def test_what_is_given_up_is_revoked_before_its_memory_changes() -> None:
    world = World(2)
    one, two = world.lanes
    mine, theirs = begin(one, 3), begin(two, 0, 0, 1, 2)
    assert one.lend(mine, ARRAYS, 0, 5)
    assert one.publish(mine, memoryview(b"kept"))
    assert two.available(theirs, 0) == 2
    assert two.item(theirs, 0, 0) is not None
    one.end(mine)
    assert not two.intact(theirs, 0, 0)
    assert two.item(theirs, 0, 0) is None
    assert two.item(theirs, 0, 1) == b"kept"
    assert two.available(theirs, 0) == 3
    assert two.item(theirs, 0, 2) is None


def test_what_is_revoked_changes_in_one_word() -> None:
    """Others read the descriptor meanwhile: any mixture of its words is what was lent, or that it is not."""
    world = World(2)
    one, _ = world.lanes
    mine = begin(one, 1)
    assert one.lend(mine, ARRAYS, 10, 5)
    words = world.segments[0][DESCRIPTORS_AT : DESCRIPTORS_AT + DESCRIPTOR_BYTES].cast("Q")
    assert words.tolist() == [0, 10, 5, ARRAYS]
    one.end(mine)
    assert words.tolist() == [0, 10, ABSENT, ARRAYS]


def test_closing_revokes_all_that_is_lent() -> None:
    world = World(2)
    one, two = world.lanes
    mine, more = begin(one, 1), begin(one, 2)
    theirs, others = begin(two, 0, 0), begin(two, 0, 0, 1)
    assert one.lend(mine, ARRAYS, 0, 5)
    assert one.publish(more, memoryview(b"kept"))
    assert one.lend(more, ARRAYS, 5, 5)
    assert two.available(theirs, 0) == 1
    assert two.available(others, 0) == 2
    two.consumed(theirs, 0, 0)
    one.revoke_all()
    assert two.intact(theirs, 0, 0)  # read in time
    assert two.item(others, 0, 0) == b"kept"
    assert two.item(others, 0, 1) is None


def test_a_member_that_says_what_cannot_be_keeps_nothing_lent_to_the_others() -> None:
    world = World(3)
    one, two, three = world.lanes
    mine, theirs, _ = begin(one, 1), begin(two, 0, 0), begin(three, 0, 0)
    assert one.lend(mine, ARRAYS, 0, 5)
    assert two.available(theirs, 0) == 1
    world.segments[2].cast("Q")[CONSUMED] = 1 << 60
    one.revoke_all()
    assert not two.intact(theirs, 0, 0)


def test_as_many_items_as_descriptors() -> None:
    world = World(2)
    one, two = world.lanes
    mine, theirs = begin(one, DESCRIPTORS + 1), begin(two, 0, 0, 1)
    assert all(one.lend(mine, ARRAYS, 0, 1) for _ in range(DESCRIPTORS))
    assert not one.lend(mine, ARRAYS, 0, 1)
    assert two.wanted_by() == [0]
    assert two.available(theirs, 0) == DESCRIPTORS
    two.consumed(theirs, 0, 0)
    assert one.lend(mine, ARRAYS, 3, 1)
    assert not one.lend(mine, ARRAYS, 0, 1)  # it has no more items


def test_items_go_out_in_turn() -> None:
    one = World(2).lanes[0]
    first, second = begin(one, 1), begin(one, 1)
    assert not one.lend(second, ARRAYS, 0, 1)
    assert one.lend(first, ARRAYS, 0, 1)
    assert one.lend(second, ARRAYS, 0, 1)


def test_a_member_that_is_gone_lends_nothing() -> None:
    world = World(2)
    one, two = world.lanes
    mine, theirs = begin(one, 1), begin(two, 0, 0)
    assert one.lend(mine, ARRAYS, 0, 5)
    world.gone.add(0)
    assert two.available(theirs, 0) == 1
    assert two.item(theirs, 0, 0) is None


@pytest.mark.parametrize("place", [(ARRAYS + 1, 0, 1), (ARRAYS, 200, 1), (ARRAYS, 1 << 63, 1 << 63)])
def test_what_was_never_shared_is_a_fault(place: tuple[int, int, int]) -> None:
    world = World(2)
    one, two = world.lanes
    mine, theirs = begin(one, 1), begin(two, 0, 0)
    assert one.lend(mine, *place)
    assert two.available(theirs, 0) == 1
    with pytest.raises(LaneFault):
        two.item(theirs, 0, 0)


def test_without_anything_to_borrow_from_a_lent_item_is_a_fault() -> None:
    segments = [memoryview(bytearray(LANE_HEAD_BYTES + POOL_BYTES)) for _ in range(2)]
    one, two = Lane(0, segments), Lane(1, segments)
    mine, theirs = begin(one, 1), begin(two, 0, 0)
    assert one.lend(mine, ARRAYS, 0, 1)
    assert two.available(theirs, 0) == 1
    with pytest.raises(LaneFault, match="segment 7"):
        two.item(theirs, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_reads_reads_what_was_lent_or_knows_better(seed: int) -> None:
    """Operations of one lender, some given up, whose memory changes at once when they are over."""
    rng = random.Random(seed)
    world = World(2)
    one, two = world.lanes
    expected: dict[int, bytes] = {}
    lending: list[LaneOperation] = []
    reading: list[LaneOperation] = []
    good = revoked = 0
    offsets: dict[int, int] = {}
    for _ in range(300):
        free = [offset for offset in range(0, 200, 8) if offset not in offsets.values()]
        if free and len(lending) < 8 and rng.random() < 0.6:
            mine = one.begin(1, 1, {})
            theirs = two.begin(1, 0, {0: {0: 1}})
            if mine is None or theirs is None:
                continue
            offset = offsets[mine.number] = rng.choice(free)
            expected[mine.number] = bytes(rng.randrange(256) for _ in range(8))
            world.arrays[0][offset : offset + 8] = expected[mine.number]
            lending.append(mine)
            reading.append(theirs)
        for mine in list(lending):
            if not mine.published:
                one.lend(mine, ARRAYS, offsets[mine.number], 8)
            if (one.returned(mine) and mine.published) or rng.random() < 0.05:
                lending.remove(mine)
                one.end(mine)
                offset = offsets.pop(mine.number)
                world.arrays[0][offset : offset + 8] = b"overwrit"
        for theirs in list(reading):
            if rng.random() < 0.4 and two.available(theirs, 0):
                reading.remove(theirs)
                item = two.item(theirs, 0, 0)
                copied = b"" if item is None else bytes(item)
                if item is not None and two.intact(theirs, 0, 0):
                    assert copied == expected[theirs.number]
                    good += 1
                else:
                    revoked += 1
                two.consumed(theirs, 0, 0)
                two.end(theirs)
        one.retire()
        two.retire()
    assert good > 20
    assert revoked
