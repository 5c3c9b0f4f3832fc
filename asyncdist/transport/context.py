"""What all parts of one mesh share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from asyncdist.transport.config import TransportConfig
from asyncdist.transport.fork import SocketSet
from asyncdist.transport.host_memory import HostMemory
from asyncdist.transport.keepalive import KeepaliveWatch
from asyncdist.transport.neighbors import Neighbors
from asyncdist.transport.protocol.hello import Identity

__all__ = ["MeshContext"]


@dataclass(frozen=True, slots=True)
class MeshContext:
    """The loop, who we are, how to connect, our descriptors, this host's id, and what is known of it and of others."""

    loop: asyncio.AbstractEventLoop
    identity: Identity
    config: TransportConfig
    sockets: SocketSet
    host_id: str
    memory: HostMemory
    neighbors: Neighbors
    keepalive: KeepaliveWatch
