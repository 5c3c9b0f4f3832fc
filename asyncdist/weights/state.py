"""State: what a name's publishers and subscribers agree on. One key of the store, changed by compare_set only."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import msgpack

from asyncdist.errors import RemoteProtocolError, StoreTimeoutError
from asyncdist.store import Store
from asyncdist.weights.members import followed_values
from asyncdist.weights.staging import Ref

KEY: Final = "state"


@dataclass(frozen=True, slots=True)
class State:
    """`epoch` counts publishers, `owner` is the mark of the one that may change it, `step` counts changes.

    Subscribers stage the version `staged` and serve the version `committed`.
    """

    step: int = 0
    epoch: int = 0
    owner: bytes = b""
    committed: Ref | None = None
    staged: Ref | None = None

    def pack(self) -> bytes:
        """Encode."""
        row = [self.step, self.epoch, self.owner, self.committed, self.staged]
        packed: bytes = msgpack.packb(row)
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Decode. Raises RemoteProtocolError for what is none."""
        try:
            step, epoch, owner, committed, staged = msgpack.unpackb(packed)
            if not (type(step) is type(epoch) is int and isinstance(owner, bytes)):
                raise ValueError(f"step {step!r}, epoch {epoch!r}")
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(f"the store has another state of weights than was put there: {error}") from None
        return cls(step, epoch, owner, Ref.of(committed), Ref.of(staged))

    def taken_over(self) -> State:
        """A new publisher comes: whoever published before can change nothing any more."""
        return self.next(epoch=self.epoch + 1, owner=secrets.token_bytes(8), staged=None)

    def next(self, **changes: Any) -> State:
        """The state after a change."""
        return replace(self, step=self.step + 1, **changes)


EMPTY: Final = State()


async def read(view: Store) -> State:
    """The state now."""
    try:
        return State.unpack(await view.get(KEY, timeout=0))
    except StoreTimeoutError:
        return EMPTY


async def change(view: Store, old: State, new: State) -> bool:
    """Change the state from `old` to `new`; False if it was another one. New states are never alike."""
    expected = b"" if old == EMPTY else old.pack()
    return bytes(await view.compare_set(KEY, expected, new.pack())) == new.pack()


async def followed(view: Store) -> AsyncGenerator[State]:
    """The state now, and each that follows, older ones never after newer ones."""
    step = -1
    async with contextlib.aclosing(followed_values(view, KEY, State.unpack)) as every:
        async for values in every:
            state = values.get(KEY, EMPTY)
            if state.step > step:
                step = state.step
                yield state
