"""Fairness between clients: which client has the next turn, and which half-open connection gives way to a new one.

Long work is done in turns: a client with many requests or large replies goes on in its next turn. Each pass of the loop
gives one turn, and serves all other clients in between. Turns go round the jobs, and within a job round its clients. So
a job with many clients has no more turns than a job with one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from asyncdist_server.serving.connection import Connection


class Player(Protocol):
    """A connection that wants a turn."""

    @property
    def job(self) -> str:
        """The job that its client belongs to."""

    def take_turn(self) -> None:
        """Do as much work as one turn may have."""


class Turns:
    """The connections that want a turn. `call_soon(function)` calls the function in the loop's next pass."""

    __slots__ = ("_call_soon", "_due", "_waiting")

    def __init__(self, call_soon: Callable[[Callable[[], None]], Any]) -> None:
        self._call_soon = call_soon
        self._waiting: dict[str, dict[Player, None]] = {}
        self._due = False

    def ask(self, player: Player) -> None:
        """Give `player` a turn when it is the next one; asking again before that changes nothing."""
        self._waiting.setdefault(player.job, {})[player] = None
        if not self._due:
            self._due = True
            self._call_soon(self._next)

    def _next(self) -> None:
        self._due = False
        job = next(iter(self._waiting))
        players = self._waiting.pop(job)
        player = next(iter(players))
        del players[player]
        if players:
            self._waiting[job] = players  # behind all others
        if self._waiting:
            self._due = True
            self._call_soon(self._next)
        player.take_turn()


class HalfOpen:
    """The connections that have not proven a token, and which of them gives its place to a new one.

    They are counted by address, so that no address can take the places of others.
    """

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
