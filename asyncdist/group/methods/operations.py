"""Operations: all that a group can be asked to do."""

from __future__ import annotations

from asyncdist.group.methods.arrays import Arrays
from asyncdist.group.methods.coalesced import Coalesced
from asyncdist.group.methods.collectives import Collectives
from asyncdist.group.methods.exchange import Exchanges
from asyncdist.group.methods.memory import Memory
from asyncdist.group.methods.monitored import Monitored
from asyncdist.group.methods.multi_device import MultiDevice
from asyncdist.group.methods.objects import Objects
from asyncdist.group.methods.point_to_point import PointToPoint
from asyncdist.group.methods.scans import Scans
from asyncdist.group.methods.streams import Streams

__all__ = ["Operations"]


class Operations(
    Collectives, Coalesced, MultiDevice, Exchanges, Scans, Monitored, PointToPoint, Arrays, Objects, Streams, Memory
):
    """Every operation, by subject: each base says what its own are."""
