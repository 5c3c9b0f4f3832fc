"""Lanes without processes: the members' segments are memory of this process, and nothing moves by itself."""

from __future__ import annotations

from asyncdist.collectives.shared.layout import LANE_HEAD_BYTES, LaneOperation
from asyncdist.collectives.shared.runner import Lane

POOL_BYTES = 4096
WIDE_BYTES = 32768


def make(size: int, payload_bytes: int = POOL_BYTES) -> tuple[list[Lane], list[memoryview]]:
    segments = [memoryview(bytearray(LANE_HEAD_BYTES + payload_bytes)) for _ in range(size)]
    lanes = []
    for rank in range(size):
        seen = [segment if index == rank else segment.toreadonly() for index, segment in enumerate(segments)]
        lanes.append(Lane(rank, seen))
    return lanes, segments


def begun(
    lane: Lane, fingerprint: int, items: int = 0, needs: dict[int, dict[int, int]] | None = None
) -> LaneOperation:
    operation = lane.items.begin(fingerprint, items, needs or {})
    assert operation is not None
    return operation


def content(member: int, number: int, item: int, length: int) -> bytes:
    """Bytes that count up to 250 again and again, from a number that depends on the item."""
    first = (member * 7 + number * 13 + item * 29) % 251
    return (bytes(range(251)) * (length // 251 + 2))[first : first + length]
