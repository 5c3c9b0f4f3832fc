"""What all clients together have not read yet: further answers wait their turn where that is much.

A stored value is counted once, yet each client that asks for it gets a copy, which the daemon holds until the client
has read it. A thousand that read slowly, or ask at the same moment, would make it hold a thousand. Who reads nothing
while others wait is cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

__all__ = ["SMALL_REPLY_BYTES", "UNSENT_PART", "Sender", "Unsent"]

UNSENT_PART: Final = 4
"""What is unsent may take the memory limit divided by this, and the answer that exceeds it."""
SMALL_REPLY_BYTES: Final = 16 * 1024
"""What is no larger does not wait, as long as its client has read all but so much: locks, leases and barriers go on
while large values are on their way. Twice so many bytes for each connection are what comes on top."""
POLL_S: Final = 0.01
"""How often it is looked whether there is room, while somebody waits for it..."""
POLLED: Final = 1000
"""... where so many have something unread; where more have, less often, as to look at all of them takes time."""


class Sender(Protocol):
    """A connection."""

    @property
    def unsent_bytes(self) -> int:
        """What was made for the client and is not sent."""

    def go_on(self) -> None:
        """Say now what had to wait."""

    def hurry(self) -> None:
        """See to it that the client is cut off if it reads nothing: others wait for room."""


class Unsent:
    """The bytes that the daemon holds for clients to read, and the connections that wait for room.

    `start_timer` takes a delay in seconds and a function.
    """

    __slots__ = ("_at_most", "_given", "_limit_bytes", "_start_timer", "_timer", "waiting")

    def __init__(self, limit_bytes: int, start_timer: Callable[[float, Callable[[], None]], Any]) -> None:
        self._limit_bytes = limit_bytes
        self._start_timer = start_timer
        self._given: dict[Sender, None] = {}  # those that may have something unsent
        self._at_most = 0  # since it was counted last, what was written is added and nothing is taken away
        self._timer: Any = None
        self.waiting: dict[Sender, None] = {}
        """Those with something to say that there is no room for, in the order in which they came."""

    def wrote(self, sender: Sender, size: int) -> None:
        """Note that so much was made for a client."""
        if size:
            self._at_most += size
            self._given[sender] = None

    def may_say(self, sender: Sender, reply_bytes: int) -> bool:
        """Whether `sender` may say so much more; else it waits, and its `go_on` is called when there is room."""
        if not self.waiting and self._at_most <= self._limit_bytes:
            return True
        if reply_bytes <= SMALL_REPLY_BYTES and sender.unsent_bytes <= SMALL_REPLY_BYTES:
            return True
        if not self.waiting and self.count() <= self._limit_bytes:
            return True
        self.waiting[sender] = None
        if self._timer is None:
            self._look_later()
        return False

    def forget(self, sender: Sender) -> None:
        """Note that a connection is gone."""
        self.waiting.pop(sender, None)
        self._given.pop(sender, None)

    def count(self) -> int:
        """Return how much is unsent now."""
        unsent = {sender: sender.unsent_bytes for sender in self._given}
        self._given = {sender: None for sender, size in unsent.items() if size}
        self._at_most = sum(unsent.values())
        return self._at_most

    def _look_later(self) -> None:
        self._timer = self._start_timer(POLL_S * max(1.0, len(self._given) / POLLED), self._look)

    def _look(self) -> None:
        self._timer = None
        self.count()
        while self.waiting and self._at_most <= self._limit_bytes:
            sender = next(iter(self.waiting))
            del self.waiting[sender]
            sender.go_on()
        if self.waiting:
            for sender in self._given:
                if sender.unsent_bytes > SMALL_REPLY_BYTES:
                    sender.hurry()
            self._look_later()
