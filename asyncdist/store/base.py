"""Store, the interface of all stores, and the checks of its arguments.

A wrong type is a TypeError at the call, as in torch.distributed: the traceback shows the wrong call, not the `await`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Final, NoReturn, Self, TypeVar

from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.errors import StoreTimeoutError
from asyncdist_server.wire.key_text import shown

if TYPE_CHECKING:
    from asyncdist.store.lease import Lease, Lock
    from asyncdist.store.member import Membership
    from asyncdist.store.watch import Watch

__all__ = [
    "DEFAULT_STORE_TIMEOUT_S",
    "Store",
    "checked_amount",
    "checked_integer",
    "checked_key",
    "checked_keys",
    "checked_value",
    "checked_values",
    "decoded_key",
    "encoded_key",
    "encoded_keys",
]

DEFAULT_STORE_TIMEOUT_S: Final = 300.0
"""Five minutes, the default of torch.distributed's stores."""


class Store(ABC):
    """Keys are str, values are bytes (a str given as a value is stored as UTF-8).

    The daemon's keys are bytes. A byte that is not UTF-8 is a lone surrogate here, as in Python's file names.

    Every verb returns an awaitable, not necessarily a coroutine: `await` it, or pass it to `asyncio.ensure_future`,
    `gather` or `wait_for`. Arguments are checked at the call (TypeError, ValueError). A verb that changes something is
    issued at the call, in call order, even if it is awaited later.

    **Time-outs.** `get`, `wait`, `multi_get` and a blocking `queue_pop` wait for others and take `timeout=` (seconds, a
    timedelta, None for ever; by default the store's `timeout`). Present keys are returned even with a time-out of 0.
    Expiry raises `StoreTimeoutError`, whose `keys` are those still missing. All other verbs are bounded by the store's
    `timeout`.

    **Cancellation.** Cancelling a waiting verb withdraws it: a cancelled `queue_pop` takes nothing from the queue.
    Cancelling a verb that changes something ends the waiting; whether the change was made is then unknown.

    **Errors.** `DistStoreError` where the store refuses or fails (`StoreLimitError` for a documented limit),
    `ClosedError` after `close`. A refused request leaves the store usable.

    Queues live beside keys: one name may be both. `check` and `wait` count a queue that is not empty as present;
    `num_keys`, `list_keys` and `delete_key` do not see queues.
    """

    def __init__(self, timeout: Timeout = DEFAULT_STORE_TIMEOUT_S) -> None:
        self._timeout_s = timeout_seconds(timeout, DEFAULT_STORE_TIMEOUT_S)

    @property
    def timeout(self) -> float | None:
        """Seconds after which a verb gives up unless it says otherwise; None for never."""
        return self._timeout_s

    def set_timeout(self, timeout: Timeout) -> None:
        """Change `timeout` for the calls that follow; `INHERIT` means the default of 300 s."""
        self._timeout_s = timeout_seconds(timeout, DEFAULT_STORE_TIMEOUT_S)

    @property
    def is_connected(self) -> bool:
        """Whether requests reach the daemon now; False while a broken connection is made anew. True without one."""
        return True

    @abstractmethod
    def set(self, key: str, value: str | bytes, *, lease: Lease | None = None) -> Awaitable[None]:
        """Store `value` under `key`, replacing what was there.

        With a `lease` the key is deleted when the lease ends; LeaseLostError if the lease has ended. Without one, a key
        that was bound to a lease is bound no longer. `append` and `add` leave keys bound as they are.
        """

    @abstractmethod
    def get(self, key: str, *, timeout: Timeout = INHERIT) -> Awaitable[bytes]:
        """Return the value of `key`, waiting until it exists."""

    @abstractmethod
    def add(self, key: str, amount: int) -> Awaitable[int]:
        """Add `amount` to the counter `key` (0 when missing) and return the sum; the value is its decimal text.

        Raises DistStoreError if the value is not a decimal number.
        """

    @abstractmethod
    def wait(self, keys: Iterable[str], timeout: Timeout = INHERIT) -> Awaitable[None]:
        """Wait until all `keys` exist at one moment."""

    @abstractmethod
    def check(self, keys: Iterable[str]) -> Awaitable[bool]:
        """Return whether all `keys` exist now."""

    @abstractmethod
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> Awaitable[bytes]:
        """Set `key` to `desired` if its value is `expected`, or if it is missing and `expected` is empty.

        Returns the value afterwards; for a missing key that was not set, `expected` (as torch does).
        """

    @abstractmethod
    def delete_key(self, key: str) -> Awaitable[bool]:
        """Delete `key`; return whether it existed."""

    @abstractmethod
    def append(self, key: str, value: str | bytes) -> Awaitable[None]:
        """Append `value` to the value of `key`, which is empty when missing."""

    @abstractmethod
    def multi_get(self, keys: Iterable[str], *, timeout: Timeout = INHERIT) -> Awaitable[list[bytes]]:
        """Return the values of `keys` in their order, waiting until all exist at one moment."""

    @abstractmethod
    def multi_set(self, keys: Iterable[str], values: Iterable[str | bytes]) -> Awaitable[None]:
        """Set each of `keys` to its value, all at one moment; ValueError if their numbers differ."""

    @abstractmethod
    def num_keys(self) -> Awaitable[int]:
        """Return how many keys exist."""

    @abstractmethod
    def list_keys(self, prefix: str = "") -> Awaitable[list[str]]:
        """Return the keys that start with `prefix`, in no particular order.

        Many thousands of them are asked for in parts: a key that comes or goes meanwhile may be among them or not.
        """

    @abstractmethod
    def queue_push(self, key: str, value: str | bytes) -> Awaitable[None]:
        """Append `value` to the queue `key`; one waiting `queue_pop` gets it."""

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True, *, timeout: Timeout = INHERIT) -> Awaitable[bytes]:
        """Take the oldest value from the queue `key`, waiting for one.

        With `block=False`, raises `QueueEmptyError` when there is none. Waiting callers are served in their order.
        """

    @abstractmethod
    def queue_len(self, key: str) -> Awaitable[int]:
        """Return how many values the queue `key` holds; 0 when it does not exist."""

    def barrier(self, key: str, world_size: int, timeout: Timeout = INHERIT) -> Awaitable[None]:
        """Wait until `world_size` callers of the same `key` have come; it may be used again by as many.

        Expiry raises `StoreTimeoutError`, which says how many came. A caller that came counts even if its waiting has
        ended: take another key after an expiry. Keys that begin with `key` stay in the store. TypeError and ValueError
        at the call unless `key` is a str and `world_size` an int of at least 1.
        """
        if not isinstance(key, str):
            raise TypeError(f"a store key must be str, not {type(key).__name__}")
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise TypeError(f"world_size must be int, not {type(world_size).__name__}")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        return self._barrier(key, world_size, timeout_seconds(timeout, self.timeout))

    async def _barrier(self, key: str, world_size: int, timeout_s: float | None) -> None:
        arrived = f"{key}/arrived"
        number, place = divmod(await self.add(arrived, 1) - 1, world_size)
        complete = f"{key}/complete/{number}"
        if place == world_size - 1:
            await self.set(complete, b"")
            return
        try:
            await self.wait([complete], timeout_s)
        except StoreTimeoutError as error:
            come = await self.add(arrived, 0) - number * world_size
            raise StoreTimeoutError(
                f"barrier '{shown(key)}': {come} of {world_size} came within {timeout_s:g} s", error.keys
            ) from None

    def has_extended_api(self) -> bool:
        """True: every store has append, multi_get, multi_set and queues; torch asks because not all of its have."""
        return True

    # What needs a daemon that knows its clients: stores that have none raise NotImplementedError at the call.

    def lease(self, ttl: Timeout = 10.0, *, bound: bool = False) -> Awaitable[Lease]:
        """Return a lease of `ttl` seconds that this object keeps alive; see `Lease`.

        With `bound` it lives as long as this object's connection to the store, and `ttl` seconds beyond, so that it
        survives a reconnect; closing the store ends it at once.
        """
        self._not_offered("leases")

    def hold(self, prefix: str, lease: Lease, *, linger: Timeout = 0.0) -> Awaitable[None]:
        """Delete all keys and queues that begin with `prefix` once no lease holds it, `linger` seconds after the last.

        This is how the keys of a job vanish with it. A lease that ends, or is revoked, no longer holds anything.
        """
        self._not_offered("held prefixes")

    def watch(self, prefix: str = "", from_revision: int | None = None) -> Watch:
        """Return what happens to keys that begin with `prefix`, from now on or from a revision; see `Watch`.

        The watch is issued at the call: keys listed after it miss nothing. `WatchCompactedError`, when it is read, says
        that events since `from_revision` are no longer remembered. Events are remembered while somebody watches their
        prefix, and for two minutes after.
        """
        self._not_offered("watches")

    def lock(self, name: str, *, grace: Timeout = 10.0, timeout: Timeout = INHERIT) -> Lock:
        """Return a lock between the clients of this store, for `async with store.lock(name) as token`; see `Lock`.

        `grace` is for how many seconds a holder whose connection broke keeps it, `timeout` bounds the waiting.
        """
        self._not_offered("locks")

    def join(
        self,
        job: str,
        min: int,
        max: int | None = None,
        timeout: Timeout = INHERIT,
        *,
        name: str | None = None,
        settle: Timeout = 3.0,
        grace: Timeout = 10.0,
        bound: bool = True,
    ) -> Awaitable[Membership]:
        """Meet at least `min` and at most `max` (default `min`) members of a job; returns a `Membership`.

        Args:
            job: its name; all members must give the same `min` and `max`.
            timeout: of the waiting. StoreTimeoutError names those who did not come.
            name: this member's, by default host, pid and a random number. A dead member's place is taken at once; while
                a member of that name lives, this waits for it to go, and StoreTimeoutError says whose the name is.
            settle: seconds to wait for more than `min` members once they are there; with `max` it starts at once.
            grace: seconds after which a member whose connection broke is lost.
            bound: with False, this member is lost once it was silent for `grace` seconds. So others notice a process
                that is stopped, or whose host is down, which does not break its connection.

        Raises DistStoreError for another `min` or `max`.
        """
        self._not_offered("memberships")

    def expel(self, job: str, member: str) -> Awaitable[None]:
        """Take the member of that name out of `job`, if it is there: for callers that know sooner that it is dead.

        The other members are told that it left. If it lives, it finds its membership lost. The caller need not be a
        member. DistStoreError if the daemon does not say by which lease the member lives, as older daemons do not.
        """
        self._not_offered("memberships")

    def _not_offered(self, what: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} has no {what}; TCPStore and HashStore have")

    def clone(self) -> Store:
        """Return another client of the same data, with this one's time-out, for another event loop for instance.

        Open it as the first one: `async with store.clone() as other`. Raises ClosedError where this one is closed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no clone(): make another one with the same arguments")

    @abstractmethod
    def close(self) -> Awaitable[None]:
        """Give up what the store holds; requests under way and later ones raise `ClosedError`. May be called twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


