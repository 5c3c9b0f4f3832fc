"""What the members of a lane may read in each other's arrays."""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.collectives.shared.layout import LaneFault
from asyncdist.errors import RemoteProtocolError
from asyncdist.plan.records import SINGLE_COPY_BYTES
from asyncdist.transport.host_memory import HostMemory
from asyncdist.transport.protocol.zero_copy import place_of
from asyncdist.transport.shared_memory.process_memory import RemoteBytes

__all__ = ["borrow", "lend_to"]


def lend_to(
    memory: HostMemory, others: Sequence[int], payload: memoryview, single_copy: bool
) -> tuple[int, int] | None:
    """Segment and offset of a payload of ours that all of `others` (global ranks) can read there, else None.

    Those that have not are asked to, so that a later payload can be lent.
    """
    connections = [memory.connections.get(rank) for rank in others]

    def mapped(segment: int) -> bool:
        """Whether all have it; each is asked, also after one that has not."""
        return not [peer for peer in connections if peer is None or not peer.loans.maps(segment)]

    own = memory.own if single_copy and len(payload) >= SINGLE_COPY_BYTES else None
    return place_of(payload, memory.arrays, own, mapped)


def borrow(
    memory: HostMemory, ranks: Sequence[int], member: int, segment: int, offset: int, length: int
) -> memoryview | RemoteBytes | None:
    """What `member` has lent; None if it is gone. Raises LaneFault if it has not offered that."""
    connection = memory.connections.get(ranks[member])
    if connection is None:
        return None
    try:
        return connection.loans.borrow(segment, offset, length)
    except RemoteProtocolError as error:
        raise LaneFault(member, str(error)) from None
