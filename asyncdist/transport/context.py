"""What all parts of one mesh share, and what the store says of a rank that takes no connection."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from asyncdist.transport.config import TransportConfig
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.host_memory import HostMemory
from asyncdist.transport.keepalive import KeepaliveWatch
from asyncdist.transport.protocol.hello import Identity
from asyncdist.transport.spin import Neighbors


@dataclass(frozen=True, slots=True)
class MeshContext:
    """What the parts of one mesh share: loop, identity, configuration, descriptors, and what is known of this host."""

    loop: asyncio.AbstractEventLoop
    identity: Identity
    config: TransportConfig
    sockets: SocketSet
    host_id: str
    memory: HostMemory
    neighbors: Neighbors
    keepalive: KeepaliveWatch
    path_watch: KeepaliveWatch
    """Of pairs with several connections, the next to lose one of them."""
    ips: list[str] = field(default_factory=list)
    """Addresses listened on, those of the interfaces that are used first, in their order."""


class Absence(enum.Enum):
    """Why a rank might not be there."""

    NONE = "nothing is known against its being there"
    LEFT = "it left in order"
    RESIGNED = "it could not be in this world after all; its own error says why"
    CUT_OFF = "its connection to the store has ended, without a goodbye"
    UNKNOWN = "the store cannot be asked whether it left in order"
