"""What peers of a name say of themselves in the store, and what others read there; `peer.py` has the keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final, NamedTuple, Self, TypeVar

import msgpack

from asyncdist.errors import WatchCompactedError
from asyncdist.store import PrefixStore, Store

T = TypeVar("T")

BROKEN: Final = (ValueError, TypeError, msgpack.UnpackException)
"""What msgpack, and who takes its values apart, raises for bytes of others."""


class Member(NamedTuple):
    """What a peer says of itself. `has` are ids of versions that others can get of it, `gets` the one it wants;
    negative once it fetches it from another host.

    `serves` is the id of the version it serves, -1 for a publisher; `failed` that of one it cannot, and `why`.
    """

    label: str
    host: str
    address: bytes
    has: tuple[int, ...] = ()
    gets: int = 0
    serves: int = 0
    failed: int = 0
    why: str = ""

    @property
    def subscribes(self) -> bool:
        """Whether it is a subscriber."""
        return self.serves >= 0

    def pack(self) -> bytes:
        """Encode."""
        packed: bytes = msgpack.packb(list(self))
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Self | None:
        """Decode; None for what is none."""
        try:
            label, host, address, has, *rest = msgpack.unpackb(packed)
            return cls(label, host, address, tuple(has), *rest)
        except BROKEN:
            return None


def view_of(store: Store, name: str) -> PrefixStore:
    """The keys of the weights of that name."""
    return PrefixStore(f"weights/{name}", store)


async def values_of(view: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """The values of those of `keys` that are there."""
    found = await asyncio.gather(*[view.get(key, timeout=0) for key in keys], return_exceptions=True)
    for value in found:
        if isinstance(value, BaseException) and not isinstance(value, TimeoutError):
            raise value
    return {key: value for key, value in zip(keys, found, strict=True) if isinstance(value, bytes)}


async def members_of(view: Store, ranks: Sequence[int] | None = None) -> dict[int, Member]:
    """All peers, or those of `ranks`, by rank."""
    found = {}
    keys = await view.list_keys("members/") if ranks is None else [f"members/{rank}" for rank in ranks]
    for key, value in (await values_of(view, keys)).items():
        member = Member.unpack(value)
        if member is not None:
            found[int(key.removeprefix("members/"))] = member
    return found


async def followed_values(view: Store, prefix: str, decode: Callable[[bytes], T]) -> AsyncGenerator[dict[str, T]]:
    """What the keys below `prefix` hold now, by key, and again after each change."""
    while True:
        async with view.watch(prefix) as watch:
            values = await values_of(view, await view.list_keys(prefix))
            found = {key: decode(value) for key, value in values.items()}
            with contextlib.suppress(WatchCompactedError):
                while True:
                    yield found
                    event = await anext(watch)
                    found.pop(event.key, None)
                    if event.kind == "set":
                        found[event.key] = decode(event.value)