Item = TypeVar("Item")

MIN_AMOUNT: Final = -(2**63)
MAX_AMOUNT: Final = 2**63 - 1
"""Counters are signed 64-bit numbers, as in torch's stores, so that every client can hold them."""


def checked_key(key: str) -> str:
    """Return `key`; TypeError unless it is a str, ValueError if it cannot be written as bytes."""
    if not isinstance(key, str) or not key.isascii():
        encoded_key(key)  # raises here, not in the middle of a batch
    return key


def encoded_key(key: str) -> bytes:
    """Return `key` as UTF-8, with the bytes that `decoded_key` found to be none; raises as `checked_key`."""
    if not isinstance(key, str):
        raise TypeError(f"a store key must be str, not {type(key).__name__}")
    try:
        return key.encode()
    except UnicodeEncodeError:
        return key.encode(errors="surrogateescape")


def decoded_key(key: bytes) -> str:
    """Return `key` as callers have it. What is no UTF-8 becomes lone surrogates, as in the names of files."""
    return key.decode(errors="surrogateescape")


def checked_keys(keys: Iterable[str]) -> list[str]:
    """Return `keys` as a list; TypeError for a single str, what is not iterable, or a member that is no str."""
    return [checked_key(key) for key in several(keys)]


def encoded_keys(keys: Iterable[str]) -> tuple[bytes, ...]:
    """Return each of `keys` as `encoded_key` does; raises as `checked_keys`."""
    return tuple([encoded_key(key) for key in several(keys)])


