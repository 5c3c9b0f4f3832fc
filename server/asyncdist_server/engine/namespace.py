"""The keys and queues of one namespace (a job), and how much memory they are charged."""

from __future__ import annotations

import bisect
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from asyncdist_server.engine.waiters import WaitList

if TYPE_CHECKING:
    from asyncdist_server.engine.changes import NamespaceChanges
    from asyncdist_server.engine.clients import Client
    from asyncdist_server.engine.history import History
    from asyncdist_server.engine.leases import Hold, Lease
    from asyncdist_server.engine.membership import Job

TORCH_PREFIX: Final = "torch/"
"""Namespaces that begin like this belong to torch clients; native clients may read them."""
KEY_OVERHEAD_BYTES: Final = 180
"""What a key costs besides its bytes and its value's: two byte-string headers, a dict entry, and 8 to 12 bytes in the
index of many keys (measured)."""
ITEM_OVERHEAD_BYTES: Final = 48
"""What a queue item costs besides its bytes: a byte-string header and its place in the queue."""
QUEUE_OVERHEAD_BYTES: Final = 900
"""What a queue costs besides its items: an empty deque already holds one block of 64 places."""

INDEXED_KEYS: Final = 1024
"""With more keys than this a namespace keeps them sorted, too: to look at that many takes a tenth of a millisecond."""


class Share:
    """What some namespaces together may take of the store's memory, and what they take."""

    __slots__ = ("bytes", "limit_bytes", "option")

    def __init__(self, limit_bytes: int, option: str) -> None:
        self.bytes = 0
        self.limit_bytes = limit_bytes
        self.option = option  # that sets it, for people


