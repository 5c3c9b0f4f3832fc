"""Replies that are made and wait, as their clients read slowly: bounded together.

Such a reply refers to values. What the store holds as well costs nothing more; but a value may be replaced, and an item
of a queue is the store's no more, while a reply that nobody reads still has it. A thousand clients that read nothing
could so have the daemon hold a thousand times what one of them may. Where all of it is more than the store itself may
hold, those with most of it are cut off.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol

from asyncdist_server.wire.names import Names

__all__ = ["FREED_PART", "UNSAID_FRAMES", "Unsaid"]

UNSAID_FRAMES: Final = 2
"""Replies of a client may have the values of so many frames of the largest kind: one is being said, one waits."""
FREED_PART: Final = 8
"""One in so many bytes is made free at a time, as it takes long to find out how much there is."""


class Replies(Protocol):
    """What a session has to say."""

    @property
    def reply_bytes(self) -> int:
        """The bytes of the values in it, each counted as often as it is there."""

    def waiting_values(self) -> Iterable[Any]:
        """Return the values in it, which may be tuples and lists of values."""


class Speaker(Protocol):
    """A connection whose replies wait."""

    def drop(self, reason: str) -> None:
        """Cut the connection; `reason` is for the log."""


class Unsaid:
    """The values in waiting replies, each counted once: at most `each_bytes` of a connection, `limit_bytes` of all."""

    __slots__ = ("_at_most", "_each_bytes", "_limit_bytes", "_waiting")

    def __init__(self, each_bytes: int, limit_bytes: int) -> None:
        self._each_bytes = each_bytes
        self._limit_bytes = limit_bytes
        self._at_most = 0  # since it was counted last, what grew is added and nothing is taken away
        self._waiting: dict[Speaker, tuple[int, Replies]] = {}

    @property
    def waiting_count(self) -> int:
        """Connections whose replies wait."""
        return len(self._waiting)

    def note(self, speaker: Speaker, replies: Replies) -> None:
        """Note how much waits at one connection now; may cut this one or others off."""
        size = replies.reply_bytes
        before, _ = self._waiting.get(speaker, (0, None))
        if size == before:
            return
        self._at_most += max(0, size - before)
        self._waiting[speaker] = size, replies
        if size > self._each_bytes and distinct_bytes([replies]) > self._each_bytes:
            self._cut_off(speaker, "it alone")
        elif self._at_most > self._limit_bytes and self.count() > self._limit_bytes:
            self._make_room()

    def _make_room(self) -> None:
        enough = self._limit_bytes - self._limit_bytes // FREED_PART
        most = self._at_most
        for worst in sorted(self._waiting, key=lambda speaker: self._waiting[speaker][0], reverse=True):
            most -= self._waiting[worst][0]  # at least so much is left: others may wait for the same values
            self._cut_off(worst, "all clients together")
            if most <= enough:
                most = self.count()
                if most <= enough:
                    return

    def _cut_off(self, speaker: Speaker, who: str) -> None:
        self.forget(speaker)
        speaker.drop(f"reads too slowly: {who} had too much to read")

    def forget(self, speaker: Speaker) -> None:
        """Note that a connection is gone, or its replies wait no longer."""
        self._waiting.pop(speaker, None)

    def count(self) -> int:
        """Return how many bytes the values have, each counted once."""
        self._at_most = distinct_bytes([replies for _, replies in self._waiting.values()])
        return self._at_most


def distinct_bytes(waiting: list[Replies]) -> int:
    """Return how many bytes the values in replies have, each counted once."""
    found: dict[int, int] = {}
    left: list[Any] = [value for replies in waiting for value in replies.waiting_values()]
    while left:
        value = left.pop()
        if type(value) is bytes:
            found[id(value)] = len(value)
        elif type(value) is Names:
            found[id(value)] = len(value.encoded)
        elif type(value) is tuple or type(value) is list:
            left += value
    return sum(found.values())
