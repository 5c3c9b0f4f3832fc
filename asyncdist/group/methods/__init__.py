"""The operations of a group, by subject; `ProcessGroup` inherits them all and says how they are issued."""

from asyncdist.group.methods.coalesced import Coalesced
from asyncdist.group.methods.collectives import Collectives
from asyncdist.group.methods.multi_device import MultiDevice
from asyncdist.group.methods.objects import Arrays, Objects
from asyncdist.group.methods.point_to_point import PointToPoint
from asyncdist.group.methods.streams import Streams

__all__ = ["Operations"]


class Operations(Collectives, Coalesced, MultiDevice, PointToPoint, Arrays, Objects, Streams):
    """Every operation, by subject: each base says what its own are."""
