"""How many elements a msgpack message has, and what they take once they are Python objects.

An element of a byte or two becomes an object of up to 72 bytes, so that the bytes of a message do not bound what
decoding it takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["BIN_LENGTHS", "HEADS", "held_bytes", "more_elements_than"]

ELEMENT_BYTES: Final = 48
"""What an element takes: its place in an array, and an integer or an empty byte string..."""
ARRAY_BYTES: Final = 24
"""... and an array more than that."""
BIN_LENGTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}
"""How many bytes the length of a byte string has, behind its first one."""

_NUMBERS: Final = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
_ARRAYS: Final = {0xDC: 3, 0xDD: 5}
HEADS: Final = [0 if first in BIN_LENGTHS else (_NUMBERS | _ARRAYS).get(first, 1) for first in range(256)]
"""How many bytes an element that begins with that one has before the next, but for byte strings. Text, maps and
extensions are not decoded; it does not matter where they end."""


def more_elements_than(limit: int, payload: bytes | bytearray | memoryview) -> bool:
    """Return whether a message that `messages` decodes has more than `limit` elements, arrays among them.

    Takes time for `limit` elements at most. What it says of any other bytes does not matter.
    """
    position, end, count = 0, len(payload), 0
    while position < end:
        if count == limit:
            return True
        count += 1
        first = payload[position]
        head = HEADS[first]
        if head:
            position += head
        else:
            start = position + 1
            position = start + BIN_LENGTHS[first]
            position += int.from_bytes(payload[start:position], "big")
    return False


def held_bytes(message: tuple[Any, ...]) -> int:
    """Return what a decoded message takes, at most, besides the bytes in its byte strings."""
    elements = arrays = 0
    level: Sequence[Any] = message
    while level:  # a level at a time, as one array at a time would take ten times as long
        inner = [each for each in level if type(each) is tuple]
        elements += len(level)
        arrays += len(inner)
        level = list(itertools.chain.from_iterable(inner))
    return ELEMENT_BYTES * elements + ARRAY_BYTES * arrays
