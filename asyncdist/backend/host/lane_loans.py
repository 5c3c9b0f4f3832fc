"""What the members of a lane may read in each other's arrays."""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.host_memory import HostMemory
from asyncdist.transport.lanes.layout import LaneFault
from asyncdist.transport.shared_memory.arrays import address_of

__all__ = ["borrow", "lend_to"]


def lend_to(memory: HostMemory, others: Sequence[int], payload: memoryview) -> tuple[int, int] | None:
    """Segment and offset of a payload of ours that all of `others` (global ranks) have mapped, else None.

    Those that have not are asked to, so that a later payload can be lent.
    """
    arrays = memory.arrays
    if not len(arrays):
        return None
    found = arrays.find(address_of(payload), len(payload))
    if found is None:
        return None
    mapped = True
    for rank in others:
        connection = memory.connections.get(rank)
        mapped &= connection is not None and connection.loans.maps(found[0])
    return found if mapped else None


def borrow(
    memory: HostMemory, ranks: Sequence[int], member: int, segment: int, offset: int, length: int
) -> memoryview | None:
    """What `member` has lent; None if it is gone. Raises LaneFault if it has not offered that."""
    connection = memory.connections.get(ranks[member])
    if connection is None:
        return None
    try:
        return connection.loans.borrow(segment, offset, length)
    except RemoteProtocolError as error:
        raise LaneFault(member, str(error)) from None
