"""Blocked requests: which client waits for which key, and in which order. No clock and no I/O.

A request that needs many keys waits under one that is missing. Once this key is there, all of them are looked at again.
So a wait on n keys costs O(n) in all.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from asyncdist_server.wire.messages import GET, OK, WAIT

if TYPE_CHECKING:
    from asyncdist_server.engine.clients import Client

WAITER_BYTES: Final = 780
"""What one blocked request costs besides its keys: the object, its entries in tables and heap (measured, of the dearest
kind: alone with its key, and with a time-out)."""
WOKEN_AT_ONCE: Final = 128
"""How many waiters of a key are answered in one go: a millisecond or two, with a connection for each of them."""
MANY_WAITERS: Final = 64
"""With more waiters than this on one key they are in an OrderedDict, which finds its first entry at once. A dict passes
all removed entries first. But it takes 160 bytes less, which counts as most keys have one waiter."""


class Waiter:
    """One blocked request. `position` is where in `keys` the search for a missing key goes on."""

    __slots__ = (
        "argument",
        "armed",
        "bytes",
        "client",
        "deadline",
        "done",
        "keys",
        "operation",
        "position",
        "request_id",
        "since",
        "waits_in",
    )

    def __init__(
        self, client: Client, request_id: int, operation: int, keys: tuple[bytes, ...], deadline: float | None
    ) -> None:
        self.client = client
        self.request_id = request_id
        self.operation = operation
        self.keys = keys
        self.position = 0
        self.deadline = deadline
        self.armed = False
        self.done = False
        self.since = 0.0
        self.argument: int | bytes = 0  # of watch a revision, of lock a lease, of join a member
        self.waits_in: WaitPlace | None = None
        self.bytes = WAITER_BYTES + sum(map(len, keys)) + 48 * len(keys)


class WaitPlace(Protocol):
    """Where a blocked request can be taken out of."""

    def add(self, waiter: Waiter) -> None:
        """Let `waiter` wait here."""

    def discard(self, waiter: Waiter) -> None:
        """Forget `waiter`, which is here."""

    def give_up(self, waiter: Waiter) -> None:
        """Note that the request of `waiter`, which was here, has failed."""

    def missing(self) -> list[bytes]:
        """Return what those who wait here wait for."""

    def explain(self) -> str:
        """Return what they are told when their time is over, if names of keys do not say it."""


class WaitList:
    """The waiters of each key, in the order they came."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: dict[bytes, dict[Waiter, None]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiters

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, waiter: Waiter) -> None:
        """Let `waiter` wait under the key at its position, behind those already there."""
        self._waiters.setdefault(waiter.keys[waiter.position], {})[waiter] = None
        waiter.waits_in = self

    def discard(self, waiter: Waiter) -> None:
        """Remove `waiter` from wherever it waits in this list."""
        key = waiter.keys[waiter.position]
        waiters = self._waiters.get(key, {})
        if waiter in waiters:  # else it is woken
            del waiters[waiter]
            if not waiters:
                del self._waiters[key]
        waiter.waits_in = None

    def give_up(self, waiter: Waiter) -> None:
        """Do nothing: a request that waits for keys leaves no trace."""

    def missing(self) -> list[bytes]:
        """Return the keys for which requests wait here."""
        return list(self._waiters)

    def explain(self) -> str:
        """Return nothing: keys say it."""
        return ""

    def take_all(self, key: bytes) -> list[Waiter]:
        """Remove and return all waiters of `key`."""
        waiters = list(self._waiters.pop(key, ()))
        for waiter in waiters:
            waiter.waits_in = None
        return waiters

    def take_many(self, key: bytes, least: int) -> dict[Waiter, None] | None:
        """Remove and return the waiters of `key` where there are more than `least`; they do not know it yet."""
        return self._waiters.pop(key) if len(self._waiters.get(key, ())) > least else None

    def take_first(self, key: bytes) -> Waiter | None:
        """Remove and return the waiter of `key` that came first."""
        waiters = self._waiters.get(key)
        if not waiters:
            return None
        if len(waiters) > MANY_WAITERS and not isinstance(waiters, OrderedDict):
            waiters = self._waiters[key] = OrderedDict(waiters)
        first = next(iter(waiters))
        self.discard(first)
        return first


class Woken:
    """Requests whose only key came, with its value. They are answered a few at a time, whatever becomes of the key."""

    __slots__ = ("_left", "_value", "_waiters")

    def __init__(self, waiters: dict[Waiter, None], value: bytes) -> None:
        self._value = value
        self._waiters = waiters
        self._left = iter(waiters)

    def take_first(self) -> Waiter | None:
        """Return the first that was not answered; it is to be answered now."""
        for waiter in self._left:
            if not waiter.done:
                return waiter
        return None

    def reply_to(self, waiter: Waiter) -> tuple[int, int, bytes | list[bytes] | None] | None:
        """Return what `waiter` is answered, None if it is none of these."""
        if waiter not in self._waiters:
            return None
        if waiter.operation == WAIT:
            return waiter.request_id, OK, None
        return waiter.request_id, OK, self._value if waiter.operation == GET else [self._value]