class Namespace:
    """Keys and queues live side by side: the same name may be both. A queue exists while it has items."""

    __slots__ = (
        "bound",
        "changes",
        "clients",
        "histories",
        "holds",
        "index",
        "jobs",
        "leased",
        "leases",
        "lockers",
        "name",
        "poppers",
        "prefix_lengths",
        "queues",
        "readers",
        "share",
        "values",
        "watchers",
    )

    def __init__(self, name: str, share: Share | None = None) -> None:
        self.name = name
        self.share = share  # None: it may take all of the store's memory
        self.values: dict[bytes, bytes] = {}
        self.index: SortedKeys | None = None  # of the keys of `values`, once they are many
        self.queues: dict[bytes, deque[bytes]] = {}
        self.readers = WaitList()  # get, wait, multi_get
        self.poppers = WaitList()  # queue_pop
        self.watchers = WaitList()  # watch, by prefix
        self.lockers = WaitList()  # lock
        self.leases: dict[int, Lease] = {}
        self.leased: dict[bytes, Lease] = {}  # by key
        self.bound: dict[bytes | Client, dict[Lease, None]] = {}  # by the client whose connection they need
        self.holds: dict[bytes, Hold] = {}  # by prefix
        self.histories: dict[bytes, History] = {}  # by prefix
        self.prefix_lengths: dict[int, int] = {}  # how many histories have a prefix of that length
        self.jobs: dict[bytes, Job] = {}
        self.clients = 0
        self.changes: NamespaceChanges | None = None  # None: not in the journal

    @property
    def unused(self) -> bool:
        """Whether this object holds nothing, so that it may be made anew at the next use."""
        return not (self.clients or self.values or self.queues or self.leases or self.holds or self.histories)

    def present(self, key: bytes) -> bool:
        """Return whether `check` and `wait` see `key`: a queue with items counts, as it does for torch."""
        return key in self.values or key in self.queues

    def growth_by_value(self, key: bytes, value: bytes) -> int:
        """Return by how many bytes storing `value` under `key` changes what is charged."""
        old = self.values.get(key)
        if old is None:
            return KEY_OVERHEAD_BYTES + len(key) + len(value)
        return len(value) - len(old)

    def key_came(self, key: bytes) -> None:
        """Note that `values` has a key that it did not have before."""
        if self.index is not None:
            self.index.add(key)
        elif len(self.values) > INDEXED_KEYS:
            self.index = SortedKeys(self.values)

    def update(self, pairs: Mapping[bytes, bytes]) -> None:
        """Store all `pairs`."""
        new = [key for key in pairs if key not in self.values]
        self.values.update(pairs)
        if self.index is None:
            new = new[-1:]  # they are all in `values`, of which an index is made
        for key in new:
            self.key_came(key)

    def keys_under(self, prefix: bytes, start: bytes = b"", most: int | None = None) -> list[bytes]:
        """Return the keys that begin with `prefix` and are not before `start`, in order: the first `most` of them."""
        if self.index is not None:
            return self.index.under(prefix, start, most)
        return sorted(key for key in self.values if key >= start and key.startswith(prefix))[:most]

    def keys_under_any(self, prefixes: Iterable[bytes]) -> list[bytes]:
        """Return the keys that begin with one of `prefixes`."""
        if self.index is None:
            return list(filter(begins_with_any(prefixes), self.values))
        return [key for prefix in disjoint(prefixes) for key in self.index.under(prefix)]

    def growth_by_item(self, key: bytes, item: bytes) -> int:
        """Return by how many bytes queueing `item` under `key` changes what is charged."""
        size = ITEM_OVERHEAD_BYTES + len(item)
        return size if key in self.queues else size + QUEUE_OVERHEAD_BYTES + len(key)

    def push_item(self, key: bytes, item: bytes, at_head: bool) -> None:
        """Queue `item`."""
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = deque()
        if at_head:
            queue.appendleft(item)
        else:
            queue.append(item)
        if self.changes is not None:
            self.changes.pushed(key, item, at_head)

    def pop_item(self, key: bytes) -> tuple[bytes, int]:
        """Remove and return the oldest item of a queue that has one, and the bytes no longer charged."""
        queue = self.queues[key]
        item = queue.popleft()
        if self.changes is not None:
            self.changes.popped(key)
        freed = ITEM_OVERHEAD_BYTES + len(item)
        if not queue:
            del self.queues[key]
            freed += QUEUE_OVERHEAD_BYTES + len(key)
        return item, freed

    def delete_value(self, key: bytes) -> int | None:
        """Remove `key`; returns the bytes no longer charged, None if it was not there."""
        value = self.values.pop(key, None)
        if value is None:
            return None
        if self.changes is not None:
            self.changes.key(key)
        if self.index is not None:
            self.index.discard(key)
        return KEY_OVERHEAD_BYTES + len(key) + len(value)

    def delete_values(self, keys: list[bytes]) -> int:
        """Remove `keys`, which are all there; returns the bytes no longer charged."""
        if self.changes is not None:
            self.changes.many_keys(keys)
        if len(keys) == len(self.values):
            self.index = None
        elif self.index is not None:
            self.index.discard_all(keys)
        return sum(map(len, map(self.values.pop, keys))) + sum(map(len, keys)) + KEY_OVERHEAD_BYTES * len(keys)

    def clear_queue(self, key: bytes) -> int:
        """Remove a queue that exists; returns the bytes no longer charged."""
        queue = self.queues.pop(key)
        if self.changes is not None:
            self.changes.cleared(key)
        return QUEUE_OVERHEAD_BYTES + len(key) + sum(ITEM_OVERHEAD_BYTES + len(item) for item in queue)


def disjoint(prefixes: Iterable[bytes]) -> list[bytes]:
    """Return `prefixes` in order, without those that begin with another one: what begins with one begins with one."""
    shortest: list[bytes] = []
    for prefix in sorted(prefixes):
        if not shortest or not prefix.startswith(shortest[-1]):
            shortest.append(prefix)
    return shortest


def begins_with_any(prefixes: Iterable[bytes]) -> Callable[[bytes], bool]:
    """Return what says whether a key begins with one of `prefixes`, in a time that hardly grows with their number."""
    shortest = disjoint(prefixes)
    if len(shortest) == 1:
        return operator.methodcaller("startswith", shortest[0])

    def begins(key: bytes) -> bool:
        place = bisect.bisect_right(shortest, key)
        return place > 0 and key.startswith(shortest[place - 1])

    return begins


BLOCK_KEYS: Final = 1024
"""Most keys of a block: moving so many pointers takes a tenth of a microsecond, and a million keys are 1,000 blocks."""


class SortedKeys:
    """A sorted set of keys in blocks: to add or remove a key moves the pointers of one block, not a million.

    `add` is for keys that are not in it, `discard` and `discard_all` for keys that are.
    """

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
