"""Which collectives of one host go through the records of their lane, without items and without the steps of a plan.

Every member that gives puts its whole payload out at once; who takes waits for those it takes from, and takes what it
is to have in one go. That suits small collectives: nothing overlaps, and the loop does not turn meanwhile.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["NO_LANE", "PAYLOAD_SHARE", "SINGLE_COPY_BYTES", "TAKEN_BYTES", "USUAL_LANE", "LaneMemory", "by_records"]


class LaneMemory(NamedTuple):
    """What every member of a lane has for the items it puts out."""

    nbytes: int = 0
    """Memory for copies of them; 0 without a lane."""
    single_copy: bool = False
    """Whether all members can read each other's memory, so that long items need no copy."""


NO_LANE: Final = LaneMemory()
USUAL_LANE: Final = LaneMemory(8 << 20)
"""That of a group's first lane, and what is reckoned with where there is no lane to ask."""

SINGLE_COPY_BYTES: Final = 128 << 10
"""Shortest item that is read where it lies in another process: copying a shorter one in and out costs less."""

PAYLOAD_SHARE: Final = 8
"""A payload is at most this part of the lane's memory for items: of its memory for payloads a fourth, so that four
operations can be under way."""

TAKEN_BYTES: Final = 4 << 20
"""Bytes that one member copies and reduces at a time: the better part of a millisecond."""


def by_records(collective: str, algorithm: str, world: int, nbytes: float, memory: LaneMemory) -> bool:
    """Whether a collective goes that way; `nbytes` are those of a member's payload."""
    if algorithm != _ALGORITHMS.get(collective) or not memory.nbytes:
        return False
    taken = nbytes * world if collective in _OF_ALL else nbytes
    return nbytes <= memory.nbytes / PAYLOAD_SHARE and taken <= TAKEN_BYTES


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
