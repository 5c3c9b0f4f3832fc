"""Checks every change of state of a send, a receive and a stream against tables.

`watch_states()` puts a property in the place of each `state` slot. Without it a change of state is a plain store.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from asyncdist.transport.protocol.operations import Receive, ReceiveState, SendOp, SendState, Stream, StreamState

_S, _R = SendState, ReceiveState

SEND_TRANSITIONS: Mapping[int, Collection[int]] = {
    _S.POSTED: (_S.EAGER, _S.HELD, _S.OFFERED, _S.STREAMING, _S.EXPOSED, _S.SENT),
    _S.EAGER: (_S.SENT, _S.FAILED, _S.WITHDRAWN, _S.DROPPED),
    _S.HELD: (_S.EAGER, _S.OFFERED, _S.STREAMING, _S.EXPOSED, _S.FAILED, _S.WITHDRAWN, _S.DROPPED),
    _S.OFFERED: (_S.STREAMING, _S.EXPOSED, _S.SENT, _S.FAILED, _S.WITHDRAWN, _S.DROPPED),
    _S.STREAMING: (_S.SENT, _S.FAILED, _S.DROPPED),
    _S.EXPOSED: (_S.STREAMING, _S.SENT, _S.FAILED, _S.DROPPED),
}
"""From each state of a send to those that may follow. No other state has any."""

RECEIVE_TRANSITIONS: Mapping[int, Collection[int]] = {
    _R.POSTED: (_R.PULLED_EARLY, _R.STREAMING, _R.RECEIVED, _R.FAILED, _R.WITHDRAWN, _R.DROPPED),
    _R.PULLED_EARLY: (_R.POSTED, _R.STREAMING, _R.FAILED, _R.DROPPED),
    _R.STREAMING: (_R.RECEIVED, _R.FAILED, _R.DROPPED),
}

STREAM_TRANSITIONS: Mapping[int, Collection[int]] = {
    StreamState.TRAVELS: (StreamState.COPYING,),
    StreamState.COPYING: (StreamState.COPIED, StreamState.REFUSED),
}

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
