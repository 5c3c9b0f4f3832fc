"""Neighbors: ranks of this host reached through sockets, which a rank that looks before it sleeps reads as well."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

from asyncdist.transport.protocol.hello import Identity

__all__ = ["MAX_NEIGHBORS", "Neighbors", "lives_here", "on_this_host", "settle", "vacate"]

MAX_NEIGHBORS: Final = 4
"""Sockets that are looked at: each costs a system call, so with more of them a round would take too long to pay."""

_residents: dict[tuple[bytes, int], int] = {}


class Neighbors:
    """`pollers` read one socket each, if there is something; whether there was. Their values do so between calls."""

    __slots__ = ("crowded", "pollers")

    def __init__(self) -> None:
        self.pollers: dict[Callable[[], bool], Callable[[], object]] = {}
        self.crowded = False
        """Whether one of them lives in this process: while we look, it cannot do anything."""

    def add(self, poller: Callable[[], bool], catch_up: Callable[[], object], *, crowded: bool) -> None:
        """Another connection of this host is open."""
        self.pollers[poller] = catch_up
        self.crowded |= crowded

    def remove(self, poller: Callable[[], bool]) -> None:
        """It has ended. Idempotent."""
        self.pollers.pop(poller, None)


def settle(identity: Identity) -> None:
    """This rank lives in this process, from now on."""
    place = identity.world_id, identity.rank
    _residents[place] = _residents.get(place, 0) + 1


def vacate(identity: Identity) -> None:
    """It does no more."""
    place = identity.world_id, identity.rank
    left = _residents.get(place, 0) - 1
    if left > 0:
        _residents[place] = left
    else:
        _residents.pop(place, None)


def lives_here(world_id: bytes, rank: int) -> bool:
    """Whether that rank lives in this process too."""
    return (world_id, rank) in _residents


def on_this_host(sock: socket.socket) -> bool:
    """Whether the other end of a connected socket is on this host."""
    if sock.family == socket.AF_UNIX:
        return True
    try:
        own, peer = sock.getsockname(), sock.getpeername()
    except OSError:
        return False
    return bool(own[0] == peer[0])
