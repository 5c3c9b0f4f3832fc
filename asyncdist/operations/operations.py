"""Operations: all that a group can be asked to do."""

from __future__ import annotations

from asyncdist.operations.arrays import Arrays
from asyncdist.operations.coalesced import Coalesced
from asyncdist.operations.collectives import Collectives
from asyncdist.operations.exchange import Exchanges
from asyncdist.operations.memory import Memory
from asyncdist.operations.monitored import Monitored
from asyncdist.operations.multi_device import MultiDevice
from asyncdist.operations.objects import Objects
from asyncdist.operations.point_to_point import PointToPoint
from asyncdist.operations.scans import Scans
from asyncdist.operations.streams import Streams

__all__ = ["Operations"]


class Operations(
    Collectives, Coalesced, MultiDevice, Exchanges, Scans, Monitored, PointToPoint, Arrays, Objects, Streams, Memory
):
    """Every operation, by subject: each base says what its own are."""
