"""Which collectives go through records: all of one algorithm, up to two limits, each met and passed by one byte."""

from __future__ import annotations

import pytest

from asyncdist.plan.records import (
    NO_LANE,
    PAYLOAD_SHARE,
    PIECES_BYTES,
    TAKEN_BYTES,
    USUAL_LANE,
    LaneMemory,
    by_records,
    pieces_bytes,
)
from asyncdist.transport.lanes.layout import (
    LANE_HEAD_BYTES,
    MAX_LANE_RANKS,
    SLOTS,
    item_bytes,
    pool_bytes,
    wide_bytes,
)
from asyncdist.transport.shared_memory.segment import PAGE_BYTES

LARGEST = USUAL_LANE.nbytes // PAYLOAD_SHARE
SUITED = [
    ("all_gather", "shared"),
    ("all_reduce", "shared"),
    ("all_reduce", "shared_direct"),
    ("all_to_all", "shared"),
    ("barrier", "shared"),
    ("broadcast", "shared"),
    ("gather", "shared"),
    ("reduce", "shared_direct"),
    ("reduce_scatter", "shared"),
    ("scatter", "shared"),
]


@pytest.mark.parametrize(("collective", "algorithm"), SUITED)
def test_a_payload_is_at_most_a_share_of_the_lane(collective, algorithm):
    for lane in (USUAL_LANE, LaneMemory(2 << 20)):
        largest = lane.nbytes // PAYLOAD_SHARE
        assert by_records(collective, algorithm, 2, largest, lane)
        assert not by_records(collective, algorithm, 2, largest + 1, lane)
    assert not by_records(collective, algorithm, 2, 0, NO_LANE), "without a lane there is nothing"


def test_two_lengths_of_slots_have_room_for_all_that_goes_so():
    for payloads in (12 << 20, 3 << 20):
        for segment in (LANE_HEAD_BYTES + payloads, -(-(LANE_HEAD_BYTES + payloads) // PAGE_BYTES) * PAGE_BYTES):
            assert wide_bytes(segment) // (SLOTS // 2) == item_bytes(segment) // PAYLOAD_SHARE
            assert item_bytes(segment) <= pool_bytes(segment)


@pytest.mark.parametrize(("collective", "algorithm"), SUITED)
def test_what_one_member_takes_is_bounded(collective, algorithm):
    world = 2 * TAKEN_BYTES // LARGEST
    takes_all = algorithm == "shared_direct" or collective in ("all_gather", "gather")
    assert by_records(collective, algorithm, world, LARGEST // 2, USUAL_LANE)
    assert by_records(collective, algorithm, world, LARGEST // 2 + 1, USUAL_LANE) is not takes_all


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [("all_reduce", "ring"), ("all_gather", "ring"), ("reduce", "shared"), ("scan", "shared_direct")],
)
def test_no_others_do(collective, algorithm):
    assert not by_records(collective, algorithm, 2, 4, USUAL_LANE)


def test_pieces_in_a_payload_are_bounded_by_each_limit():
    assert pieces_bytes(2, USUAL_LANE) == pieces_bytes(TAKEN_BYTES // PIECES_BYTES, USUAL_LANE) == PIECES_BYTES
    assert pieces_bytes(TAKEN_BYTES // PIECES_BYTES + 1, USUAL_LANE) < PIECES_BYTES
    assert pieces_bytes(MAX_LANE_RANKS, USUAL_LANE) * MAX_LANE_RANKS <= TAKEN_BYTES, "that is what one takes at most"
    assert pieces_bytes(2, LaneMemory(PIECES_BYTES)) == PIECES_BYTES // PAYLOAD_SHARE
