"""The names of a job's members, which each of them is told: one object in the answers to all, encoded once.

A round of n members makes n answers of n names each. To measure and encode all of these names would hold the daemon's
loop for long.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgpack

__all__ = ["Names"]


class Names(list[bytes]):
    """A list that nobody changes."""

    __slots__ = ("encoded", "size_bytes")

    def __init__(self, names: Iterable[bytes]) -> None:
        super().__init__(names)
        self.encoded: bytes = msgpack.packb(list(self))
        """As a message has them."""
        self.size_bytes = sum(map(len, self))
        """Of all names together."""