def several(items: Iterable[Item]) -> Iterable[Item]:
    """Return `items`; TypeError for what is not iterable, and for a single str or bytes, which is a mistake."""
    if type(items) is list:  # asking for its abstract class would take longer than all else here
        return items
    if isinstance(items, str | bytes | bytearray | memoryview) or not isinstance(items, Iterable):
        raise TypeError(f"store keys and values must be lists, not {type(items).__name__}")
    return items


def checked_value(value: str | bytes | bytearray | memoryview) -> bytes:
    """Return `value` as bytes the caller can no longer change (a str as UTF-8); TypeError for any other type."""
    if type(value) is bytes:
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a store value must be str or bytes, not {type(value).__name__}")


def checked_values(count: int, values: Iterable[str | bytes]) -> tuple[bytes, ...]:
    """Return `values` as bytes; ValueError unless there are `count`."""
    checked = tuple([checked_value(value) for value in several(values)])
    if len(checked) != count:
        raise ValueError(f"multi_set got {count} keys and {len(checked)} values")
    return checked


def checked_amount(amount: int) -> int:
    """Return `amount`; TypeError unless it is an int (bool is none), ValueError beyond 64 bits."""
    return checked_integer("a store counter's amount", amount)


def checked_integer(what: str, number: int) -> int:
    """Return `number` as a plain int; TypeError unless it is an int (bool is none), ValueError beyond 64 bits."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{what} must be int, not {type(number).__name__}")
    if not MIN_AMOUNT <= number <= MAX_AMOUNT:
        raise ValueError(f"{what} must fit 64 bits, got {number}")
    return int(number)  # the daemon takes no member of an IntEnum for an int
