"""Connections that have not proven themselves, by where they come from: no address can take the places of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncdist_server.serving.connection import Connection

__all__ = ["HalfOpen"]


class HalfOpen:
    """A set of connections that knows which of them is to give its place to a new one."""

    __slots__ = ("_by_host", "_count")

    def __init__(self) -> None:
        self._by_host: dict[str, dict[Connection, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, connection: Connection) -> None:
        """Note a new connection."""
        self._by_host.setdefault(connection.host, {})[connection] = None
        self._count += 1

    def discard(self, connection: Connection) -> None:
        """Note that a connection, if it is here, has proven itself or is gone."""
        connections = self._by_host.get(connection.host, {})
        if connection in connections:
            del connections[connection]
            self._count -= 1
            if not connections:
                del self._by_host[connection.host]

    def first_to_go(self) -> Connection:
        """Return the oldest connection of the address that has most: others had less time to prove themselves.

        A client needs two round trips, so that it is through long before a flood from its own address replaces it.
        """
        most = max(self._by_host.values(), key=len)
        return next(iter(most))
