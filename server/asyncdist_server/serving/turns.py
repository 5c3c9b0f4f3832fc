"""Whose turn it is: what takes long is done a little at a time, one job after the other.

A client that has much to say or to be told goes on in turns. Each pass of the loop gives one of them, so that whatever
else has arrived is served in between. Jobs take turns first, and then the clients of a job: however many clients
another job has, they have no more turns than it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Turns"]


class Player(Protocol):
    """A connection."""

    @property
    def job(self) -> str:
        """The job that its client belongs to."""

    def take_turn(self) -> None:
        """Do as much as may be done at a time."""


class Turns:
    """Those who want a turn. `call_soon` has a function called in the loop's next pass."""

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
