"""Which collectives of one host go inline: through the records of their lane, without items and without a plan's steps.

Every member that gives puts its whole payload out at once. A member that takes waits for the members it takes from, and
takes all of it at once. That suits small collectives: nothing overlaps, and the event loop does not turn meanwhile.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


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


PIECES_BYTES: Final = 64 << 10
"""Pieces of lengths that only their two ends know are at most so many bytes of a payload, in all: a longer one may be
read where it lies, and of many long ones some can be taken while others are put out."""


def pieces_bytes(world: int, memory: LaneMemory) -> int:
    """Return the most bytes that a rank gives that way where each rank decides alone, so that none takes more than
    TAKEN_BYTES.
    """
    return min(PIECES_BYTES, TAKEN_BYTES // world, memory.nbytes // PAYLOAD_SHARE)


class Takes(enum.Enum):
    """How much a rank takes, in a collective that records can do."""

    ONE = "one"
    """About as much as one member's payload."""
    ALL = "all"
    """As much as every member's payload."""


def by_records(takes: Takes | None, world: int, nbytes: float, memory: LaneMemory) -> bool:
    """Whether a collective goes inline; `nbytes` is the length of a member's payload."""
    if takes is None or not memory.nbytes:
        return False
    taken = nbytes * world if takes is Takes.ALL else nbytes
    return nbytes <= memory.nbytes / PAYLOAD_SHARE and taken <= TAKEN_BYTES
