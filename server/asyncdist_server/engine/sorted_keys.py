"""The keys of a namespace in their order, so that those of a prefix are found without a look at all others.

A list of sorted blocks: to add or remove a key moves one block's pointers, not a million's.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Final

BLOCK_KEYS: Final = 1024
"""Most keys of a block: moving so many pointers takes a tenth of a microsecond, and a million keys are 1,000 blocks."""


class SortedKeys:
    """A sorted set of keys. `add` is for keys that are not in it, `discard` and `discard_all` for keys that are."""

    __slots__ = ("_block_keys", "_blocks", "_lasts")

    def __init__(self, keys: Iterable[bytes] = (), block_keys: int = BLOCK_KEYS) -> None:
        self._block_keys = block_keys
        ordered, half = sorted(keys), block_keys // 2
        self._blocks = [ordered[start : start + half] for start in range(0, len(ordered), half)]
        self._lasts = [block[-1] for block in self._blocks]  # the last key of each block

    def add(self, key: bytes) -> None:
        """Take in `key`."""
        blocks, lasts = self._blocks, self._lasts
        place = bisect.bisect_left(lasts, key)
        if place < len(lasts):
            block = blocks[place]
            bisect.insort(block, key)
        elif lasts:
            place -= 1
            block = blocks[place]
            block.append(key)
            lasts[place] = key
        else:
            blocks.append([key])
            lasts.append(key)
            return
        if len(block) > self._block_keys:
            # Keys often come in order: then the blocks before stay full.
            cut = len(block) - 1 if block[-1] is key else len(block) // 2
            blocks.insert(place + 1, block[cut:])
            del block[cut:]
            lasts[place] = block[-1]
            lasts.insert(place + 1, blocks[place + 1][-1])

    def discard(self, key: bytes) -> None:
        """Remove `key`."""
        place = bisect.bisect_left(self._lasts, key)
        block = self._blocks[place]
        del block[bisect.bisect_left(block, key)]
        if block:
            self._lasts[place] = block[-1]
        else:
            del self._blocks[place], self._lasts[place]

    def discard_all(self, keys: list[bytes]) -> None:
        """Remove `keys`, a few of them one by one and many of them by a look at all keys between the outermost two."""
        if len(keys) <= len(self._blocks):
            for key in keys:
                self.discard(key)
            return
        gone = set(keys)
        first, last = bisect.bisect_left(self._lasts, min(keys)), bisect.bisect_left(self._lasts, max(keys))
        left = [[key for key in block if key not in gone] for block in self._blocks[first : last + 1]]
        self._blocks[first : last + 1] = blocks = [block for block in left if block]
        self._lasts[first : last + 1] = [block[-1] for block in blocks]

    def under(self, prefix: bytes, start: bytes = b"", most: int | None = None) -> list[bytes]:
        """Return the keys that begin with `prefix` and are not before `start`, in order: the first `most` of them."""
        found: list[bytes] = []
        first = max(prefix, start)
        for place in range(bisect.bisect_left(self._lasts, first), len(self._blocks)):
            block = self._blocks[place]
            left, right = 0 if found else bisect.bisect_left(block, first), len(block)
            if not block[-1].startswith(prefix):
                right = bisect.bisect_left(block, True, left, key=lambda key: not key.startswith(prefix))
            found += block[left:right]
            if right < len(block) or (most is not None and len(found) >= most):
                break
        return found if most is None else found[:most]
