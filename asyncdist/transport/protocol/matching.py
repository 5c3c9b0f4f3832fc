"""Posted receives, and which of them a message meets: first come, first served among equal keys.

Each peer has a `ReceiveTable` of its own; receives from any source stand in one `AnySourceTable` for the whole mesh.
A message takes whichever was posted earlier of the heads of those two. Nothing here does I/O or knows frames.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from asyncdist.transport.protocol.operations import Receive, ReceiveState

if TYPE_CHECKING:
    from asyncdist.transport.protocol.receiver import Receiver

UnexpectedWatcher: TypeAlias = Callable[[int, bytes, Container[bytes]], None]
"""unexpected(source, key, queue): a message came before its receive. `queue` has `key` until then."""

Discarded: TypeAlias = Callable[[int, bytes], object]
"""discarded(source, meta): a message of a group that was dropped is thrown away."""
MAX_DROPPED_GROUPS: Final = 4096
"""Groups remembered as dropped: late frames of one come within a round trip, so only the newest matter."""


class ReceiveTable:
    """Posted receives by key, first in first out, each removable in constant time.

    `entries` maps a key to its only receive, or to an ordered set of several: one receive per key is the usual case
    and costs one dictionary operation to post and one to match.
    """

    def __init__(self) -> None:
        self.entries: dict[bytes, Receive | OrderedDict[Receive, None]] = {}

    def add(self, receive: Receive) -> None:
        """Post `receive` behind those of its key."""
        entry = self.entries.setdefault(receive.key, receive)
        if entry is receive:
            return
        if isinstance(entry, Receive):
            self.entries[receive.key] = OrderedDict(((entry, None), (receive, None)))
        else:
            entry[receive] = None

    def head(self, key: bytes) -> Receive | None:
        """Return the earliest receive of `key`, leaving it in place."""
        entry = self.entries.get(key)
        return entry if entry is None or isinstance(entry, Receive) else next(iter(entry))

    def pop(self, key: bytes) -> Receive | None:
        """Remove and return the earliest receive of `key`."""
        entry = self.entries.pop(key, None)
        if entry is None or isinstance(entry, Receive):
            return entry
        receive, _ = entry.popitem(last=False)
        self.entries[key] = entry if len(entry) > 1 else next(iter(entry))
        return receive

    def remove(self, receive: Receive) -> bool:
        """Remove `receive`; False if it is not here."""
        entry = self.entries.get(receive.key)
        if entry is receive:
            del self.entries[receive.key]
            return True
        if entry is None or isinstance(entry, Receive) or receive not in entry:
            return False
        del entry[receive]
        if len(entry) == 1:
            self.entries[receive.key] = next(iter(entry))
        return True

    def count(self, key: bytes) -> int:
        """How many receives of `key` are posted."""
        entry = self.entries.get(key)
        return 0 if entry is None else 1 if isinstance(entry, Receive) else len(entry)

    def __iter__(self) -> Iterator[Receive]:
        for entry in list(self.entries.values()):
            if isinstance(entry, Receive):
                yield entry
            else:
                yield from list(entry)

    def drop_group(self, group: bytes) -> None:
        """Remove the receives of `group` without telling their sinks."""
        for receive in [receive for receive in self if receive.key.startswith(group)]:
            self.remove(receive)
            receive.drop()

    def take_all(self) -> list[Receive]:
        """Remove and return all receives."""
        taken = list(self)
        self.entries.clear()
        return taken


class AnySourceTable:
    """Receives from any source, shared by the peers of a mesh, and what those peers hold that could serve one.

    Only point-to-point keys may be received from any source.
    """

    def __init__(self) -> None:
        self.table = ReceiveTable()
        self.entries = self.table.entries
        self.orders = itertools.count(1)
        self.arrivals = itertools.count(1)
        """Numbers of unexpected messages."""
        self._holders: dict[bytes, dict[Receiver, None]] = {}
        self._stalled: dict[Receiver, None] = {}

    def post(self, receive: Receive, ranks: Collection[int]) -> bool:
        """Post a receive from whichever of `ranks` sends first.

        True: complete now (the earliest unexpected message served it), the sink was not called. Raises what `allocate`
        raised, or CollectiveMismatchError, if the message at hand does not suit; it is discarded.
        """
        receive._order = next(self.orders)
        receive.ranks = ranks
        holders = self._holders.get(receive.key)
        if holders:
            return min(holders, key=lambda peer: peer.oldest_arrival(receive.key)).take_unexpected(receive)
        self.table.add(receive)
        for peer in list(self._stalled):
            peer.ask(receive.key)
        return False

    def withdraw(self, receive: Receive) -> bool:
        """Forget `receive`; False if it was matched already."""
        if not self.table.remove(receive):
            return False
        receive.state = ReceiveState.WITHDRAWN
        return True

    def fail_source(self, rank: int, error: BaseException) -> None:
        """`rank` is lost: fail each pending receive that might have come from it."""
        lost = [receive for receive in self.table if rank in receive.ranks]
        for receive in lost:
            self.table.remove(receive)
        for receive in lost:
            receive.fail(error)

    def drop_group(self, group: bytes) -> None:
        """Forget the receives of `group` without telling their sinks."""
        self.table.drop_group(group)

    def fail(self, error: BaseException) -> None:
        """Fail every pending receive."""
        for receive in self.table.take_all():
            receive.fail(error)

    def holds(self, key: bytes, peer: Receiver) -> None:
        """`peer` holds a message of `key`."""
        self._holders.setdefault(key, {})[peer] = None

    def holds_none(self, key: bytes, peer: Receiver) -> None:
        """`peer` holds no message of `key` any more."""
        holders = self._holders.get(key, {})
        holders.pop(peer, None)
        if not holders:
            self._holders.pop(key, None)

    def stalled(self, peer: Receiver, stalled: bool) -> None:
        """`peer` keeps point-to-point messages back until asked, or no longer does."""
        if stalled:
            self._stalled[peer] = None
        else:
            self._stalled.pop(peer, None)


class DroppedGroups:
    """Groups, and single operations of groups, whose late messages are thrown away; shared by the peers of a mesh."""

    def __init__(self) -> None:
        self._prefixes: dict[bytes, Discarded | None] = {}

    def add(self, prefix: bytes, discarded: Discarded | None = None) -> None:
        """Remember a group (8 bytes) or an operation (16 bytes), forgetting the oldest beyond MAX_DROPPED_GROUPS.

        `discarded` hears of every message of the group that is thrown away from now on; it must not raise.
        """
        self._prefixes.pop(prefix, None)
        self._prefixes[prefix] = discarded
        if len(self._prefixes) > MAX_DROPPED_GROUPS:
            del self._prefixes[next(iter(self._prefixes))]

    def __contains__(self, key: bytes) -> bool:
        """Whether messages of `key` are thrown away."""
        return key[:8] in self._prefixes or key[:16] in self._prefixes

    def discard(self, key: bytes, source: int, meta: bytes) -> None:
        """A message of `key` is thrown away."""
        discarded = self._prefixes.get(key[:8])
        if discarded is not None:
            discarded(source, meta)
