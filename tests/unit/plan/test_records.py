"""Which collectives go through records: all of one algorithm, up to two limits, each met and passed by one byte."""

from __future__ import annotations

import pytest

from asyncdist.collectives.shared.layout import (
    LANE_HEAD_BYTES,
    MAX_LANE_RANKS,
    SLOTS,
    item_bytes,
    pool_bytes,
    wide_bytes,
)
from asyncdist.plan.algorithms.registry import EVERY
from asyncdist.plan.records import (
    NO_LANE,
    PAYLOAD_SHARE,
    PIECES_BYTES,
    TAKEN_BYTES,
    USUAL_LANE,
    LaneMemory,
    Takes,
    by_records,
    pieces_bytes,
)
from asyncdist.transport.shared_memory.segment import PAGE_BYTES

LARGEST = USUAL_LANE.nbytes // PAYLOAD_SHARE
SUITED = {
    ("all_gather", "shared"): Takes.ALL,
    ("all_reduce", "shared"): Takes.ONE,
    ("all_reduce", "shared_direct"): Takes.ALL,
    ("all_to_all", "shared"): Takes.ONE,
    ("barrier", "shared"): Takes.ONE,
    ("broadcast", "shared"): Takes.ONE,
    ("gather", "shared"): Takes.ALL,
    ("reduce", "shared_direct"): Takes.ALL,
    ("reduce_scatter", "shared"): Takes.ONE,
    ("scatter", "shared"): Takes.ONE,
}


def test_which_algorithms_records_can_do():
    assert {(one.collective, one.name): one.records for one in EVERY if one.records} == SUITED


@pytest.mark.parametrize("takes", Takes)
def test_a_payload_is_at_most_a_share_of_the_lane(takes):
    for lane in (USUAL_LANE, LaneMemory(2 << 20)):
        largest = lane.nbytes // PAYLOAD_SHARE
        assert by_records(takes, 2, largest, lane)
        assert not by_records(takes, 2, largest + 1, lane)
    assert not by_records(takes, 2, 0, NO_LANE), "without a lane there is nothing"


def test_two_lengths_of_slots_have_room_for_all_that_goes_so():
    for payloads in (12 << 20, 3 << 20):
        for segment in (LANE_HEAD_BYTES + payloads, -(-(LANE_HEAD_BYTES + payloads) // PAGE_BYTES) * PAGE_BYTES):
            assert wide_bytes(segment) // (SLOTS // 2) == item_bytes(segment) // PAYLOAD_SHARE
            assert item_bytes(segment) <= pool_bytes(segment)


@pytest.mark.parametrize("takes", Takes)
def test_what_one_member_takes_is_bounded(takes):
    world = 2 * TAKEN_BYTES // LARGEST
    assert by_records(takes, world, LARGEST // 2, USUAL_LANE)
    assert by_records(takes, world, LARGEST // 2 + 1, USUAL_LANE) is (takes is Takes.ONE)


def test_others_never_go_that_way():
    assert not by_records(None, 2, 4, USUAL_LANE)


def test_pieces_in_a_payload_are_bounded_by_each_limit():
    assert pieces_bytes(2, USUAL_LANE) == pieces_bytes(TAKEN_BYTES // PIECES_BYTES, USUAL_LANE) == PIECES_BYTES
    assert pieces_bytes(TAKEN_BYTES // PIECES_BYTES + 1, USUAL_LANE) < PIECES_BYTES
    assert pieces_bytes(MAX_LANE_RANKS, USUAL_LANE) * MAX_LANE_RANKS <= TAKEN_BYTES, "that is what one takes at most"
    assert pieces_bytes(2, LaneMemory(PIECES_BYTES)) == PIECES_BYTES // PAYLOAD_SHARE
