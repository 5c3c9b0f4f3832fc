"""Which collectives of one host go through the records of their lane, without items and without the steps of a plan.

Every member that gives puts its whole payload out at once; who takes waits for those it takes from, and takes what it
is to have in one go. That suits small collectives: nothing overlaps, and the loop does not turn meanwhile.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PAYLOAD_SHARE", "TAKEN_BYTES", "USUAL_LANE_BYTES", "by_records"]

USUAL_LANE_BYTES: Final = 8 << 20
"""Memory for a rank's items in a group's first lane, and what is reckoned with where there is no lane to ask."""

PAYLOAD_SHARE: Final = 8
"""A payload is at most this part of the lane's memory for items: of its memory for payloads a fourth, so that four
operations can be under way."""

TAKEN_BYTES: Final = 4 << 20
"""Bytes that one member copies and reduces at a time: the better part of a millisecond."""


def by_records(collective: str, algorithm: str, world: int, nbytes: float, lane_bytes: float) -> bool:
    """Whether a collective goes that way; `nbytes` are those of a member's payload.

    `lane_bytes` is every member's memory for items; 0 without a lane.
    """
    if algorithm != _ALGORITHMS.get(collective) or not lane_bytes:
        return False
    taken = nbytes * world if collective in _OF_ALL else nbytes
    return nbytes <= lane_bytes / PAYLOAD_SHARE and taken <= TAKEN_BYTES


_ALGORITHMS: Final = {
    "all_gather": "shared",
    "all_reduce": "shared_direct",
    "all_to_all": "shared",
    "barrier": "shared",
    "broadcast": "shared",
    "gather": "shared",
    "reduce": "shared_direct",
    "reduce_scatter": "shared",
    "scatter": "shared",
}
"""By collective, the algorithm that does by items what records do."""

_OF_ALL: Final = ("all_gather", "all_reduce", "gather", "reduce")
"""Collectives of which somebody takes the whole payload of every member."""
