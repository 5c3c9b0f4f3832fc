"""Checks every change of state of a send, a receive and a stream against the tables of `transport.protocol`.

`watch_states()` puts a property in the place of each `state` slot. Without it a change of state is a plain store.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from asyncdist.transport.protocol.operations import (
    RECEIVE_TRANSITIONS,
    SEND_TRANSITIONS,
    STREAM_TRANSITIONS,
    Receive,
    SendOp,
    Stream,
)

TABLES: Mapping[type, Mapping[int, Collection[int]]] = {
    SendOp: SEND_TRANSITIONS,
    Receive: RECEIVE_TRANSITIONS,
    Stream: STREAM_TRANSITIONS,
}

seen: set[tuple[type, Any, Any]] = set()
"""Every transition since the start: the class, from which state, to which."""


def _watched(owner: type, slot: Any, table: Mapping[int, Collection[int]]) -> property:
    def enter(operation: Any, state: Any) -> None:
        before = getattr(operation, "state", None)  # None: it is being made
        if before is not None:
            assert state in table.get(before, ()), f"a {owner.__name__} goes from {before!r} to {state!r}"
            seen.add((owner, before, state))
        slot.__set__(operation, state)

    return property(slot.__get__, enter)


def watch_states() -> None:
    """Fail on every change that is not in the tables, from now on. Idempotent."""
    for owner, table in TABLES.items():
        slot = vars(owner)["state"]
        if not isinstance(slot, property):
            setattr(owner, "state", _watched(owner, slot, table))  # noqa: B010
